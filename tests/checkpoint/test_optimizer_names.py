"""Optimizer states with names, and with DDP's numbers again."""

from __future__ import annotations

import torch
from torch import nn

from lightning_embrace.checkpoint.optimizer_names import named_state, numbered_state, unpacked_state
from tests.support.lifecycle import assert_same


def trained(sparse: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Groups in another order than the model's, and a parameter that the model does not have."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(5, 3, sparse=sparse), "head": nn.Linear(3, 1)})
    alone = nn.Parameter(torch.ones(1))
    groups = [{"params": model["head"].parameters()}, {"params": [alone, *model["table"].parameters()], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    for ids in ([1, 3, 1], [0, 3, 2]):
        optimizer.zero_grad()
        (model["head"](model["table"](torch.tensor(ids))) * alone).pow(2).sum().backward()
        optimizer.step()
    return model, optimizer


def test_there_and_back() -> None:
    """Dense and sparse states come back bit by bit, in torch's order."""
    for sparse in (False, True):
        model, optimizer = trained(sparse)
        stored = named_state(model, [], optimizer)
        assert list(stored["state"]) == ["head.weight", "head.bias", "parameter 2", "table.weight"]
        assert [g["params"] for g in stored["param_groups"]] == [
            ["head.weight", "head.bias"],
            ["parameter 2", "table.weight"],
        ]
        assert set(stored["state"]["table.weight"]["momentum_buffer"]) == {"sparse_coo"} if sparse else True
        again = unpacked_state(numbered_state(stored))
        wanted = optimizer.state_dict()
        if sparse:
            wanted["state"][3]["momentum_buffer"] = wanted["state"][3]["momentum_buffer"].coalesce()
        assert_same(again, wanted, tolerance=0.0)


def test_a_state_that_was_never_made() -> None:
    """FSDP's folders have no `state` of an optimizer that has made none, and torch wants one."""
    assert numbered_state({"param_groups": [{"params": ["b", "a"], "lr": 1}]}) == {
        "state": {},
        "param_groups": [{"params": [0, 1], "lr": 1}],
    }


def test_order() -> None:
    """By number, whatever the order in which names were stored; what is no parameter's comes last."""
    stored = {"state": {"a": 1, "all": 2, "b": 3}, "param_groups": [{"params": ["b"]}, {"params": ["a"]}]}
    assert list(numbered_state(stored)["state"].items()) == [(0, 3), (1, 1), ("all", 2)]
