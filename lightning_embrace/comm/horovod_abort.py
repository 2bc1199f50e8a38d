"""Keeps Horovod from aborting the process while it starts.

When a connection breaks or a peer does not come, Horovod's thread throws, nobody catches it, and C++ aborts: nothing
can be raised, and nobody is named. Here the thread that has thrown stays where it is, and the one that waits for it is
told.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_HANDLER = ctypes.CFUNCTYPE(None)
#: handlers that a thread may still be in, or come to
_kept: list[Any] = []


@contextmanager
def abort_averted() -> Iterator[threading.Event]:
    """What C++ does when nobody catches an exception is for a while nothing, for ever, in the thread that threw it.

    It stays so when the body raises, or a thread has thrown: others may follow. Such a process must not wait for its
    threads when it ends.

    Yields:
        An event that is set as soon as a thread has thrown. Never where the C++ library is not GNU's.
    """
    thrown = threading.Event()

    def stay() -> None:
        thrown.set()
        while True:  # whoever returns from here aborts the process
            time.sleep(3600.0)

    handler = _HANDLER(stay)
    _kept.append(handler)
    set_terminate = _set_terminate()
    before = set_terminate(ctypes.cast(handler, ctypes.c_void_p).value)
    yield thrown
    if not thrown.is_set():
        set_terminate(before)
        _kept.remove(handler)


def _set_terminate() -> Callable[[int | None], int | None]:
    """``std::set_terminate``: takes the address of a function, returns that of the one before."""
    try:
        function: Any = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):
        return lambda address: None
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_void_p
    return function  # type: ignore[no-any-return]
