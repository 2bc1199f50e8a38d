"""Records spans while training runs, from any thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch

from lightning_embrace.monitor.span import Lane, Recording, Span, Value

now = time.perf_counter_ns
#: by how many steps an entry may stand behind those of later steps: a delayed exchange is issued in the next one
_LATE_STEPS = 2


def shown(name: str) -> AbstractContextManager[object]:
    """Shows what runs inside as ``embrace: <name>`` in torch's profiler, where one is on: to tell it costs time."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return torch.profiler.record_function(f"embrace: {name}")
    return nullcontext()


class Moment(NamedTuple):
    """When something was asked for, see :meth:`Timeline.moment`."""

    at: int
    step: int | None


class Recorder(Protocol):
    """What training tells of itself: to a :class:`Timeline`, or to a :class:`Profiled` that keeps nothing."""

    def at_step(self, step: int | None) -> None:
        """Notes the step of whatever begins from here on; None: outside training."""
        ...

    def span(self, name: str, lane: Lane, /, **args: Value) -> AbstractContextManager[object]:
        """Records what runs inside, and shows it in torch's profiler as ``embrace: <name>``.

        Args:
            name: What it is called.
            lane: ``"compute"`` or ``"waiting"``.
            **args: More to show with it; for waiting, ``group`` is the lane of what is waited for.
        """
        ...

    def in_background(self) -> None:
        """Call in a thread whose waiting holds nobody up: it is not recorded."""
        ...

    def moment(self) -> Moment:
        """Now; call it where an exchange is asked for that another thread will issue."""
        ...

    def queued_at(self, moment: Moment) -> AbstractContextManager[None]:
        """Exchanges that begin inside were asked for at that moment, and belong to its step."""
        ...


class Profiled:
    """Keeps no spans; torch's profiler sees them."""

    def at_step(self, step: int | None) -> None:
        """See :class:`Recorder`."""

    def span(self, name: str, lane: Lane, /, **args: Value) -> AbstractContextManager[object]:
        """See :class:`Recorder`."""
        return shown(name)

    def in_background(self) -> None:
        """See :class:`Recorder`."""

    def moment(self) -> Moment:
        """See :class:`Recorder`."""
        return Moment(0, None)

    def queued_at(self, moment: Moment) -> AbstractContextManager[None]:
        """See :class:`Recorder`."""
        return nullcontext()


