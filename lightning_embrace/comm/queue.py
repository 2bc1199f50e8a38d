"""The low-priority queue: AllReduces of dense blocks in chunks, and delayed gradient rows, in one order everywhere."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lightning_embrace.comm.base import Communicator, Handle
from lightning_embrace.comm.control import RankFailedError
from lightning_embrace.comm.torch_backend import ExchangeError
from lightning_embrace.monitor.timeline import Moment, Profiled, Recorder

#: how long a chunk stays back while urgent exchanges are under way, in seconds, beside the time that their bytes take.
#: They begin when all ranks are there (a header comes before each), so that the wire is not idle meanwhile
PAUSE_SECONDS = 50e-3
#: exchanges on the wire at the same time: two keep the link busy while the next one is prepared
_IN_FLIGHT = 2
#: what an exchange counts for the rate, of what the one after it does
_MEMORY = 0.8


class Slot:
    """One exchange in its place in the queue.

    Args:
        issue: Starts the exchange. The queue's thread calls it, when it is this slot's turn and its data are there.
        what: The exchange's name, for the timeline.
        nbytes: Its size, where it counts for :attr:`LowPriorityQueue.rate`.
        alone: It begins when those before it have ended: an AllReduce takes many small hops, one after the other, and
            beside an AlltoAll each would wait behind a large message.
    """

    def __init__(self, issue: Callable[[], Handle], what: str, nbytes: int = 0, alone: bool = False) -> None:
        self.issue = issue
        self.what = what
        self.nbytes = nbytes
        self.alone = alone
        #: when its data were there
        self.asked: Moment | None = None
        #: gets to know who waits for the queue's thread
        self.recorder: Recorder = Profiled()
        self.ready = False
        self.issued_at = 0.0
        #: on CUDA: what the data wait for
        self.computed: torch.cuda.Event | None = None
        #: the exchange itself, where no thread waits for it
        self.handle: Handle | None = None
        self._done = threading.Event()
        self._result: Tensor | None = None
        self._error: BaseException | None = None

    def is_done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._done.is_set() or self.handle is not None

    def wait(self) -> Tensor:
        """Blocks until the exchange is done.

        Returns:
            What was received.

        Raises:
            RankFailedError: Another rank failed.
            ExchangeError: This exchange failed, or the named one before it.
            RuntimeError: The queue has ended.
        """
        if self.handle is not None:
            return self.handle.wait()
        with self.recorder.span(f"wait {self.what}", "waiting", group="dense group"):
            self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def finish(self, result: Tensor | None, error: BaseException | None) -> None:
        """The exchange has ended; called by the queue's thread."""
        self._result, self._error = result, error
        self._done.set()


