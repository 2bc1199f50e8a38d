"""What memory is left, by the process' own limits too; and what is refused for want of it."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from lightning_embrace.memory import UNKNOWN, available_bytes, check_room


@pytest.fixture
def limits() -> Iterator[None]:
    kinds = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
    before = [resource.getrlimit(kind) for kind in kinds]
    yield
    for kind, limit in zip(kinds, before):
        resource.setrlimit(kind, limit)


def used(name: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


@pytest.mark.parametrize(("kind", "name"), [(resource.RLIMIT_DATA, "VmData:"), (resource.RLIMIT_AS, "VmSize:")])
def test_limits_of_the_process(limits: None, kind: int, name: str) -> None:
    """What a limit leaves counts where it is less than what the machine has."""
    machine = available_bytes()
    assert machine > 50_000_000
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (used(name) + 40_000_000, hard))
    assert 20_000_000 < available_bytes() < 45_000_000
    resource.setrlimit(kind, (used(name) - 4096, hard))
    assert available_bytes() == 0


def test_check_room() -> None:
    """Refused only where it is known not to fit; with the numbers and the cure."""
    check_room(10, 10, "This", "Do that.")
    check_room(10, UNKNOWN, "This", "Do that.")
    with pytest.raises(ValueError, match=r"This takes 2 GB, and 1.5 GB of memory are left. Do that."):
        check_room(2_000_000_000, 1_500_000_000, "This", "Do that.")
