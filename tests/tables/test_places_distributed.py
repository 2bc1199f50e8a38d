"""Tables that stay whole train exactly all the same, whatever keeps them whole."""

from __future__ import annotations

import functools

import pytest
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from lightning_embrace import EmbRaceStrategy
from tests.support.training import assert_equal
from tests.tables.scripts import ALL, Scripted, check, look, on_rank

V = 9
_embedding = functools.partial(nn.Embedding, V, 5)
_DDP = functools.partial(DDPStrategy, find_unused_parameters=True)


class Tied(Scripted):
    """The output projection is the table; with ``full`` it is used in every step."""

    def __init__(self, optimizer: str, sparse: bool = False) -> None:
        super().__init__(optimizer, t=functools.partial(_embedding, sparse=sparse), other=_embedding)
        self.out = nn.Linear(5, V, bias=False)
        self.out.weight = self.t.weight

    def look_up(self, call):
        values = super().look_up(call)
        return self.out(values) if call.get("project") else values


@pytest.mark.parametrize(("sparse", "optimizer"), [(False, "adam"), (True, "sgd")])
def test_tied(ranks, sparse, optimizer):
    """A tied table is synchronised as dense; steps in which only look-ups reach it, on some or all ranks, included."""
    projected, plain = look("t", [1, 2], project=True), look("t", [[2, 3]])
    data = [[[projected], [plain, look("other", [1])]], [[projected], [projected]], [[plain], [look("other", [1])]]]
    if sparse:  # a step with look-ups only: the gradient is sparse in one process, its values are the same
        data = [*data, [[plain], [plain]]]
    ours, _ = check(ranks, functools.partial(Tied, optimizer, sparse), data)
    assert ours[0].sent["dense"] > ours[0].sent["rows"] > 0


@pytest.mark.parametrize("requires_grad", [False, True])
def test_frozen(ranks, requires_grad):
    """A frozen table is looked up without any exchange, and trains when it is thawed later."""
    calls = [look("t", [1, 2]), look("other", [3])]
    model = Thawed if requires_grad else Frozen
    ours, _ = check(ranks, functools.partial(model, "adam"), [[calls, calls[:1]], [calls[1:], calls], [calls, []]])
    assert (ours[0].sent.get("replicated", 0) > 0) == requires_grad
    assert ours[0].sent["rows"] > 0


class Frozen(Scripted):
    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer, t=_embedding, other=_embedding)
        self.t.weight.requires_grad_(False)


class Thawed(Frozen):
    def on_train_batch_start(self, batch, batch_idx) -> None:
        self.t.weight.requires_grad_(batch_idx > 0)


class FrozenLater(Scripted):
    """Freezes a sharded table for one step."""

    def on_train_batch_start(self, batch, batch_idx) -> None:
        self.t.weight.requires_grad_(batch_idx != 1)


def test_sharded_table_frozen_for_a_step(ranks):
    """While it is frozen its look-ups require no gradient and the optimizer leaves it alone."""
    calls = [look("t", [1, 2]), look("other", [3])]
    data = [[calls, calls[:1]], [calls, calls], [calls, []]]
    check(ranks, functools.partial(FrozenLater, "adam", t=_embedding, other=_embedding), data)


@pytest.mark.parametrize("sparse", [False, True])
def test_max_norm(ranks, sparse):
    """Rows are renormalised on the rank that looks them up, as under ddp: each rank is compared with its own."""
    t = functools.partial(_embedding, max_norm=0.8, sparse=sparse)
    make = functools.partial(Scripted, "sgd", t=t)
    data = [[[look("t", [1, 2])], [look("t", [[2, r]])]] for r in range(3)]
    theirs = ranks(2).run(on_rank, make, data, _DDP)
    for mine, other in zip(ranks(2).run(on_rank, make, data, ALL), theirs):
        assert_equal(mine, other)
        assert mine.sent["replicated"] > 0


class Parametrised(Scripted):
    def __init__(self, optimizer: str, sparse: bool = False) -> None:
        super().__init__(optimizer, t=_embedding, other=functools.partial(_embedding, sparse=sparse))
        weight_norm(self.t)


def test_parametrised(ranks):
    """A table whose weight is computed trains its originals as dense parameters."""
    calls = [look("t", [1, 2]), look("other", [3])]
    check(ranks, functools.partial(Parametrised, "adam"), [[calls, calls[:1]], [calls[1:], calls]])


@pytest.mark.parametrize("tables", ["auto", ["other"], ["*", "!t"]])
@pytest.mark.parametrize(("sparse", "optimizer"), [(False, "adamw"), (True, "sparseadam")])
def test_replicated(ranks, tables, sparse, optimizer):
    """Too small, not matched or excluded: whole on every rank, and functional use is free."""
    calls = [look("t", [1, 2]), look("other", [3]), look("t", [[4, 0, 1]])]
    everywhere = [look("t", list(range(V)))]
    data = [[calls, calls[:1]], [calls[1:2], []], [[], []], [everywhere, everywhere], [calls, everywhere]]
    make = functools.partial(
        Functional, optimizer, **{n: functools.partial(_embedding, sparse=sparse) for n in ("t", "other")}
    )
    ours, _ = check(ranks, make, data, strategy=functools.partial(EmbRaceStrategy, tables=tables))
    assert ours[0].sent["replicated"] > 0
    assert (ours[1].sent.get("rows", 0) > 0) == (tables != "auto")


class Functional(Scripted):
    """Uses the weight of ``t`` itself."""

    def look_up(self, call):
        if call["table"] != "t":
            return super().look_up(call)
        return F.embedding(call["ids"], self.t.weight, sparse=self.t.sparse)
