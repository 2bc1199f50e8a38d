"""A vocabulary that has grown between two runs: training goes on, and what does not fit is said before it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_embrace.utilities import resize_embedding
from tests.support.lifecycle import Whole, assert_same, loader, make_model, make_strategy, make_trainer, plain, results
from tests.support.models import VOCABULARY

GROWN = VOCABULARY + 6


class Grown(Whole):
    """The life cycle's model, with tables of so many rows."""

    def __init__(self, rows: int = VOCABULARY, strict: bool = True, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.strict_loading = strict
        for name in ("words", "bags"):
            resize_embedding(self, name, rows)


def save(path: str, sparse: bool, optimizer: str) -> None:
    trainer = make_trainer(make_strategy("embrace"), max_epochs=1)
    trainer.fit(make_model(sparse=sparse, optimizer=optimizer), loader(3))
    trainer.save_checkpoint(path)


def go_on(strategy: str, path: str, world_size: int, **arguments: Any) -> Any:
    """One more epoch, with all of the new words in it."""
    model = make_model(cls=Grown, seed=5, **arguments)
    trainer = make_trainer(make_strategy(strategy), world_size, max_epochs=2)
    data = loader(3, 0, world_size)
    for batch in data.dataset:
        batch["ids"] = batch["ids"] + arguments["rows"] - VOCABULARY
    trainer.fit(model, data, ckpt_path=path, weights_only=True)
    return results(model, trainer)


@pytest.fixture
def old(ranks, tmp_path):
    def make(sparse: bool = False, optimizer: str = "adam") -> Path:
        ranks(2).run(save, str(tmp_path / "old.ckpt"), sparse, optimizer)
        return tmp_path / "old.ckpt"

    return make


@pytest.mark.parametrize(("sparse", "optimizer"), [(False, "adam"), (True, "momentum")])
def test_training_goes_on(ranks, old, sparse, optimizer):
    """With old rows and states as they were, the numbers are those of ddp from the same file."""
    path = old(sparse, optimizer)
    checkpoint = torch.load(path, weights_only=True)
    before = plain(checkpoint["state_dict"]["words.weight"])
    for name in ("words", "bags"):
        resize_embedding(checkpoint, name, GROWN)
    assert torch.equal(checkpoint["state_dict"]["words.weight"][:VOCABULARY], before)
    torch.save(checkpoint, path)
    arguments = {"rows": GROWN, "sparse": sparse, "optimizer": optimizer}
    expected = ranks(2).run(go_on, "ddp", str(path), 2, **arguments)
    assert len(expected[0]["losses"]) == 3
    assert_same(ranks(2).run(go_on, "embrace", str(path), 2, **arguments), expected)


def refused(path: str, rows: int, strict: bool) -> str:
    with pytest.raises((RuntimeError, ValueError)) as info:
        go_on("embrace", path, 2, rows=rows, strict=strict)
    return str(info.value)


@pytest.mark.parametrize("strict", [True, False])
def test_a_table_that_grew(ranks, old, strict):
    """Without the new rows in the file, the error says on every rank how they get there."""
    path = str(old())
    for said in ranks(2).run(refused, path, GROWN, strict):
        assert f"resize_embedding(checkpoint, 'words', {GROWN})" in said


def fewer(path: str) -> str:
    model = make_model()
    model.words = nn.Embedding(VOCABULARY - 1, 5).double()
    with pytest.raises(RuntimeError) as info:
        make_trainer(make_strategy("embrace"), max_epochs=2).fit(model, loader(3), ckpt_path=path, weights_only=True)
    return str(info.value)


def test_a_table_that_shrank(ranks, old):
    """It is said that there is no way."""
    for said in ranks(2).run(fewer, str(old())):
        assert f"Table 'words' has {VOCABULARY - 1} rows, fewer than the {VOCABULARY} in the checkpoint" in said


def test_a_state_that_did_not_grow(ranks, old):
    """torch would load it and fail in the optimizer's step, on some ranks or with other words."""
    path = old()
    checkpoint = torch.load(path, weights_only=True)
    states = checkpoint.pop("optimizer_states")
    for name in ("words", "bags"):
        resize_embedding(checkpoint, name, GROWN)
    torch.save({**checkpoint, "optimizer_states": states}, path)
    for said in ranks(2).run(refused, str(path), GROWN, True):
        assert f"The optimizer's state of table 'words' in the checkpoint has {VOCABULARY} rows" in said


def in_setup(path: str) -> Any:
    """The model's own hook makes the rows, where somebody prefers that to another file."""

    class Growing(Grown):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            for name in ("words", "bags"):
                resize_embedding(checkpoint, name, GROWN, nn.init.zeros_)

    model = make_model(cls=Growing, rows=GROWN)
    trainer = make_trainer(make_strategy("embrace"), max_epochs=2)
    trainer.fit(model, loader(3), ckpt_path=path, weights_only=True)
    return plain(dict(model.state_dict()))


def test_in_the_models_hook(ranks, old):
    """`on_load_checkpoint` may grow what has been read."""
    for state in ranks(2).run(in_setup, str(old())):
        assert state["words.weight"].shape[0] == GROWN and not state["words.weight"][VOCABULARY:].any()
