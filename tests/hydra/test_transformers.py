"""Models of the transformers library train as they are."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_embrace.hydra.errors import BlockError
from tests.hydra import transformers_zoo, zoo
from tests.hydra.cases import PLACES, Case, assert_equals_plain, sample
from tests.hydra.runs import QUIET, hydra


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01)


CASES = {
    "gpt2": Case(transformers_zoo.GPT2, "400KiB", zoo.sentences),
    "llama": Case(partial(transformers_zoo.Llama, adamw), "500KiB", zoo.sentences),
    "gpt2, checkpointed": Case(transformers_zoo.CheckpointedGPT2, "400KiB", zoo.sentences),
    # the loss is a third user of the hidden state, beside the two in the block that follows
    "llama, distilled": Case(transformers_zoo.DistilledLlama, "300KiB", zoo.sentences, tolerance=1e-6),
    # the encoder's result goes to the keys and the values of four blocks, and a bias to all blocks of its list
    "t5": Case(transformers_zoo.T5, "450KiB", zoo.sentences, tolerance=1e-6),
}


@pytest.mark.parametrize(("name", "tier", "prefetch", "keep"), sample(CASES))
def test_equals_plain(name: str, tier: str, prefetch: bool, keep: bool, tmp_path: Path) -> None:
    """Twenty steps, bit by bit, dropout included."""
    assert_equals_plain(CASES[name], name, tmp_path if tier == "disk" else None, prefetch, keep)


@pytest.mark.matrix
@pytest.mark.parametrize(("tier", "prefetch", "keep"), PLACES)
@pytest.mark.parametrize("name", CASES)
def test_equals_plain_everywhere(name: str, tier: str, prefetch: bool, keep: bool, tmp_path: Path) -> None:
    assert_equals_plain(CASES[name], name, tmp_path if tier == "disk" else None, prefetch, keep)


@pytest.mark.parametrize("kind", [transformers_zoo.GPT2, transformers_zoo.Llama, transformers_zoo.T5])
def test_a_cache_is_refused(kind: Any) -> None:
    """In the first forward, before anything is trained; the message has the cure, which the tests above take."""
    model = kind(use_cache=True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(BlockError, match=r"block 'model\..*' is given a \w*Cache .*use_cache=False"):
        Trainer(**QUIET, strategy=hydra()).fit(model, DataLoader(zoo.sentences(2), batch_size=None))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
