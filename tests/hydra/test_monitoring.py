"""``SpillMonitor`` logs what the strategy moves, and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_embrace import SpillMonitor
from lightning_embrace import pytorch_lightning as older
from lightning_embrace.hydra.traffic import traffic
from tests.hydra import zoo
from tests.hydra.runs import assert_same, fit, hydra


class Logged(Callback):
    """Keeps what was logged, step by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.shown: set[str] = set()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        self.shown |= set(trainer.progress_bar_metrics)


@pytest.mark.parametrize("shown", [True, False])
def test_what_a_step_moves(tmp_path: Path, shown: bool) -> None:
    """In the steady state it is what the plan foretells. Without prefetch nothing is on its way between steps."""
    strategy = hydra(device_memory="70KiB", host_memory="40KiB", disk=tmp_path, prefetch=False)
    logged = Logged()
    ours = fit(zoo.Stack, strategy, zoo.batches(6), callbacks=[SpillMonitor(prog_bar=shown), logged])
    assert_same(ours, fit(zoo.Stack, "auto", zoo.batches(6)))
    foretold = traffic(strategy.planned.units, strategy.planned.plan, second_pass=False)
    names = {f"{tier} {kind}": f"hydra/{tier}_{kind}_mb" for tier in ("host", "disk") for kind in ("read", "written")}
    assert set(logged.steps[-1]) == set(names.values()) and all(foretold[kind] for kind in names)
    for step in logged.steps[2:]:
        for kind, name in names.items():
            assert step[name] == pytest.approx(foretold[kind] / 1e6)
    assert logged.shown == (set(names.values()) if shown else set())


def test_without_a_disk() -> None:
    logged = Logged()
    fit(zoo.Stack, hydra(device_memory="70KiB"), zoo.batches(2), callbacks=[SpillMonitor(), logged])
    assert set(logged.steps[-1]) == {"hydra/host_read_mb", "hydra/host_written_mb"}


def test_another_strategy() -> None:
    with pytest.raises(MisconfigurationException, match=r"SpillMonitor .*SingleDeviceStrategy .*strategy='hydra'"):
        fit(zoo.Stack, "auto", zoo.batches(2), callbacks=[SpillMonitor()])


def test_the_other_name_of_lightning() -> None:
    class Old(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = zoo.Stack()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.inner.loss(*batch)

        def configure_optimizers(self) -> Any:
            return zoo.sgd(self.parameters())

    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, strategy=older.HydraStrategy(device_memory="70KiB"),
        callbacks=[older.SpillMonitor()],
    )  # fmt: skip
    trainer.fit(Old(), DataLoader(zoo.batches(2), batch_size=None))
    assert trainer.callback_metrics["hydra/host_read_mb"] > 0