class Timeline:
    """One rank's spans.

    Times are taken from a clock that never jumps and shown as wall time, so that recordings of ranks on different
    machines can be laid over each other as well as those machines' clocks agree.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        capacity: How many spans are kept: the newest.

    Attributes:
        clock_offset: Nanoseconds by which this machine's wall clock is known to be late; added to every time shown.
    """

    def __init__(self, rank: int, world_size: int, capacity: int = 1_000_000) -> None:
        self.rank = rank
        self.world_size = world_size
        self.clock_offset = 0
        self._to_wall = time.time_ns() - now()
        self._step: int | None = None
        self._entries: deque[Exchange | Span] = deque(maxlen=capacity)
        self._recorded = 0
        # reentrant: a signal's handler may record a span while its thread is recording one
        self._lock = threading.RLock()
        self._thread = threading.local()

    def at_step(self, step: int | None) -> None:
        """See :class:`Recorder`."""
        self._step = step

    @contextmanager
    def span(self, name: str, lane: Lane, /, **args: Value) -> Iterator[None]:
        """See :class:`Recorder`."""
        step, begin = self._step, now()
        try:
            with shown(name):
                yield
        finally:
            self._add_span(name, lane, begin, now(), step, args)

    def queued(self, name: str, lane: Lane, kind: str, nbytes: int, /, **args: Value) -> Exchange:
        """Begins the record of an exchange.

        Args:
            name: Its name.
            lane: ``"sparse group"`` or ``"dense group"``.
            kind: Its entry in :class:`~lightning_embrace.comm.traffic.Traffic`.
            nbytes: What this rank sends to others.
            **args: More to show with it.

        Returns:
            What is told of its progress.
        """
        queued: Moment | None = getattr(self._thread, "queued_at", None)
        exchange = Exchange(self, name, lane, kind, nbytes, queued or self.moment(), args)
        if queued is not None:
            exchange.started()
        self._add(exchange)
        return exchange

    def waited(self, name: str, begin: int, end: int, /, **args: Value) -> None:
        """Records that this thread stood still, unless it works in the background.

        torch's profiler is not told: handles do so themselves while they wait.

        Args:
            name: What for.
            begin: :func:`time.perf_counter_ns` before.
            end: The same after.
            **args: More to show with it.
        """
        if not getattr(self._thread, "in_background", False):
            self._add_span(name, "waiting", begin, end, self._step, args)

    def in_background(self) -> None:
        """See :class:`Recorder`."""
        self._thread.in_background = True

    def moment(self) -> Moment:
        """See :class:`Recorder`."""
        return Moment(now(), self._step)

    @contextmanager
    def queued_at(self, moment: Moment) -> Iterator[None]:
        """See :class:`Recorder`."""
        self._thread.queued_at = moment
        try:
            yield
        finally:
            self._thread.queued_at = None

    def recording(self, first_step: int | None = None) -> Recording:
        """What was recorded until now, with what is still in flight.

        Args:
            first_step: Leaves out earlier steps, and what is outside training.
        """
        shift = self._to_wall + self.clock_offset
        at = now()
        with self._lock:
            entries = tuple(self._entries if first_step is None else self._latest(first_step))
            dropped = self._recorded - len(self._entries)
        spans = [entry.shown(at, shift) if isinstance(entry, Exchange) else _shifted(entry, shift) for entry in entries]
        return Recording(self.rank, tuple(sorted(spans, key=lambda span: (span.first, -span.end))), dropped)

    def _latest(self, first_step: int) -> Iterator[Exchange | Span]:
        """Entries of that step and later ones, in time that does not grow with what came before."""
        for entry in reversed(self._entries):
            if entry.step is not None and entry.step < first_step - _LATE_STEPS:
                return
            if entry.step is not None and entry.step >= first_step:
                yield entry

    def _add_span(self, name: str, lane: Lane, begin: int, end: int, step: int | None, args: dict[str, Value]) -> None:
        self._add(Span(name, lane, begin, end, step, args=args))

    def _add(self, entry: Exchange | Span) -> None:
        with self._lock:
            self._entries.append(entry)
            self._recorded += 1


class Exchange:
    """The record of one exchange, see :meth:`Timeline.queued`. Of repeated news the first counts."""

    def __init__(
        self,
        timeline: Timeline,
        name: str,
        lane: Lane,
        kind: str,
        nbytes: int,
        queued: Moment,
        args: dict[str, Value],
    ) -> None:
        self.name, self.lane, self.step = name, lane, queued.step
        self._timeline = timeline
        self._kind, self._nbytes, self._args = kind, nbytes, args
        self._queued = queued.at
        self._started: int | None = None
        self._done: int | None = None
        self._error: str | None = None

    def started(self) -> None:
        """It is on the wire. Not told: it was from the beginning."""
        if self._started is None:
            self._started = now()

    def done(self) -> None:
        """It has ended. From any thread."""
        if self._done is None:
            self._done = now()

    def failed(self, error: BaseException) -> None:
        """It has ended with an exception. From any thread."""
        self.done()
        self._error = self._error or f"{type(error).__name__}: {error}"

    def waited(self, begin: int, end: int) -> None:
        """Records that this thread stood still for it, see :meth:`Timeline.waited`."""
        self._timeline.waited(f"wait {self.name}", begin, end, group=self.lane)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Records that this thread waits inside until the exchange has ended, well or badly."""
        begin = now()
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise
        finally:
            self.done()
            self.waited(begin, now())

    def shown(self, at: int, shift: int) -> Span:
        """The span.

        Args:
            at: Where it ends for now, if it is in flight.
            shift: Added to every time.
        """
        begin = self._queued if self._started is None else self._started
        done, args = self._done, dict(self._args)
        if done is None:
            args["unfinished"] = True
        if self._error is not None:
            args["error"] = self._error
        end = max(begin, at if done is None else done)
        return Span(
            self.name,
            self.lane,
            begin + shift,
            end + shift,
            self.step,
            self._kind,
            self._nbytes,
            self._queued + shift,
            args,
        )


def _shifted(span: Span, shift: int) -> Span:
    return Span(span.name, span.lane, span.begin + shift, span.end + shift, span.step, args=span.args)