class LowPriorityQueue:
    """Issues slots strictly in the order in which they were appended, each when its data are there.

    Every rank appends the same slots in the same order, so no rank's timing can pair different exchanges. Before every
    slot it gives way to urgent exchanges for a bounded time.

    Args:
        comm: Carries the exchanges.
        pause: Longest time to give way, in seconds, beside what is given way to.
        recorder: Gets to know when slots were ready, and who waits for them.
    """

    def __init__(self, comm: Communicator, pause: float = PAUSE_SECONDS, recorder: Recorder | None = None) -> None:
        self._comm = comm
        self._recorder = recorder or Profiled()
        self._pause = pause
        self._slots: deque[Slot] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        #: bytes per second at which exchanges with a size have come through lately; 0: not known
        self.rate = 0.0
        self._sent = 0
        #: seconds in which the wire was free and something was ready, but not what is next; and since when it is
        self._starved = 0.0
        self._starving_since: float | None = None
        self._free_at = 0.0
        self._landed = self._took = 0.0

    def append(self, slots: Iterable[Slot]) -> None:
        """Adds slots at the end."""
        with self._changed:
            for slot in slots:
                slot.recorder = self._recorder
                self._slots.append(slot)
            self._changed.notify()
            if self._closed:
                self._refuse_waiting()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="embrace-low-priority", daemon=True)
            self._thread.start()

    def ready(self, slot: Slot) -> None:
        """The data of a slot are there."""
        if self._comm.device.type == "cuda":
            slot.computed = torch.cuda.current_stream(self._comm.device).record_event()
        slot.asked = self._recorder.moment()
        with self._changed:
            slot.ready = True
            self._changed.notify()

    def restart(self) -> None:
        """Counts anew."""
        with self._changed:
            self._sent, self._starved = 0, 0.0

    def progress(self) -> int:
        """Bytes of slots that have gone on the wire since :meth:`restart`, or could have gone in another order.

        An order that keeps back what is there must not look, afterwards, as if there had been no time to send it.
        """
        with self._changed:
            starved = self._starved
            if self._starving_since is not None:
                starved += time.monotonic() - self._starving_since
            return self._sent + int(starved * self.rate)

    def close(self) -> None:
        """Ends the thread; what has not been issued never is. Also after a failure: waits for nothing.

        What is on the wire ends by itself, well or badly, and with it the thread.
        """
        with self._changed:
            self._closed = True
            self._refuse_waiting()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        self._recorder.in_background()
        device = self._comm.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            with torch.cuda.stream(torch.cuda.Stream(device)):
                self._work()
        else:
            self._work()

    def _work(self) -> None:
        flying: deque[tuple[Slot, Handle]] = deque()
        while (slot := self._next(flying)) is not None:
            while slot.alone and flying:
                self._land(flying)
            self._start(slot, flying)
            while len(flying) >= _IN_FLIGHT:
                self._land(flying)
        while flying:
            self._land(flying)

    def _refuse_waiting(self) -> None:
        while self._slots:
            self._slots.popleft().finish(None, self._failure or _ended())

    def _next(self, flying: deque[tuple[Slot, Handle]]) -> Slot | None:
        """The next slot, when it is ready; sees to what is in flight meanwhile."""
        while True:
            with self._changed:
                if self._closed:
                    return None
                if self._slots and self._slots[0].ready:
                    return self._slots.popleft()
                if not flying:
                    self._wait_for_change()
                    continue
            self._land(flying)

    def _wait_for_change(self) -> None:
        if any(slot.ready for slot in self._slots):
            self._starving_since = time.monotonic()
        self._changed.wait()
        if self._starving_since is not None:
            self._starved += time.monotonic() - self._starving_since
            self._starving_since = None

    def _start(self, slot: Slot, flying: deque[tuple[Slot, Handle]]) -> None:
        if self._failure is None:
            try:
                if slot.computed is not None:
                    slot.computed.wait()
                self._comm.give_way(self._pause, self.rate)
                assert slot.asked is not None
                with self._recorder.queued_at(slot.asked):
                    flying.append((slot, slot.issue()))
                slot.issued_at = time.monotonic()
                with self._changed:
                    self._sent += slot.nbytes
                return
            except BaseException as error:  # raised in the main thread, by whoever waits
                self._fail(slot, error)
        slot.finish(None, self._failure)

    def _land(self, flying: deque[tuple[Slot, Handle]]) -> None:
        slot, handle = flying.popleft()
        try:
            result = handle.wait()
            self._measure(slot)
            slot.finish(result, None)
        except BaseException as error:
            self._fail(slot, error)
            slot.finish(None, self._failure)

    def _fail(self, slot: Slot, error: BaseException) -> None:
        """Nothing is issued any more. The first failure counts: it is the one that others follow from."""
        if self._failure is None:
            self._failure = _named(error, slot.what)
            if not self._closed:
                self._comm.fail(self._failure)

    def _measure(self, slot: Slot) -> None:
        now = time.monotonic()
        seconds = now - max(slot.issued_at, self._free_at)  # the one before had a share of the wire until then
        self._free_at = now
        if slot.nbytes:
            # a quotient of sums: two that share the wire end together, the second one in no time, as it seems
            self._landed = _MEMORY * self._landed + slot.nbytes
            self._took = _MEMORY * self._took + seconds
            self.rate = self._landed / self._took if self._took > 0 else 0.0


class InlineQueue:
    """Issues a slot as soon as it and those before it are ready, in the calling thread: for one rank, and for tests."""

    rate = 0.0

    def __init__(self) -> None:
        self._slots: deque[Slot] = deque()

    def append(self, slots: Iterable[Slot]) -> None:
        """Adds slots at the end."""
        self._slots.extend(slots)

    def ready(self, slot: Slot) -> None:
        """The data of a slot are there."""
        slot.ready = True
        while self._slots and self._slots[0].ready:
            first = self._slots.popleft()
            first.handle = first.issue()

    def restart(self) -> None:
        """Nothing is counted."""

    def progress(self) -> int:
        """Nothing is counted: nothing ever waits for the wire."""
        return 0

    def close(self) -> None:
        """There is no thread to end, but there may be others who wait."""
        while self._slots:
            self._slots.popleft().finish(None, _ended())


def _ended() -> RuntimeError:
    return RuntimeError("The training has ended, and with it the exchanges that were still waiting.")


def _named(error: BaseException, what: str) -> BaseException:
    if isinstance(error, (RankFailedError, ExchangeError)):
        return error
    named = ExchangeError(f"The exchange {what!r} failed: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named
