"""Uses of blocks that are easily got wrong: the numbers of plain training, or a refusal with a cure."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_embrace.hydra.errors import BlockError
from tests.hydra import hostile_zoo, refused_zoo, zoo
from tests.hydra.cases import PLACES, Case, assert_equals_plain, sample
from tests.hydra.runs import QUIET, fit, hydra


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01)


def varying() -> list[Any]:
    """Batches of many sizes."""
    return [zoo.batches(1, size=2 + 7 * i % 11)[0] for i in range(20)]


def states_are_planned(run: Any) -> None:
    """Also of blocks that were not trained at first."""
    assert all(unit.states for unit in run.trainer.strategy.planned.units)


def looking() -> Any:
    """A built-in callback with a function of the user's: gradients are to be there when it looks."""
    return LambdaCallback(on_after_backward=lambda trainer, model: model.losses.append(model.last.weight.grad.norm()))


def second_pass(run: Any) -> None:
    assert run.trainer.strategy.planned.budget.spilled_gradients


CASES = {
    "returns its input": Case(hostile_zoo.ReturnsItsInput),
    "many results": Case(hostile_zoo.ManyResults),
    "without gradients": Case(hostile_zoo.WithoutGradients),
    "hooked": Case(hostile_zoo.Hooked),
    "checkpointed": Case(hostile_zoo.Checkpointed),
    "thawing": Case(partial(hostile_zoo.Thawing, adamw), "120KiB", check=states_are_planned),
    "thawing, accumulated": Case(
        partial(hostile_zoo.Thawing, adamw), "136KiB", arguments=lambda: {"accumulate_grad_batches": 3}
    ),
    "added": Case(partial(hostile_zoo.Added, adamw), "120KiB", check=states_are_planned),
    "sizes": Case(partial(zoo.Stack, adamw), "150KiB", varying),
    # the matrix has a gradient of two blocks, of an argument, and of the look-up outside
    "in and outside": Case(hostile_zoo.InAndOutside, "75KiB", zoo.sentences, tolerance=1e-6),
    "evaluating": Case(hostile_zoo.Evaluating, "160KiB"),
    "turned around": Case(hostile_zoo.TurnedAround),
    "counting": Case(hostile_zoo.Counting),
    # a block that is called three times in a step has three gradients
    "in any order": Case(hostile_zoo.InAnyOrder, tolerance=1e-6),
    "backward inside": Case(hostile_zoo.BackwardInside),
    "two losses": Case(hostile_zoo.TwoLosses),
    "partly precise": Case(hostile_zoo.PartlyPrecise, arguments=lambda: {"precision": "bf16-mixed"}),
    "twice inside": Case(hostile_zoo.TwiceInside),
    "twice inside, precise in part": Case(hostile_zoo.TwiceInside, arguments=lambda: {"precision": "bf16-mixed"}),
    "double": Case(hostile_zoo.Double, "150KiB"),
    "skipping": Case(hostile_zoo.Skipping),
    "step hooks": Case(hostile_zoo.StepHooks, "100KiB"),
    "back in validation": Case(
        hostile_zoo.BackInValidation, arguments=lambda: {"val_check_interval": 5, "inference_mode": False}
    ),
    "functional head": Case(refused_zoo.FunctionalHead, "225KiB", zoo.sentences, blocks=["!words"]),
    "lambda": Case(zoo.Stack, arguments=lambda: {"callbacks": [looking()]}, check=second_pass),
    "anomalies": Case(zoo.Random, arguments=lambda: {"detect_anomaly": True}),
    "nested": Case(refused_zoo.PartOutside, blocks=["blocks.*.body.0", "blocks.?"]),
}


@pytest.mark.parametrize(("name", "tier", "prefetch", "keep"), sample(CASES))
def test_equals_plain(name: str, tier: str, prefetch: bool, keep: bool, tmp_path: Path) -> None:
    """Twenty steps, bit by bit."""
    assert_equals_plain(CASES[name], f"hostile {name}", tmp_path if tier == "disk" else None, prefetch, keep)


@pytest.mark.matrix
@pytest.mark.parametrize(("tier", "prefetch", "keep"), PLACES)
@pytest.mark.parametrize("name", CASES)
def test_everywhere(name: str, tier: str, prefetch: bool, keep: bool, tmp_path: Path) -> None:
    assert_equals_plain(CASES[name], f"hostile {name}", tmp_path if tier == "disk" else None, prefetch, keep)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (refused_zoo.PartOutside, r"'blocks\.2\.body\.0' is a part of block 'blocks\.2' .*\['blocks\.2\.body\.0', "),
        (refused_zoo.Penalty, r"parameter 'blocks\.\d\.\d\.(weight|bias)' is used outside .*penalty"),
        (refused_zoo.ReturnsAGenerator, r"'blocks\.0' returns a generator"),
        (refused_zoo.FunctionalHead, r"parameter 'words\.weight' is used outside .*blocks=\['!words'\]"),
        (partial(hostile_zoo.InAndOutside, words=500), r"'blocks\.3' is given a parameter of a block"),
        (refused_zoo.Leaking, r"a tensor that block 'blocks\.2' has made and not returned"),
    ],
)
def test_refused(kind: Any, match: str) -> None:
    """In the first step; the message names the block and a cure."""
    model = kind()
    data, budget = (zoo.sentences(2), "200KiB") if isinstance(model, zoo.Language) else (zoo.batches(2), "60KiB")
    with pytest.raises(BlockError, match=match):
        Trainer(**QUIET, strategy=hydra(device_memory=budget)).fit(model, DataLoader(data, batch_size=None))
    assert len(model.losses) <= 1 and all(p.isfinite().all() for p in model.parameters())


def test_gradients_that_are_zeroed_in_place() -> None:
    """torch writes to the one NaN that they read as, and does not mind."""

    class Zeroing(zoo.Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.optimizers().zero_grad(set_to_none=False)

    with pytest.raises(ValueError, match=r"gradients of 'blocks\.\d' .*Call zero_grad\(\)"):
        fit(Zeroing, hydra(device_memory="60KiB"), zoo.batches(3))


def test_parameters_that_are_written_while_they_are_away() -> None:
    class Writing(zoo.Stack):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                nn.init.zeros_(self.blocks[3][0].bias)

    with pytest.raises(ValueError, match=r"parameters of 'blocks\.3' while they were away.*load_state_dict"):
        fit(Writing, hydra(device_memory="60KiB"), zoo.batches(3))


def test_parts_that_are_compiled() -> None:
    with pytest.raises(MisconfigurationException, match=r"'blocks\.1' is compiled"):
        fit(refused_zoo.PartlyCompiled, hydra(), zoo.batches(2))


def test_a_copy_of_a_spilled_model() -> None:
    """Would be full of NaN."""

    class Copied(zoo.Stack):
        def on_train_batch_end(self, *_: Any) -> None:
            copy.deepcopy(self.blocks)

    with pytest.raises(RuntimeError, match=r"copied or pickled while .*state_dict\(\)"):
        fit(Copied, hydra(device_memory="60KiB"), zoo.batches(2))
