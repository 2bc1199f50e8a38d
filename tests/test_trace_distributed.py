"""``trace``: one file of all ranks that tells what was computed, exchanged and waited for, and when."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn

from lightning_embrace import EmbRaceStrategy
from lightning_embrace.monitor import chrome
from tests.monitor import schema
from tests.support.models import Small
from tests.support.program import Net
from tests.support.ranks import run_by_hand
from tests.support.training import train
from tests.test_cli_distributed import QUIET, places

ROWS, STEPS = 40, 10


class Walk(Small):
    """Every step looks up other rows than the one before, and one that comes again."""

    def __init__(self) -> None:
        super().__init__("adagrad")
        self.table = nn.Embedding(ROWS, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 1)])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = torch.tanh(self.table(batch["ids"]))
        for head in self.heads:
            x = head(x)
        return (x.mean(dim=(1, 2)) - batch["target"]).pow(2).mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)


def fit(path: Path, schedule: Any) -> dict[str, int]:
    """Runs in a worker; what its strategy has counted."""
    rank = int(os.environ["LOCAL_RANK"])
    data = []
    for step in range(STEPS):
        ids = (torch.arange(3) + 6 * step + 3 * rank) % ROWS
        ids[0] = 1
        data.append({"ids": ids.unsqueeze(0), "target": torch.ones(1, dtype=torch.float64)})
    told = lambda batch: {"table": batch["ids"]}  # noqa: E731
    strategy = EmbRaceStrategy(tables=["*"], schedule=schedule, lookahead=told, trace=path)
    train(Walk, data, strategy, 2)
    return dict(strategy.traffic.sent)


def spans(path: Path, rank: int) -> list[dict[str, Any]]:
    """A rank's spans, each with the lane that its thread stands for and its end."""
    trace = chrome.read(path)
    schema.check(trace)
    lane_of = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    return [
        {**e, **e["args"], "name": e["name"], "lane": lane_of[e["tid"]], "end": e["ts"] + e["dur"]}
        for e in trace["traceEvents"]
        if e["ph"] == "X" and e["pid"] == rank
    ]


def overlap(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    return any(a["ts"] < b["end"] and b["ts"] < a["end"] for a in some for b in others)


@pytest.fixture(scope="module")
def traced(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, int]]]:
    path = tmp_path_factory.mktemp("trace") / "new folder" / "trace.json"
    return path, ranks(2).run(fit, path, "2d")


def test_one_file_of_all_ranks(traced: Any) -> None:
    """With each rank's lanes, the steps and nothing that stayed in flight; parts are left by failures alone."""
    path, _ = traced
    assert [file.name for file in path.parent.iterdir()] == ["trace.json"]
    for rank in range(2):
        mine = spans(path, rank)
        lanes = {
            lane
            for span in mine
            for lane in ("compute", "sparse group", "dense group", "waiting")
            if lane in span["lane"]
        }
        assert lanes == {"compute", "sparse group", "dense group", "waiting"}
        for name in ("forward", "backward", "optimizer step"):
            assert [s["step"] for s in mine if s["name"] == name] == list(range(STEPS)), name
        assert not [s for s in mine if s.get("unfinished") or "error" in s]


def test_bytes_are_those_that_traffic_counts(traced: Any) -> None:
    path, counted = traced
    for rank in range(2):
        sent: dict[str, int] = defaultdict(int)
        for span in spans(path, rank):
            if "kind" in span:
                sent[span["kind"]] += span["bytes"]
        assert {k: n for k, n in sent.items() if n} == {k: n for k, n in counted[rank].items() if n and k != "served"}


def test_exchanges_are_in_flight_while_compute_runs(traced: Any) -> None:
    """The order of beginnings and ends, no durations: rows that may go early are asked for before backward has ended,

    and delayed ones are on the wire when the next forward pass begins, or later.
    """
    path, _ = traced
    for rank in range(2):
        mine = spans(path, rank)
        early = [s for s in mine if s["name"].startswith("early rows")]
        delayed = [s for s in mine if s["name"].startswith("delayed gradient rows")]
        assert early and delayed
        begins = {s["step"]: s["ts"] for s in mine if s["name"] == "forward"}
        for span in early:
            assert span["ts"] < begins.get(span["step"] + 1, float("inf")), "not before the next step"
        assert overlap([*early, *delayed], [s for s in mine if s["lane"].startswith("compute")])
        assert {s["lane"].split(" group")[0] for s in early} == {"sparse"}
        assert {s["lane"].split(" group")[0] for s in delayed} == {"dense"}


def cli(out: Path, config: Path) -> None:
    os.environ["PROGRAM_OUT"] = str(out)
    sys.argv = ["program", "fit", f"--config={config}"]
    LightningCLI(Net)


def test_from_a_config(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    init_args = {"tables": ["*"], "trace": str(path)}
    strategy = {"class_path": "lightning_embrace.EmbRaceStrategy", "init_args": init_args}
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": strategy, "max_epochs": 1, "limit_train_batches": 3}
    trainer |= {"limit_val_batches": 1, "default_root_dir": str(tmp_path)}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"trainer": trainer | QUIET}))
    run_by_hand(places(), functools.partial(cli, tmp_path, config))
    assert {s["step"] for rank in range(2) for s in spans(path, rank) if s["name"] == "forward"} == {0, 1, 2}
