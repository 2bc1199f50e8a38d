"""Worker processes shared by all tests of a session."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from tests.support.ranks import Ranks

# A runner that was started in the background ignores these, and so would every process that the tests start.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


def pytest_report_header() -> str:
    """Logs that are kept say what they were made with."""
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without Horovod its tests are skipped, and say what is missing."""
    if find_spec("horovod") is None:
        for item in items:
            if item.get_closest_marker("horovod") is not None:
                item.add_marker(pytest.mark.skip(reason="HOROVOD IS NOT INSTALLED: `make horovod` builds it"))


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Lightning keeps seeds and thread counts in variables, where every later Trainer and script finds them."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(n)`` gives n worker processes, started when first used."""
    pools: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        return pools.setdefault(world_size, Ranks(world_size))

    yield get
    for pool in pools.values():
        pool.stop()
