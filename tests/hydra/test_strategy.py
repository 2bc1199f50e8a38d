"""The strategy in Lightning's configurations, and what it refuses of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch.utils.data import DataLoader

import lightning_embrace.cli
import lightning_embrace.pytorch_lightning
from tests.hydra import zoo
from tests.hydra.runs import QUIET, hydra
from tests.test_cli import bare_command_line, strategy_of

__all__ = ["bare_command_line"]  # a fixture

HERE = "lightning_embrace.HydraStrategy"
THERE = "lightning_embrace.pytorch_lightning.HydraStrategy"
ARGUMENTS = {
    "device_memory": "4MiB",
    "host_memory": 10**6,
    "disk": "somewhere",
    "blocks": ["encoder.*", "!encoder.words"],
    "prefetch": False,
    "state_dict_type": "sharded",
}


class Fits(zoo.Stack):
    """Brings its data."""

    def train_dataloader(self) -> Any:
        return DataLoader(zoo.batches(3), batch_size=None)


@pytest.mark.parametrize("old", [False, True], ids=["lightning.pytorch", "pytorch_lightning"])
def test_every_argument(tmp_path: Path, old: bool) -> None:
    """From a YAML file and flags, under both names of Lightning."""
    class_path = THERE if old else HERE
    flag = "--trainer.strategy.host_memory=2MiB"
    strategy = strategy_of(tmp_path, ARGUMENTS, flag, class_path=class_path, old=old)
    kind = lightning_embrace.pytorch_lightning.HydraStrategy if old else lightning_embrace.HydraStrategy
    assert type(strategy) is kind
    config = strategy.config
    assert (config.device_memory, config.host_memory, config.disk) == (4 << 20, 2 << 20, Path("somewhere"))
    assert (config.blocks, config.prefetch) == (("encoder.*", "!encoder.words"), False)
    assert config.state_dict_type == "sharded"


def test_by_name(tmp_path: Path) -> None:
    """A flag with the name, and one more for an argument."""
    flags = "--trainer.strategy=hydra", "--trainer.strategy.device_memory=3MiB"
    assert type(strategy_of(tmp_path, {}, flags[0])) is lightning_embrace.HydraStrategy
    strategy = strategy_of(tmp_path, {}, f"--trainer.strategy={HERE}", flags[1])
    assert strategy.config.device_memory == 3 << 20


def test_the_command_line_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m lightning_embrace fit``, from a file: it trains, saves a folder, and that is made one file."""
    config = tmp_path / "config.yaml"
    config.write_text(f"""
model: {__name__}.Fits
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 3
  logger: false
  enable_progress_bar: false
  default_root_dir: {tmp_path}/root
  strategy:
    class_path: {HERE}
    init_args: {{device_memory: 120KiB, state_dict_type: sharded}}
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{dirpath: {tmp_path}/saved, filename: last}}
""")
    commands = ["fit", "--config", str(config)], ["consolidate", f"{tmp_path}/saved/last.ckpt", f"{tmp_path}/one.ckpt"]
    for command in commands:
        monkeypatch.setattr("sys.argv", ["lightning_embrace", *command])
        lightning_embrace.cli.main()
    assert (tmp_path / "saved" / "last.ckpt").is_dir() and (tmp_path / "one.ckpt").is_file()


class Old(pytorch_lightning.LightningModule):
    """Some blocks, under the older name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(zoo.feed_forward() for _ in range(6))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        for block in self.blocks:
            x = x + block(x)
        return (x.mean(1, keepdim=True) - y).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_the_older_name_trains(tmp_path: Path) -> None:
    """Saves, goes on, and ends where plain training does."""
    ends = []
    for epochs in ([1, 2], [2]):
        pytorch_lightning.seed_everything(3, verbose=False)
        model, path = Old(), None
        for until in epochs:
            kind = lightning_embrace.pytorch_lightning.HydraStrategy
            strategy = kind(device_memory="120KiB") if len(epochs) > 1 else "auto"
            settings = {**QUIET, "max_epochs": until, "strategy": strategy}
            trainer = pytorch_lightning.Trainer(**settings)
            trainer.fit(model, DataLoader(zoo.batches(3), batch_size=None), ckpt_path=path)
            path = tmp_path / f"{until}.ckpt"
            trainer.save_checkpoint(path)
            model = Old() if until == 1 else model
        ends.append(model.state_dict())
    for key, value in ends[1].items():
        assert torch.equal(ends[0][key], value)


@pytest.mark.parametrize("pl", [lightning.pytorch, pytorch_lightning], ids=lambda pl: pl.__name__)
def test_more_than_one_device(pl: Any) -> None:
    """What is for several processes is refused, under both names."""
    error = pl.utilities.exceptions.MisconfigurationException
    for arguments, match in (
        ({"devices": 2}, r"devices=1.*HydraFleet"),
        ({"devices": 1, "num_nodes": 2}, r"num_nodes=1.*HydraFleet"),
    ):
        with pytest.raises(error, match=match):
            pl.Trainer(strategy="hydra", accelerator="cpu", **arguments)


def test_batch_norm_of_several_devices() -> None:
    trainer = lightning.pytorch.Trainer(**QUIET, strategy="hydra", sync_batchnorm=True)
    error = lightning.pytorch.utilities.exceptions.MisconfigurationException
    with pytest.raises(error, match=r"sync_batchnorm=True.*one device.*Leave it away"):
        trainer.fit(zoo.Stack(), DataLoader(zoo.batches(2), batch_size=None))


def test_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by torchrun: each would train the whole model, and write the same files."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("GROUP_RANK", "0")
    trainer = lightning.pytorch.Trainer(**QUIET, strategy="hydra")
    error = lightning.pytorch.utilities.exceptions.MisconfigurationException
    with pytest.raises(error, match=r"torchrun has started 2 processes.*HydraFleet"):
        trainer.fit(zoo.Stack(), DataLoader(zoo.batches(2), batch_size=None))


def test_the_other_name_s_trainer() -> None:
    """Names the import to change."""
    with pytest.raises(Exception, match=r"from lightning_embrace\.pytorch_lightning import HydraStrategy"):
        pytorch_lightning.Trainer(strategy=hydra(), accelerator="cpu", devices=1, logger=False)


def test_with_embrace() -> None:
    """One Trainer has one of them."""
    with pytest.raises(Exception, match="embrace"):
        lightning.pytorch.Trainer(strategy=["embrace", "hydra"], accelerator="cpu", devices=1)  # type: ignore[arg-type]
