"""Worker processes shared by all tests of a session."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from tests.support.over_horovod import OverHorovod
from tests.support.ranks import Ranks

# A runner that was started in the background ignores these, and so would every process that the tests start.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--over-horovod`` runs any test that uses ``ranks`` with ``communication="horovod"``."""
    parser.addoption("--over-horovod", action="store_true", help="in worker processes, Horovod carries the exchanges")


def pytest_report_header(config: pytest.Config) -> str:
    """Logs that are kept say what they were made with."""
    names = ("torch", "lightning", *(["horovod"] if config.getoption("over_horovod") else []))
    return ", ".join(f"{name} {version(name)}" for name in names)


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


def _pools(kind: type[Ranks]) -> Iterator[Callable[[int], Ranks]]:
    pools: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        return pools.setdefault(world_size, kind(world_size))

    yield get
    for pool in pools.values():
        pool.stop()


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Ranks]]:
    """``ranks(n)`` gives n worker processes, started when first used."""
    yield from _pools(OverHorovod if request.config.getoption("over_horovod") else Ranks)


@pytest.fixture(scope="session")
def ranks_over_horovod() -> Iterator[Callable[[int], Ranks]]:
    """The same, but every strategy that does not say otherwise exchanges over Horovod."""
    yield from _pools(OverHorovod)
