"""The hub of the control channel: one thread on rank 0 that every rank is connected to."""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import threading
import time
from typing import Any

from lightning_embrace.comm.control_wire import Wire, how_it_ended, listen_on
from lightning_embrace.comm.meeting import Attendance

_HELLO_SECONDS = 60.0  # how long a stranger may stay silent
_BYE_SECONDS = 0.9  # how long a closing hub waits for the ranks to hang up


class Hub:
    """Rank 0's switchboard: hears of every failure and death, and tells all other ranks of the first one.

    It serves until rank 0's :class:`Control` is closed. With one rank there is neither a socket nor a thread.

    Args:
        world_size: The number of ranks.
        host: The main address, as the ranks will use it.
        port: The port to listen on; 0 takes a free one.

    Attributes:
        port: The port it listens on.
        token: The secret that a rank must know in order to join.
    """

    def __init__(self, world_size: int, host: str = "127.0.0.1", port: int = 0) -> None:
        self.world_size = world_size
        self.port = port
        self.token = secrets.token_hex(16)
        self._failure: dict[str, Any] | None = None
        self._attendance = Attendance(world_size)
        self._closing_until: float | None = None
        if world_size == 1:
            return
        self._listener = listen_on(host, port, backlog=world_size + 16)
        self.port = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        inside, outside = socket.socketpair()
        outside.setblocking(True)
        self.local = Wire(outside)  # rank 0's own connection: it may not be able to reach itself by the main address
        self._admit(Wire(inside, rank=0))
        threading.Thread(target=self._run, name="lightning_embrace-hub", daemon=True).start()

    def close(self) -> None:
        """Ends a hub that no Control has been made for; otherwise ``Control.close`` does it."""
        if self.world_size > 1:
            self.local.send({"type": "bye"})
            self.local.close()

    @property
    def _wires(self) -> list[Wire]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _run(self) -> None:
        try:
            while self._closing_until is None or (len(self._wires) > 1 and time.monotonic() < self._closing_until):
                for key, _ in self._selector.select(10.0 if self._closing_until is None else 0.1):
                    if key.data is None:
                        self._accept()
                    elif key.data.socket.fileno() >= 0:  # not dropped by an earlier event of this round
                        self._serve(key.data)
                for wire in self._wires:
                    if wire.rank is None and wire.born + _HELLO_SECONDS < time.monotonic():
                        self._drop(wire)
        finally:  # should this thread break, the ranks see an end-of-file and name rank 0: nobody hangs
            for wire in self._wires:
                wire.close()
            self._listener.close()
            self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the caller has gone again; or no descriptors are left, then do not spin
            time.sleep(0.05)
            return
        self._admit(Wire(sock))

    def _admit(self, wire: Wire) -> None:
        wire.socket.setblocking(False)
        self._selector.register(wire.socket, selectors.EVENT_READ, wire)

    def _serve(self, wire: Wire) -> None:
        try:
            messages = wire.receive()
        except (OSError, EOFError, ValueError) as error:
            self._drop(wire, error)
            return
        for message in messages:
            kind = message.get("type")
            if wire.rank is None:
                refusal = self._examine(message)
                if refusal is not None:
                    wire.send({"type": "refused", "reason": refusal})
                    self._drop(wire)
                    return
                wire.rank = message["rank"]
                wire.send({"type": "welcome"})
                if self._failure is not None:
                    wire.send(self._failure)
            elif kind == "failure":
                self._announce(message | {"rank": wire.rank})
                wire.send({"type": "heard"})
            elif kind in ("words", "roll", "here"):
                there = {other.rank: other for other in self._wires}
                for rank, answer in self._attendance.answers(wire.rank, message):
                    if rank in there:
                        there[rank].send(answer)
            elif kind == "bye" and wire.rank == 0:
                self._say_bye()
            elif kind == "bye":
                wire.send({"type": "bye"})
                self._drop(wire)
                return

    def _examine(self, hello: dict[str, Any]) -> str | None:
        """Returns why a stranger may not join, or None."""
        token = str(hello.get("token")).encode(errors="replace")
        if not hmac.compare_digest(token, self.token.encode()):
            return "wrong token"
        rank = hello.get("rank")
        if type(rank) is not int or not 0 < rank < self.world_size:
            return f"there is no rank {rank} to join a world of {self.world_size}"
        if any(wire.rank == rank for wire in self._wires):
            return f"rank {rank} is here already"
        return None

    def _announce(self, failure: dict[str, Any]) -> None:
        if self._failure is not None:  # what fails after the first failure is most often its consequence
            return
        self._failure = failure
        for wire in self._wires:
            if wire.rank not in (None, failure["rank"]):
                wire.send(failure)

    def _drop(self, wire: Wire, error: Exception | None = None) -> None:
        self._selector.unregister(wire.socket)
        wire.close()
        if error is not None and wire.rank is not None and self._closing_until is None:
            self._announce({"type": "failure", "rank": wire.rank, "died": True, "reason": how_it_ended(error)})

    def _say_bye(self) -> None:
        """Rank 0 leaves, and with it the hub: after a bye to all, nobody takes the end-of-file for a death."""
        self._closing_until = time.monotonic() + _BYE_SECONDS
        self._selector.unregister(self._listener)
        self._listener.close()
        for wire in self._wires:
            if wire.rank is None:
                self._drop(wire)
            else:
                wire.send({"type": "bye"})
