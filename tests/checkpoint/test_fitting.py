"""The checkpoint of another model is refused before anything is loaded, wherever torch would refuse it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_embrace.checkpoint.fitting import check_fits


class Own(nn.Module):
    """Saves and loads in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict[prefix + "w"] = state_dict.pop(prefix + "old")
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Extra(nn.Linear):
    """Has something that is not a tensor."""

    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def model() -> nn.Module:
    scalar = nn.Module()
    scalar.register_buffer("s", torch.zeros(()))
    return nn.ModuleDict({"a": nn.Linear(2, 3), "n": nn.BatchNorm1d(3), "own": Own(), "x": Extra(1, 1), "s": scalar})


def state(**changes: Any) -> dict[str, Any]:
    saved = dict(model().state_dict())
    saved["own.old"] = saved.pop("own.w")
    for key, value in changes.items():
        key = key.replace("__", ".")
        if value is None:
            del saved[key]
        else:
            saved[key] = value
    return saved


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"a__weight": None},
        {"more": torch.ones(1)},
        {"a__weight": torch.ones(3, 4)},
        {"a__weight": torch.ones(3, 4), "more": torch.ones(1), "n__bias": None},
        {"s__s": torch.ones(1)},
        {"s__s": torch.ones(2)},
        {"x___extra_state": None},
        {"own__old": torch.ones(5)},
    ],
    ids=str,
)
def test_refuses_what_torch_refuses(changes: dict[str, Any], strict: bool) -> None:
    """In its words, and before the first weight has changed; what a module does in its own way is left to torch."""
    mine, torchs = model(), model()
    before = {k: v for k, v in mine.state_dict().items() if isinstance(v, torch.Tensor)}
    said: dict[str, str] = {}
    for name, load in {
        "ours": lambda s: check_fits(mine, s, strict),
        "torch's": lambda s: torchs.load_state_dict(s, strict=strict),
    }.items():
        try:
            load(state(**changes))
        except RuntimeError as error:
            said[name] = str(error)
    if "own__old" not in changes:
        assert said.keys() in ({"ours", "torch's"}, set())
    for key in ("a.weight", "more", "n.bias", "s.s", "_extra_state"):
        assert (key in said.get("ours", "")) == (key in said.get("torch's", "")), (key, said)
    for kind in ("Missing key(s)", "Unexpected key(s)", "size mismatch for a.weight: copying a param with shape"):
        assert (kind in said.get("ours", "")) == (kind in said.get("torch's", "")), (kind, said)
    assert all(torch.equal(v, before[k]) for k, v in mine.state_dict().items() if k in before)


def test_models_that_load_their_own_way_are_left_to_themselves() -> None:
    """An overridden ``state_dict`` or ``load_state_dict`` may make anything of a checkpoint."""

    class Renaming(nn.Linear):
        def state_dict(self, *arguments: Any, **named: Any) -> Any:
            return {f"new.{k}": v for k, v in super().state_dict(*arguments, **named).items()}

    class Loading(nn.Linear):
        def load_state_dict(self, *arguments: Any, **named: Any) -> Any:
            return None

    for cls in (Renaming, Loading):
        check_fits(cls(2, 2), {"anything": torch.ones(1)}, True)


def test_files_of_old_releases() -> None:
    """Without the counters of batch norms, which torch makes up."""
    check_fits(model(), state(n__num_batches_tracked=None), True)
