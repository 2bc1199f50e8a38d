"""From setup to teardown: checkpoints both ways, what is refused, and what the accounts say."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_embrace.pytorch_lightning
from lightning_embrace import CheckpointError, HydraStrategy
from lightning_embrace.hydra.errors import BlockError
from lightning_embrace.hydra.plan import DoesNotFitError
from lightning_embrace.hydra.refusals import check_model
from lightning_embrace.hydra.traffic import traffic
from lightning_embrace.hydra.trial import CoupledOptimizerError
from lightning_embrace.namespaces import LIGHTNING
from lightning_embrace.tables.modules import ShardedEmbedding
from tests.hydra import zoo
from tests.hydra.runs import QUIET, assert_same, fit

ADAMW = partial(zoo.Stack, lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
BUDGET = "120KiB"


def test_checkpoints_both_ways(tmp_path: Path) -> None:
    """A run that is resumed under the other strategy goes on with the same numbers."""
    data = zoo.batches(20)
    spilled = partial(HydraStrategy, device_memory=BUDGET)
    for name, first, second in (("out", spilled, lambda: "auto"), ("in", lambda: "auto", spilled)):
        whole = fit(ADAMW, "auto", data, max_epochs=2)
        begun = fit(ADAMW, first(), data, enable_checkpointing=True, default_root_dir=tmp_path / name)
        file = begun.trainer.checkpoint_callback.best_model_path
        model = ADAMW()
        trainer = Trainer(**{**QUIET, "max_epochs": 2, "strategy": second()})
        trainer.fit(model, DataLoader(data, batch_size=None), ckpt_path=file)
        for key, value in whole.model.items():
            assert torch.equal(model.state_dict()[key], value), (name, key)


def test_the_model_is_ordinary_afterwards() -> None:
    """Parameters are the same objects with memory of their own, calls are the modules' own, and a second fit works."""
    model = ADAMW()
    parameters = list(model.parameters())
    trainer = Trainer(**QUIET, strategy=HydraStrategy(device_memory=BUDGET))
    for _ in range(2):
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        trainer.fit(model, DataLoader(zoo.batches(3), batch_size=None))
        assert all(a is b for a, b in zip(parameters, model.parameters()))
        for parameter in parameters:
            assert parameter.isfinite().all() and parameter.is_contiguous()
            assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
        assert not any("_compiled_call_impl" in vars(m) for m in model.modules())
        assert not any(m._state_dict_hooks or m._load_state_dict_pre_hooks for m in model.modules())


class Watching(zoo.Stack):
    """Says where its numbers are while a block runs, and what its steps move."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
        self.there: list[list[bool]] = []
        self.runs: list[int] = []
        self.traffic: list[dict[str, int]] = []
        for block in self.blocks:
            block[0].register_forward_hook(lambda *_: self.there.append([self._has(b) for b in self.blocks]))

    @staticmethod
    def _has(block: nn.Module) -> bool:
        return bool(next(block.parameters()).detach().isfinite().all())

    def on_train_batch_end(self, *_: Any) -> None:
        session = self.trainer.strategy._session
        session.transfer.settle()
        self.peaks = {tier: (ledger.peak, ledger.limit) for tier, ledger in session.ledgers.items()}
        self.counts = dict(session.transfer.counts)
        self.traffic.append(dict(session.store.traffic))
        self.runs.append(len(self.there))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.kept = sum(call.kept_bytes for call in self.trainer.strategy._session._kept)
        return loss


@pytest.mark.parametrize(
    ("prefetch", "rows", "memory", "kept"),
    [
        (True, 3, 118, range(6, 7)),
        (False, 3, 118, range(6, 7)),
        (True, 60, 192, range(2, 5)),
        (True, 60, 166, range(1)),
    ],
)
def test_the_budget_is_kept_and_used(tmp_path: Path, prefetch: bool, rows: int, memory: int, kept: range) -> None:
    """While a block runs, its numbers are there and most others are not: reading those shows NaN.

    Bytes moved are those that the plan has announced. Blocks whose activations are kept run once, whether they move or
    not, and at least the last one does; and these take as much as the plan has for them.
    """
    model = Watching()
    strategy = HydraStrategy(device_memory=f"{memory}KiB", host_memory="4KiB", disk=tmp_path, prefetch=prefetch)
    Trainer(**QUIET, strategy=strategy).fit(model, DataLoader(zoo.batches(6, size=rows), batch_size=None))
    assert min(blocks.count(False) for blocks in model.there) > 0, "everything was on the device"
    peak, limit = model.peaks["device"]
    assert limit == memory << 10 and 0.6 * limit < peak <= limit
    planned = strategy.planned
    moved = traffic(planned.units, planned.plan, second_pass=False)
    before, after = model.traffic[-2:]
    for kind in ("disk read", "disk written"):
        assert after[kind] - before[kind] == moved[kind] > 0
    assert sum(planned.plan.kept) in kept
    once = max(1, sum(planned.plan.kept))
    keeping = planned.plan.kept if any(planned.plan.kept) else [False] * 5 + [True]
    moving = zip(planned.plan.activations, keeping, planned.plan.places)
    assert model.kept == sum(nbytes for nbytes, keeps, place in moving if keeps and place != "device") > 0
    assert model.runs[-1] - model.runs[-2] == 2 * 6 - once
    if prefetch:
        ahead = model.counts.get("foreseen", 0) + model.counts.get("there", 0)
        assert ahead > 2 * model.counts["late"] and not model.counts.get("in vain")


class Interrupted(zoo.Stack):
    """Fails in its third backward, when some shards have made their step."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(self.fail)

    def fail(self, gradient: Tensor) -> Tensor:
        if len(self.losses) == 3:
            raise RuntimeError("interrupted")
        return gradient


