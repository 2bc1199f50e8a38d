"""What the Linux kernel offers to a process and Python does not."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from pathlib import Path

NAMESPACES = Path("/var/run/netns")  # where `ip netns` keeps them by name

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_RDONLY, _MS_REC, _MS_SLAVE, _MNT_DETACH = 1, 16384, 1 << 19, 2
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent's thread that started it is gone, be it by SIGKILL.

    Args:
        parent: Its process id. Where it is gone already, this process ends at once.
    """
    _call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def enter_network(namespace: str) -> None:
    """Moves this process into a network namespace, as ``ip netns exec`` does.

    ``/sys`` shows the network of the process that mounted it, so it is mounted anew, for this process alone.

    Args:
        namespace: Its name.
    """
    with (NAMESPACES / namespace).open() as file:
        _call("setns", file.fileno(), _CLONE_NEWNET)
    read_only = _MS_RDONLY if os.statvfs("/sys").f_flag & os.ST_RDONLY else 0
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"", b"/", None, ctypes.c_ulong(_MS_SLAVE | _MS_REC), None)
    _call("umount2", b"/sys", _MNT_DETACH)
    _call("mount", namespace.encode(), b"/sys", b"sysfs", ctypes.c_ulong(read_only), None)


def address_towards(other: str) -> str:
    """This process' address on the way to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing
        address: str = probe.getsockname()[0]
    return address


def take_host_name(name: str) -> None:
    """Gives this process, and nothing else on the machine, a host name."""
    _call("unshare", _CLONE_NEWUTS)
    socket.sethostname(name)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")
