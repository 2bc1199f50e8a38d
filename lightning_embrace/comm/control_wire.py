"""One connection of the control channel: framed JSON over a socket, safe to fork, and how it is made and ends."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import struct
import time
import weakref
from typing import Any

_FRAME_LIMIT = 1 << 16  # a longer frame is not ours
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}  # a powered-off machine shows after 40 s

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_forked_children(sock: socket.socket) -> None:
    """Keeps a socket from living on in a child forked later.

    A data loader's worker holding a copy would keep its dead parent's connections open, and nobody would see the
    end-of-file.
    """
    _sockets.add(sock)


class Wire:
    """Length-prefixed JSON over one socket.

    Args:
        sock: A connected socket.
        rank: Who is at the other end; ``None`` for a stranger.
    """

    def __init__(self, sock: socket.socket, rank: int | None = None) -> None:
        self.socket = sock
        self.rank = rank
        self.born = time.monotonic()
        self._buffer = bytearray()
        close_in_forked_children(sock)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):  # comforts, not needs
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEPALIVE.items():
                    if hasattr(socket, option):
                        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, message: dict[str, Any]) -> bool:
        """Sends without waiting, and says whether it could.

        A few small frames are all that a connection carries, so a peer's socket has room for them unless something is
        wrong; then it must not hold up the others.
        """
        data = json.dumps(message, ensure_ascii=False).encode(errors="replace")
        with contextlib.suppress(OSError):
            frame = struct.pack("!I", len(data)) + data
            return self.socket.send(frame, getattr(socket, "MSG_DONTWAIT", 0)) == len(frame)
        return False

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages completed by one read; raises EOFError at the end and ValueError for garbage."""
        try:
            chunk = self.socket.recv(_FRAME_LIMIT)
        except BlockingIOError:
            return []
        if not chunk:
            raise EOFError
        self._buffer += chunk
        messages = []
        while len(self._buffer) >= 4:
            (size,) = struct.unpack_from("!I", self._buffer)
            if size > _FRAME_LIMIT:
                raise ValueError(f"a frame of {size} bytes")
            if len(self._buffer) < 4 + size:
                break
            try:
                message = json.loads(bytes(self._buffer[4 : 4 + size]))
            except RecursionError as error:
                raise ValueError("too deeply nested") from error
            if not isinstance(message, dict):
                raise ValueError("not an object")
            messages.append(message)
            del self._buffer[: 4 + size]
        return messages

    def close(self) -> None:
        """Ends the connection; may be called twice and from any thread."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that is reading, which close alone does not
        self.socket.close()


def listen_on(host: str, port: int, backlog: int) -> socket.socket:
    """Listens on the loopback address that ``host`` spells, else on all interfaces.

    A host's name is not looked up: on the main machine itself it often means a loopback address (127.0.1.1 in
    /etc/hosts), on which no other machine could reach it.
    """
    if _is_loopback(host):
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=backlog)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", port), backlog=backlog)
    listener.setblocking(False)
    close_in_forked_children(listener)
    return listener


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def connect(rank: int, host: str, port: int, deadline: float) -> socket.socket:
    """Connects to the hub, which may not listen yet: tries again until the deadline (of the monotonic clock)."""
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
            sock.settimeout(None)
            return sock
        except OSError as error:
            if time.monotonic() + 0.1 > deadline:
                raise ConnectionError(
                    f"rank {rank} could not reach the control channel of rank 0 at {host}:{port}: {error}. "
                    "HINT: is the main address right, and does a firewall let this port through?"
                ) from error
        time.sleep(0.1)


def how_it_ended(error: Exception) -> str:
    """Words for the end of a connection that was not agreed."""
    ended = isinstance(error, (EOFError, ConnectionResetError, BrokenPipeError))
    return "its process ended without a word" if ended else f"its connection was lost: {error}"


def _after_fork_in_child() -> None:
    # Closed, not shut down: the connection is the parent's.
    for sock in list(_sockets):
        sock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
