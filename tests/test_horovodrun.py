"""Who a process is that ``horovodrun`` has started, and where it meets the others."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_embrace import EmbRaceStrategy, HorovodEnvironment
from lightning_embrace.comm.torch_backend import ExchangeError
from lightning_embrace.horovodrun import devices_of, environment_class, nodes_of
from lightning_embrace.namespaces import LIGHTNING, PYTORCH_LIGHTNING, Namespace

#: rank 3 of 4, on the second of two hosts
VARIABLES = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
NAMESPACES = pytest.mark.parametrize("namespace", [LIGHTNING, PYTORCH_LIGHTNING], ids=lambda n: n.name)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    return monkeypatch


class _Store(http.server.BaseHTTPRequestHandler):
    """As horovodrun's: what nobody has put is not found."""

    held: dict[str, bytes] = {}
    asked = threading.Event()

    def do_PUT(self) -> None:
        self.held[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, b"")

    def do_GET(self) -> None:
        self.asked.set()
        value = self.held.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def store(started: pytest.MonkeyPatch) -> Iterator[None]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Store)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    started.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    started.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(server.server_address[1]))
    yield
    server.shutdown()
    server.server_close()
    _Store.held.clear()
    _Store.asked.clear()


@NAMESPACES
def test_who_a_process_is(started: pytest.MonkeyPatch, namespace: Namespace) -> None:
    """Each namespace of Lightning takes it for one of its own."""
    kind = environment_class(namespace)
    environment = kind()
    assert isinstance(environment, namespace.get_fabric("plugins.environments.ClusterEnvironment"))
    assert kind.detect() and environment.creates_processes_externally
    environment.set_world_size(99)
    environment.set_global_rank(99)
    assert (environment.world_size(), environment.global_rank(), environment.local_rank()) == (4, 3, 1)
    assert (environment.node_rank(), environment.num_nodes(), environment.local_size()) == (1, 2, 2)


def test_nobody_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(f"HOROVOD_{name}", raising=False)
    assert not HorovodEnvironment.detect()


def test_a_trainer_that_wants_another_number(started: pytest.MonkeyPatch) -> None:
    """What to write instead."""
    HorovodEnvironment().validate_settings(2, 2)
    with pytest.raises(ValueError, match=r"devices=3, num_nodes=1\) does not fit `horovodrun -np 4`.*devices=2, num_n"):
        HorovodEnvironment().validate_settings(3, 1)


def test_devices_and_nodes_that_nobody_names(started: pytest.MonkeyPatch) -> None:
    """One device, a Trainer's default, becomes one for each rank of the host; a number that was given stays."""
    environment = HorovodEnvironment()
    cpu = torch.device("cpu")
    assert devices_of(environment, [cpu]) == [cpu, cpu]
    assert devices_of(environment, [torch.device("cuda", 0)]) == [torch.device("cuda", i) for i in range(2)]
    assert devices_of(environment, [cpu] * 3) == [cpu] * 3
    assert devices_of(object(), [cpu]) == [cpu] and devices_of(environment, None) is None
    assert (nodes_of(environment, 1), nodes_of(environment, 3), nodes_of(object(), 1)) == (2, 3, 1)


def test_ranks_meet_where_rank_0_says(started: pytest.MonkeyPatch, store: None) -> None:
    """Whoever comes before rank 0 waits for it."""
    found: list[tuple[str, int]] = []
    early = HorovodEnvironment()

    def meet() -> None:
        found.append((early.main_address, early.main_port))

    waiting = threading.Thread(target=meet)
    waiting.start()  # as rank 3: it reads who it is before this process becomes rank 0
    assert _Store.asked.wait(30.0)
    started.setenv("HOROVOD_RANK", "0")
    first = HorovodEnvironment()
    mine = (first.main_address, first.main_port)
    waiting.join(30.0)
    assert found == [mine] and mine[0] == "127.0.0.1" and mine[1] > 0


def test_rank_0_does_not_come(started: pytest.MonkeyPatch, store: None) -> None:
    """The others end after the strategy's timeout, and say what they have waited for."""
    environment = HorovodEnvironment(timedelta(seconds=0.3))
    message = "'meeting of all ranks' failed on rank 3: rank 0 has not said at http.* within the `timeout` of 0.3 s"
    with pytest.raises(ExchangeError, match=message):
        _ = environment.main_address


def test_the_strategy_lends_its_timeout(started: pytest.MonkeyPatch, store: None) -> None:
    """Nobody gives it to the environment, which is chosen by itself."""
    pytest.importorskip("horovod", reason="`make horovod` builds it")
    strategy = EmbRaceStrategy(communication="horovod", timeout=timedelta(seconds=0.3))
    with pytest.raises(ExchangeError, match=r"within the `timeout` of 0\.3 s"):
        _ = strategy.cluster_environment.main_address


def test_under_mpi_there_is_no_rendezvous(started: pytest.MonkeyPatch) -> None:
    """What to set, and that it is enough."""
    for part in ("ADDR", "PORT"):
        started.delenv(f"HOROVOD_GLOO_RENDEZVOUS_{part}", raising=False)
    with pytest.raises(RuntimeError, match="Set MASTER_ADDR"):
        _ = HorovodEnvironment().main_address
    started.setenv("MASTER_ADDR", "10.1.2.3")
    started.setenv("MASTER_PORT", "4711")
    assert (HorovodEnvironment().main_address, HorovodEnvironment().main_port) == ("10.1.2.3", 4711)
