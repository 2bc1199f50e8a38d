"""The control channel: a rank that fails or dies is named to every other rank, so that nobody hangs.

A hub in rank 0's process holds one TCP connection to every rank; what runs through them:

========  ==========  =====================================================
message   direction   meaning
========  ==========  =====================================================
hello     rank → hub  rank and token; a connection without them is a stranger
welcome   hub → rank  the hub watches this rank from now on
refused   hub → rank  the hello was not accepted, and why
failure   both        a rank failed; the hub passes the first one on to all others
heard     hub → rank  the failure has been passed on
bye       both        an orderly end: the end-of-file that follows is no death
========  ==========  =====================================================

Ranks that wait for each other's files meet here as well, see `meeting`.

A death is an end-of-file without a bye: the kernel closes a dead process's connections, and keeps those of a process
that is merely starved, stopped or holding the interpreter lock. No timer can tell these two apart, so there is none.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from lightning_embrace.comm.control_hub import Hub
from lightning_embrace.comm.control_wire import Wire, connect, how_it_ended
from lightning_embrace.comm.meeting import Meeting

__all__ = ["Control", "Hub", "RankFailedError"]

_REASON_LIMIT = 1500  # characters: all frames of a connection together fit in its socket's buffer, see Wire.send
_EXCHANGE_LIMIT = 200
_ANSWER_SECONDS = 0.9  # how long a report waits to be heard
_BYE_SECONDS = 1.8  # how long a goodbye waits for the hub's; on rank 0 that is after all ranks have hung up


class RankFailedError(RuntimeError):
    """Another rank failed or died.

    Attributes:
        rank: The rank that failed.
        step: The step it was in; for a dead rank, which cannot say, the step that this rank was in. ``None`` before
            the first step.
        exchange: The exchange that it entered last, likewise. ``None`` before the first exchange.
        reason: What it raised, or how its connection ended.
        died: Whether it ended without reporting.
    """

    def __init__(self, rank: int, step: int | None, exchange: str | None, reason: str, died: bool = False) -> None:
        where = "before the first exchange" if exchange is None else f"in or after exchange {exchange!r}"
        if step is not None:
            where = f"at step {step}, {where}"
        message = f"rank {rank} died ({reason}) while this rank was {where}" if died else ""
        message = message or f"rank {rank} failed {where}: {reason}"
        super().__init__(message)
        self.rank, self.step, self.exchange, self.reason, self.died = rank, step, exchange, reason, died

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.step, self.exchange, self.reason, self.died)


class Control:
    """One rank's end of the control channel. With one rank it does nothing.

    Once it is constructed, the hub watches this rank. The thread that listens writes what it learns to stderr at once:
    whoever kills this process next, the message is out.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        host: The main address.
        port: The hub's port.
        token: The hub's token.
        hub: The hub itself, on rank 0.
        connect_timeout: Seconds in which the hub must be reached.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        hub: Hub | None = None,
        connect_timeout: float = 60.0,
    ) -> None:
        if world_size > 1 and (rank == 0) != (hub is not None):
            raise ValueError(f"the hub belongs to rank 0 and to no other; got rank {rank} and hub={hub}")
        self.rank = rank
        self._exchange: str | None = None
        self._step: int | None = None
        self._failure: RankFailedError | None = None
        self._own: BaseException | None = None
        self._learned, self._joined, self._heard = threading.Event(), threading.Event(), threading.Event()
        self._refusal: str | None = None
        self._reported = self._closing = False
        self._on_failure: list[Callable[[], None]] = []
        self._wire: Wire | None = None
        if world_size == 1:
            return
        deadline = time.monotonic() + connect_timeout
        if hub is None:
            self._wire = Wire(connect(rank, host, port, deadline))
            self._wire.send({"type": "hello", "rank": rank, "token": token})
        else:
            self._wire = hub.local
            self._joined.set()
        self._meeting = Meeting(world_size, self._wire.send)
        self._thread = threading.Thread(
            target=self._listen, args=(self._wire,), name="lightning_embrace-control", daemon=True
        )
        self._thread.start()
        if not self._joined.wait(max(0.0, deadline - time.monotonic())):
            self._refusal = f"no answer within {connect_timeout:g} s"
        if self._refusal is not None:
            self._closing = True
            reason = self._refusal
            self._wire.close()
            raise ConnectionError(
                f"rank {rank} could not join the control channel at {host}:{port}: {reason}. "
                "HINT: does another job listen on this address?"
            )

    @property
    def failure(self) -> RankFailedError | None:
        """The first failure of another rank, if one is known."""
        return self._failure

    @property
    def step(self) -> int | None:
        """The step that this rank is in, None before the first one."""
        return self._step

    def at(self, exchange: str) -> None:
        """Notes the exchange that this rank enters; it is told only should this rank fail."""
        self._exchange = exchange

    def at_step(self, step: int) -> None:
        """Notes the step that this rank enters, likewise."""
        self._step = step

    def when_failed(self, call: Callable[[], None]) -> None:
        """Calls ``call`` in a thread of its own once another rank has failed; twice if it fails just now."""
        self._on_failure.append(call)
        if self._failure is not None:
            self._call(call)

    def check(self) -> None:
        """Raises the failure of another rank, or of another thread of this one, if one is known."""
        if self._own is not None:
            raise self._own
        if self._failure is not None:
            # A new one every time: a shared exception would gather the tracebacks and contexts of all who raised it.
            raise RankFailedError(*self._failure.__reduce__()[1])

    def wait_for_failure(self, timeout: float) -> RankFailedError | None:
        """Waits up to ``timeout`` seconds for another rank's failure, to name the cause of a broken exchange."""
        if self._wire is not None:
            self._learned.wait(timeout)
        return self._failure

    def fail_here(self, exception: BaseException) -> None:
        """A thread of this rank has failed while the one that trains may be waiting: :meth:`check` raises it there."""
        if self._own is None and not _was_caused_by_rank(exception):
            self._own = exception
        self.report(exception)

    def report(self, exception: BaseException) -> None:
        """Tells all ranks, once, that this one failed; returns when they have been told, or after a second at most.

        What another rank's failure caused here is not told: that rank is the one to name. An error of the transport
        often is such a consequence and may be faster than the news of its cause: ``wait_for_failure`` first.
        """
        if self._wire is None or self._reported or self._closing:
            return
        self._reported = True
        if self._failure is not None or _was_caused_by_rank(exception):
            return
        message = {
            "type": "failure",
            "step": self._step,
            "exchange": self._exchange and self._exchange[:_EXCHANGE_LIMIT],
            "reason": "".join(traceback.format_exception_only(exception)).strip()[:_REASON_LIMIT],
        }
        # The answer is waited for, because a process that ends with something unread may reset its connection, which
        # can take along what was still on its way.
        if self._wire.send(message):
            self._heard.wait(_ANSWER_SECONDS)

    def gather(self, words: list[int | str], what: str, timeout: float) -> list[list[Any]]:
        """Tells every rank a few words, and waits for theirs while all processes are alive. Collective.

        Args:
            words: What this rank says, as JSON has it.
            what: What the ranks do, for errors.
            timeout: How many seconds a process may take to answer whether it is alive, once they have been waited for.

        Returns:
            The words by rank.

        Raises:
            RankFailedError: Another rank failed.
            RuntimeError: Another rank's process does not answer, or some ranks do something else.
        """
        if self._wire is None:
            return [words]
        self.check()
        self.at(what)
        return self._meeting.gather(words, what, timeout, self.check)

    def close(self) -> None:
        """Says goodbye, so that this rank's end is no death; on rank 0 the hub says it to all. Takes 2 s at most."""
        if self._wire is None or self._closing:
            return
        self._closing = True
        self._wire.send({"type": "bye"})
        self._thread.join(_BYE_SECONDS)  # it ends with the hub's bye
        self._wire.close()

    def _listen(self, wire: Wire) -> None:
        try:
            while True:
                for message in wire.receive():
                    kind = message.get("type")
                    if kind == "welcome":
                        self._joined.set()
                    elif kind == "failure":
                        self._learn(message)
                    elif kind == "heard":
                        self._heard.set()
                    elif kind in ("gathered", "roll", "here"):
                        self._meeting.hear(message)
                    elif kind == "refused":
                        self._refusal = str(message.get("reason"))
                        return
                    elif kind == "bye" and self.rank != 0:  # rank 0 stays until its hub has closed all connections
                        return
        except (OSError, EOFError, ValueError) as error:
            if not self._joined.is_set():
                self._refusal = f"no answer, and then {how_it_ended(error)}"
            elif not self._closing:
                self._learn({"rank": 0, "died": True, "reason": how_it_ended(error)})
        finally:
            wire.close()
            self._heard.set()
            self._joined.set()

    def _learn(self, message: dict[str, Any]) -> None:
        if self._failure is not None:
            return
        died = bool(message.get("died"))
        if died:
            exchange, step = self._exchange, self._step
        else:
            exchange, step = message.get("exchange"), message.get("step")
        failure = RankFailedError(message["rank"], step, exchange, str(message.get("reason")), died)
        with contextlib.suppress(Exception):  # a closed stderr must not keep the failure from being known
            sys.stderr.write(f"[lightning_embrace] rank {self.rank}: {' '.join(str(failure).split())}\n")
            sys.stderr.flush()
        self._failure = failure
        self._learned.set()
        for call in self._on_failure:
            self._call(call)

    @staticmethod
    def _call(call: Callable[[], None]) -> None:
        threading.Thread(target=call, name="lightning_embrace-failure", daemon=True).start()


def _was_caused_by_rank(exception: BaseException | None) -> bool:
    while exception is not None:
        if isinstance(exception, RankFailedError):
            return True
        exception = exception.__cause__ or exception.__context__
    return False
