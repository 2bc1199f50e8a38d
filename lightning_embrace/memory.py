"""How much memory this process may still take, and what is refused because it would take more."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lightning_embrace.sizes import human_bytes

#: where nothing says how much there is
UNKNOWN = -1
_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """The smallest of what the machine, its control group and this process' own limits leave; or ``UNKNOWN``."""
    left = list(_left())
    return max(0, min(left)) if left else UNKNOWN


def check_room(need: int, available: int, what: str, cure: str) -> None:
    """Refuses what does not fit into memory. Call it with the same numbers on every rank.

    Args:
        need: Bytes that it takes.
        available: Bytes that there are, or ``UNKNOWN``.
        what: What is to be put there, and where.
        cure: What to write instead.

    Raises:
        ValueError: It does not fit.
    """
    if available != UNKNOWN and need > available:
        raise ValueError(f"{what} takes {human_bytes(need)}, and {human_bytes(available)} of memory are left. {cure}")


def _left() -> Iterator[int]:
    yield from _of_the_machine()
    yield from _of_the_control_group()
    yield from _of_this_process()


def _of_the_machine() -> Iterator[int]:
    for name, value in _fields("/proc/meminfo"):
        if name == "MemAvailable":
            yield value


def _of_the_control_group() -> Iterator[int]:
    """Version 2; every group above has a limit of its own."""
    with suppress(OSError, ValueError):
        path = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
        here = _CGROUPS / path
        for folder in [here, *here.parents]:
            limit = folder / "memory.max"
            if not limit.is_file():
                break
            if (text := limit.read_text().strip()) != "max":
                # pages of files that were not read lately are given up when memory is needed
                files = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / "memory.current").read_text()) - int(files.get("inactive_file", 0))
                yield int(text) - used


def _of_this_process() -> Iterator[int]:
    used = dict(_fields("/proc/self/status"))
    for kind, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY and name in used:
            yield limit - used[name]


def _fields(path: str) -> Iterator[tuple[str, int]]:
    """Lines such as ``VmData:  1234 kB``, in bytes."""
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith(" kB"):
                yield name, int(rest.split()[0]) << 10
