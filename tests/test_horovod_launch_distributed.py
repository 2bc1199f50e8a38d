"""Whoever starts the ranks, Horovod starts on them and the numbers are exact; its timeline is written on request."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from lightning_embrace import EmbRaceStrategy
from lightning_embrace.namespaces import NAMESPACES, Namespace
from tests.examples.test_notebook_distributed import NOTEBOOK, printed
from tests.support import program
from tests.support.models import TwoTables
from tests.support.ranks import Ranks, free_port, run_by_hand
from tests.support.training import Outcome, on_rank
from tests.test_launch_distributed import PROGRAM, check, run

pytestmark = pytest.mark.horovod
BIN = Path(sys.executable).parent


@pytest.mark.parametrize("namespace", NAMESPACES, ids=lambda n: n.name)
def test_its_name(namespace: Namespace) -> None:
    strategy = namespace.get("strategies.StrategyRegistry").get("embrace_horovod")
    assert strategy.config.communication == "horovod" and strategy.cluster_environment is None


def test_the_trainer_alone(tmp_path: Path) -> None:
    """Scripts started again; where Horovod has ended, torch carries the next training in the same processes."""
    names = ["embrace_horovod", "embrace"]
    run([sys.executable, str(PROGRAM), "--out", str(tmp_path), "--strategies", *names])
    for name in names:
        check(tmp_path / name, nodes=1, devices=2)


def test_processes_of_multiprocessing(tmp_path: Path) -> None:
    """A notebook's ranks are forks of a process that has imported Horovod."""
    names = {"horovod_fork": 2, "horovod_spawn": 2, "horovod_popen:1": 1}
    run([sys.executable, str(PROGRAM), "--out", str(tmp_path), "--strategies", *names], MASTER_PORT=str(free_port()))
    for name, devices in names.items():
        check(tmp_path / name, nodes=1, devices=devices)


def test_torchrun(tmp_path: Path) -> None:
    """Ranks and their meeting are torchrun's."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    run([*torchrun, str(PROGRAM), "--out", str(tmp_path), "--strategies", "embrace_horovod"])
    check(tmp_path / "embrace_horovod", nodes=1, devices=2)


@pytest.mark.parametrize("devices", ["1", "2"])
def test_horovodrun(tmp_path: Path, devices: str) -> None:
    """As the scripts of the old strategy are started; the number of devices need not be given."""
    horovodrun = [str(BIN / "horovodrun"), "--gloo", "-np", "2", sys.executable, str(PROGRAM)]
    name = f"embrace_horovod:{devices}"
    run([*horovodrun, "--out", str(tmp_path), "--strategies", name])
    check(tmp_path / name, nodes=1, devices=2)


def test_two_nodes(tmp_path: Path) -> None:
    """Started by hand, one rank each; Horovod is told where they run, which Lightning's variables do not say."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    run_by_hand([{**common, "NODE_RANK": str(n)} for n in range(2)], program.train, tmp_path, "embrace_horovod", 1, 2)
    check(tmp_path, nodes=2, devices=1)


def test_notebook() -> None:
    """In a real kernel, with the strategy that the documentation gives for it."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    changed = 0
    for cell in notebook.cells:
        if cell.cell_type == "code" and '"embrace_notebook"' in cell.source:
            there = 'lightning_embrace.EmbRaceStrategy(communication="horovod", start_method="fork")'
            cell.source = "import lightning_embrace\n" + cell.source.replace('"embrace_notebook"', there)
            changed += 1
    assert changed == 1
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(NOTEBOOK.parents[2])}}).execute()
    losses = [float(line.split()[-1]) for c in notebook.cells for line in printed(c).splitlines() if " loss " in line]
    assert len(losses) > 3 and losses[-1] < 0.8 * losses[0]


def traced(folder: Path) -> Outcome:
    strategy = EmbRaceStrategy(tables=["*"], communication="horovod", trace=folder / "new" / "run.json")
    return on_rank(lambda: strategy, lambda: TwoTables(10, False, "sgd", True), 4, 2)


def test_its_timeline_lies_beside_ours(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """One argument for both; the exchanges have the same names in both."""
    ranks(2).run(traced, tmp_path)
    ours = json.loads((tmp_path / "new" / "run.json").read_text())
    theirs = (tmp_path / "new" / "run.horovod.json").read_text()
    names = {event["name"] for event in ours["traceEvents"] if event.get("ph") == "X"}
    closing = [name for name in names if name.startswith("closing header of step ")]
    assert len(closing) >= 4
    for name in closing:
        assert name in theirs