def test_a_torn_step_is_not_saved(tmp_path: Path) -> None:
    """Saving says so; the model is an ordinary one again."""

    class Save(Callback):
        def on_exception(self, trainer: Trainer, *_: Any) -> None:
            with pytest.raises(CheckpointError, match="after some blocks and before others"):
                trainer.save_checkpoint(tmp_path / "torn.ckpt")
            self.asked = True

    save = Save()
    model = Interrupted()
    trainer = Trainer(**QUIET, strategy=HydraStrategy(device_memory="80KiB"), callbacks=[save])
    with pytest.raises(RuntimeError, match="interrupted"):
        trainer.fit(model, DataLoader(zoo.batches(5), batch_size=None))
    assert save.asked and not (tmp_path / "torn.ckpt").exists()
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_larger_batch_later() -> None:
    """The plan is made anew before it runs, and numbers stay the same."""
    data = [*zoo.batches(3), *zoo.batches(3, size=60), *zoo.batches(3)]
    strategy = HydraStrategy(device_memory="150KiB")
    assert_same(fit(ADAMW, strategy, data), fit(ADAMW, "auto", data))
    small = HydraStrategy(device_memory="150KiB")
    fit(ADAMW, small, zoo.batches(3))
    assert strategy.planned.budget.working > 3 * small.planned.budget.working


def test_by_name_and_by_the_old_namespace() -> None:
    """A model that fits is not spilled."""
    assert_same(fit(zoo.Stack, "hydra", zoo.batches(5)), fit(zoo.Stack, "auto", zoo.batches(5)))
    trainer = pytorch_lightning.Trainer(strategy="hydra", accelerator="cpu", devices=1, logger=False)
    assert type(trainer.strategy) is lightning_embrace.pytorch_lightning.HydraStrategy


def test_more_than_one_device() -> None:
    with pytest.raises(MisconfigurationException, match=r"devices=1.*HydraFleet"):
        Trainer(strategy="hydra", accelerator="cpu", devices=2)
    with pytest.raises(MisconfigurationException, match=r"num_nodes=1.*HydraFleet"):
        Trainer(strategy="hydra", accelerator="cpu", devices=1, num_nodes=2)


class Cached(zoo.Structured):
    """Gives its blocks what changes."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.blocks[0](zoo.State(x, {"total": x.sum(), "fixed": object()}), scale=1.0)[1]


class TwoOptimizers(zoo.Manual):
    def configure_optimizers(self) -> Any:
        return [zoo.sgd(self.first.parameters()), zoo.sgd(self.last.parameters())]


def lbfgs(parameters: Any) -> Any:
    return torch.optim.LBFGS(parameters)


@pytest.mark.parametrize(
    ("make", "arguments", "error", "match"),
    [
        (zoo.Stack, {"device_memory": "20KiB"}, DoesNotFitError, r"block 'blocks\.\d' takes .*device_memory="),
        (zoo.Stack, {"device_memory": "80KiB", "host_memory": "9KiB"}, DoesNotFitError, "disk='/path'"),
        (zoo.Stack, {"blocks": ["layers.*"]}, ValueError, r"'layers\.\*' matches no module.*'blocks'"),
        (Cached, {}, BlockError, r"'blocks\.0' is given a object .*use_cache=False"),
        (TwoOptimizers, {}, MisconfigurationException, "steps one optimizer"),
        (partial(zoo.Stack, lbfgs), {}, CoupledOptimizerError, "LBFGS"),
    ],
)
def test_refused(make: Any, arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    """Before anything was trained, and the model is an ordinary one."""
    model = make()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(error, match=match):
        Trainer(**QUIET, strategy=HydraStrategy(**arguments)).fit(model, DataLoader(zoo.batches(2), batch_size=None))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_what_embrace_has_sharded_or_torch_compiled() -> None:
    sharded, compiled = nn.Embedding(3, 2), zoo.Stack()
    sharded.__class__ = ShardedEmbedding
    compiled.blocks[2]._compiled_call_impl = print  # what compile() sets
    for module, match in (
        (nn.Sequential(sharded), "'0' is sharded by EmbRaceStrategy"),
        (compiled, r"'blocks\.2' is compiled"),
    ):
        with pytest.raises(MisconfigurationException, match=match):
            check_model(module, LIGHTNING)


def test_averaging_callbacks_are_refused() -> None:
    trainer = Trainer(**QUIET, strategy="hydra", callbacks=[StochasticWeightAveraging(1e-2)])
    with pytest.raises(MisconfigurationException, match="StochasticWeightAveraging works on all weights"):
        trainer.fit(zoo.Stack(), DataLoader(zoo.batches(2), batch_size=None))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"device_memory": "4 apples"}, r"device_memory='4 apples'.*'4GiB'"),
        ({"host_memory": 0}, "host_memory=0"),
        ({"blocks": "layers"}, r"\['layers'\]"),
        ({"blocks": []}, "non-empty patterns"),
        ({"disk": 3}, "disk=3"),
        ({"prefetch": "yes"}, "prefetch='yes'"),
    ],
)
def test_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        HydraStrategy(**arguments)


def test_loading_into_a_spilled_model() -> None:
    """``load_state_dict`` in a hook, of the whole and of a part."""

    class Loading(zoo.Stack):
        def on_train_start(self) -> None:
            self.load_state_dict({k: v * 0.5 for k, v in self.state_dict().items()})
            self.blocks[1].load_state_dict({k: v + 0.1 for k, v in self.blocks[1].state_dict().items()})

    strategy = HydraStrategy(device_memory="80KiB")
    make: type[LightningModule] = Loading
    assert_same(fit(make, strategy, zoo.batches(5)), fit(make, "auto", zoo.batches(5)))
