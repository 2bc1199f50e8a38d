"""A model that trains alike under every strategy on any number of ranks, for checkpoints that move between them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.utils.data import DataLoader

from lightning_embrace import EmbRaceStrategy
from lightning_embrace.checkpoint.optimizer_names import numbered_state
from tests.support.lifecycle import At, make_model, make_trainer, plain, this_rank

ROWS, SAMPLES, BEFORE, AFTER = 19, 12, 3, 2
KINDS = ("one process", "ddp", "full", "sharded", "fsdp")
WORLD_SIZES = (1, 2, 3, 4)


class End(NamedTuple):
    """Who writes a checkpoint, or goes on from it."""

    kind: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.world_size}" if self.kind != "one process" else self.kind


#: `ddp` on one rank is the one process
ENDS = [
    End(kind, n)
    for kind, n in itertools.product(KINDS, WORLD_SIZES)
    if (kind == "one process") == (n == 1) or kind not in ("one process", "ddp")
]


class Net(nn.Module):
    """Two tables, one of them with fewer columns than there are ranks, and dense layers with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 5)
        self.tags = nn.EmbeddingBag(ROWS, 2, mode="sum")
        self.head = nn.Linear(7, 1)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([torch.tanh(self.words(ids)).mean(1), self.tags(ids)], dim=1)
        return self.head(x).squeeze(1) * self.scale


class Portable(LightningModule):
    """Adam with two groups, and a scheduler that steps with it.

    In the order of the parameters: for numbers in a file, Lightning's FSDP takes that to be the optimizer's order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Net()
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return (self.net(batch["ids"]) - batch["target"]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        tables = [self.net.words.weight, self.net.tags.weight]
        groups = [{"params": tables, "weight_decay": 0.1}, {"params": self.net.head.parameters(), "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, lr=0.05, amsgrad=True)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class PortableFSDP(Portable):
    """The same with FSDP2's shards: rows of every parameter."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if not type(self.net).__name__.startswith("FSDP"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def loader(steps: range, world_size: int) -> DataLoader[Any]:
    """This rank's share of batches that are the same for any number of ranks."""
    share = SAMPLES // world_size
    mine = slice(this_rank() * share, (this_rank() + 1) * share)
    data = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(ROWS, (SAMPLES, 4), generator=generator)
        target = torch.randn(SAMPLES, generator=generator, dtype=torch.float64)
        data.append({"ids": ids[mine], "target": target[mine]})
    return DataLoader(data, batch_size=None, shuffle=False)  # type: ignore[arg-type]


def trainer_for(end: End, **arguments: Any) -> Any:
    """A quiet Trainer; with a gradient scaler whose scale moves, which ModelParallelStrategy does not take."""
    strategies: dict[str, Any] = {
        "one process": "auto",
        "ddp": "ddp",
        "full": EmbRaceStrategy(tables=["*"]),
        "sharded": EmbRaceStrategy(tables=["*"], state_dict_type="sharded"),
        "fsdp": ModelParallelStrategy(data_parallel_size=end.world_size, tensor_parallel_size=1),
    }
    if end.kind != "fsdp":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)  # type: ignore[attr-defined]
        arguments = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], **arguments}
    return make_trainer(strategies[end.kind], end.world_size, **arguments)


def model_for(end: End) -> Portable:
    """The same initial weights everywhere."""
    model: Portable = make_model(cls=PortableFSDP if end.kind == "fsdp" else Portable)
    return model


def whole_state(end: End, trainer: Any, module: Any) -> dict[str, Any]:
    """What is equal everywhere, as one process has it. Collective."""
    strategy, [optimizer] = trainer.strategy, trainer.optimizers
    if end.kind == "fsdp":
        options = StateDictOptions(full_state_dict=True)
        weights = get_model_state_dict(module, options=options)
        state = numbered_state(get_optimizer_state_dict(module, optimizer, options=options))
    elif end.kind in ("full", "sharded"):
        weights = strategy.full_state_dict()
        state = strategy._session.settled().full_optimizer_state(optimizer, to_all=True)
    else:
        weights, state = module.state_dict(), optimizer.state_dict()
    [scheduler] = trainer.lr_scheduler_configs
    groups = [
        {k: v for k, v in group.items() if k in ("lr", "params", "weight_decay")} for group in state["param_groups"]
    ]
    return {
        "weights": plain(dict(weights)),
        "states": plain(state["state"]),
        "groups": groups,
        "scheduler": {k: v for k, v in scheduler.scheduler.state_dict().items() if k in ("last_epoch", "_last_lr")},
        "scaler": trainer.precision_plugin.state_dict(),
    }


def write(end: End, folder: str) -> dict[str, Any]:
    """Runs in a worker: one epoch, after which ModelCheckpoint saves.

    Returns:
        What was saved.
    """
    saved = At("on_train_epoch_end", lambda trainer, module: whole_state(end, trainer, module))
    callbacks = [saved, ModelCheckpoint(folder, "c", save_top_k=-1)]
    trainer = trainer_for(end, max_epochs=1, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(model_for(end), loader(range(BEFORE), end.world_size))
    return saved.results[0]


def go_on(end: End, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs in a worker: another epoch.

    Returns:
        What was loaded, and what came of it.
    """
    state = lambda trainer, module: whole_state(end, trainer, module)  # noqa: E731
    loaded, ended = At("on_train_start", state), At("on_train_epoch_end", state)
    trainer = trainer_for(end, max_epochs=2, callbacks=[loaded, ended])
    model = model_for(end)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)  # whatever is not loaded is wrong
    trainer.fit(model, loader(range(BEFORE, BEFORE + AFTER), end.world_size), ckpt_path=path)
    return loaded.results[0], ended.results[0]


def checkpoint_in(folder: Path) -> Path:
    """What :func:`write` has left there."""
    return folder / "c.ckpt"
