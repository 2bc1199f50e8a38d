"""What the modules of a block keep in attributes."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from lightning_embrace.hydra.attributes import Attributes


def refuse(path: str) -> None:
    raise ValueError(path)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Dropout(0.5)
        self.count, self.names, self.by_name, self.last = 0, ["a"], {"a": 1}, deque([1], maxlen=2)
        self.state = torch.zeros(2)


def change(body: Body) -> None:
    body.count += 1
    body.names.append("b")
    body.by_name["b"] = 2
    body.last.append(2)
    body.part.p = 0.1
    body.new = "here"
    body.train(not body.training)


def look(body: Body) -> tuple[Any, ...]:
    values = body.count, list(body.names), dict(body.by_name), list(body.last), body.part.p, body.training
    return (*values, body.part.training, getattr(body, "new", None))


def test_as_they_were() -> None:
    """Whatever kind they are of, of all modules; afterwards they are the same objects as now."""
    body = Body()
    attributes = Attributes(body, refuse)
    before = look(body)
    with attributes.cut() as moment:
        change(body)
    after, names = look(body), body.names
    for _ in range(2):
        with attributes.as_before(moment):
            assert look(body) == before and body.names is not names
            change(body)
            assert look(body) == after
        assert look(body) == after and body.names is names
    body.new = "changed"
    with attributes.as_before(moment):
        pass
    assert body.new == "changed"


def test_tensors_with_a_graph() -> None:
    """Inside they are leaves, by themselves and in containers; what was set anew meanwhile stays."""
    body = Body()
    attributes = Attributes(body, refuse)
    outside = torch.ones(2, requires_grad=True) * 2
    body.part.context, body.several, body.named = outside, [outside, 1], {"x": outside}
    body.fixed, body.leaf = [torch.ones(2)], nn.Linear(1, 1).weight
    with attributes.cut():
        assert body.part.context.grad_fn is None and body.several[0].grad_fn is None and body.named["x"].grad_fn is None
        with pytest.raises(ValueError, match=r"^part\.context$"):
            (body.part.context * 3).sum().backward()
        body.named = "new"
    assert body.part.context is outside and body.several[0] is outside and body.named == "new"


def test_tensors_that_are_changed_in_place() -> None:
    body = Body()
    attributes = Attributes(body, refuse)
    with attributes.cut() as moment:
        pass
    assert attributes.changed_in_place(moment) is None
    body.state += 1
    assert attributes.changed_in_place(moment) == "state"
