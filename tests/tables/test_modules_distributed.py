"""The user's modules stay the user's: sharing, nesting, late building, subclasses, identity, state dicts."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.training import train
from tests.tables.scripts import ALL, Scripted, check, look

V = 9
_embedding = functools.partial(nn.Embedding, V, 5)


class Shared(Scripted):
    """One weight in three modules, of which one is registered under two names, and a list of nested modules."""

    def __init__(self, optimizer: str, sparse: bool = False) -> None:
        super().__init__(optimizer)
        self.first = nn.Embedding(V, 5, padding_idx=1, sparse=sparse)
        self.inner = nn.ModuleDict({"second": nn.Embedding(V, 5, sparse=sparse)})
        self.bag = nn.EmbeddingBag(V, 5, mode="sum", sparse=sparse)
        self.inner["second"].weight = self.bag.weight = self.first.weight
        self.alias = self.first
        self.stack = nn.ModuleList(nn.Sequential(nn.Embedding(V, 3, sparse=sparse)) for _ in range(2))


@pytest.mark.parametrize(("sparse", "optimizer"), [(False, "adam"), (True, "sparseadam")])
def test_shared_and_nested(ranks, sparse, optimizer):
    """A weight used by several modules is one table, fetched once; the padding of one module is not the other's.

    Regression: a module registered under two names kept a shard under the second one in full state dicts.
    """
    calls = [
        look("first", [1, 2, 3]),
        look("alias", [2, 1]),
        look("inner.second", [1, 4]),
        look("bag", [[1, 2], [3, 4]]),
        look("stack.0.0", [5]),
        look("stack.1.0", [[5, 6]]),
    ]
    data = [[calls, calls[2:4]], [calls[:1], calls[3:]], [calls[4:5], []]]
    ours, _ = check(ranks, functools.partial(Shared, optimizer, sparse), data)
    # rank 0 asked for rows 1..4 of the shared table (2 columns on rank 1) in steps 0 and for 1..3 in step 1
    assert {"first.weight", "alias.weight", "inner.second.weight", "bag.weight"} <= ours[0].state.keys()


class BuiltLate(Scripted):
    """Builds its tables in ``setup``."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)

    def setup(self, stage: str) -> None:
        if not hasattr(self, "early"):
            torch.manual_seed(3)
            self.early = nn.Embedding(V, 5).double()
            self.late = nn.ModuleList([nn.EmbeddingBag(V, 4, mode="mean")]).double()


def test_built_in_setup(ranks):
    """Tables made in ``setup`` are sharded as well; of those made in ``configure_model``, see test_construction."""
    calls = [look("early", [1, 2]), look("late.0", [[1, 2, 3, 4, 5, 6, 7]])]
    ours, _ = check(ranks, functools.partial(BuiltLate, "adam"), [[calls, calls[:1]], [calls[1:], calls]])
    assert ours[0].sent["rows"] > 0


class Scaled(nn.Embedding):
    """A subclass with a forward of its own around torch's, and an own trained parameter."""

    def __init__(self, *args, factor: float = 2.0, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.factor = factor
        self.gain = nn.Parameter(torch.ones(self.embedding_dim))

    def forward(self, input, shift: int = 0):
        return super().forward((input + shift) % self.num_embeddings) * self.factor * self.gain


class ScaledTwice(Scaled):
    def forward(self, input):
        return super().forward(input, shift=1) + super().forward(input)


class Counted(nn.EmbeddingBag):
    def forward(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(*args, **kwargs)


def test_subclasses(ranks):
    """A user's forward that calls ``super().forward()`` runs as written, and its own parameters train."""
    tables = {
        "scaled": functools.partial(Scaled, V, 5, padding_idx=2),
        "twice": functools.partial(ScaledTwice, V, 3, factor=0.5),
        "counted": functools.partial(Counted, V, 4, mode="sum"),
    }
    calls = [look("scaled", [1, 2]), look("twice", [[8, 0]]), look("counted", [[1, 2, 3]])]
    check(ranks, functools.partial(Scripted, "adamw", **tables), [[calls, calls[1:]], [calls[:2], []]])


class _Watch(Callback):
    """Notes what is what before, during and after fit."""

    def __init__(self) -> None:
        self.notes = []

    def note(self, when: str, model) -> None:
        self.notes.append(
            (
                when,
                id(model.t),
                id(dict(model.named_parameters())["t.weight"]),
                isinstance(model.t, nn.Embedding) and isinstance(model.sub, Scaled),
                type(model.t) is nn.Embedding and type(model.sub) is Scaled,
                dict(model.named_parameters())["t.weight"].shape[1],
                [id(p) for p in model.parameters()],
            )
        )

    def on_fit_start(self, trainer, model) -> None:
        self.note("start", model)

    def on_train_batch_end(self, trainer, model, *args) -> None:
        self.note("batch", model)

    def on_train_end(self, trainer, model) -> None:
        self.note("end", model)


class Captured(Scripted):
    """Keeps parameter groups that were made in ``__init__``, as many users do."""

    def __init__(self) -> None:
        super().__init__("sgd", t=_embedding, sub=functools.partial(Scaled, V, 4))
        self.groups = [
            {"params": [self.t.weight], "lr": 0.5},
            {"params": [*self.sub.parameters(), self.scale], "lr": 0.1},
        ]

    def double(self):
        # keeps the Parameter objects, as torch does
        return super().double()

    def configure_optimizers(self):
        return torch.optim.Adam(self.groups)


def _identity_on_rank(data):
    watch = _Watch()
    rank, world_size = int(os.environ["LOCAL_RANK"]), len(data[0])
    model, trainer = train(Captured, [[s[rank]] for s in data], ALL(), world_size, callbacks=[watch])
    watch.note("after", model)
    grouped = [id(p) for g in trainer.optimizers[0].param_groups for p in g["params"]]
    leftovers = [k for m in model.modules() for k in m.__dict__ if "embrace" in k]
    hooks = [p._post_accumulate_grad_hooks for p in model.parameters() if p._post_accumulate_grad_hooks]
    return watch.notes, grouped == [id(p) for g in model.groups for p in g["params"]], leftovers, hooks


def test_identity(ranks):
    """Module and Parameter are the same objects throughout; the type is a subclass during fit and itself after it."""
    calls = [look("t", [1, 2]), look("sub", [1])]
    data = [[calls, calls], [calls, []]]
    for notes, grouped, leftovers, hooks in ranks(2).run(_identity_on_rank, data):
        assert [n[0] for n in notes] == ["start", "batch", "batch", "end", "after"]
        assert len({n[1] for n in notes}) == len({n[2] for n in notes}) == 1
        assert all(n[3] for n in notes)
        assert [n[4] for n in notes] == [False] * 4 + [True]
        assert [n[5] < 5 for n in notes] == [True] * 4 + [False]
        assert len({tuple(n[6]) for n in notes}) == 1
        assert grouped
        assert leftovers == []
        assert not any(hooks)


def test_groups_made_in_init(ranks):
    """An optimizer on groups captured in ``__init__`` trains the shards, each group with its own rate."""
    calls = [look("t", [1, 2]), look("sub", [1])]
    check(ranks, Captured, [[calls, calls], [calls, []], [calls[1:], calls]])


class _Load(Callback):
    """Loads known weights into the sharded model after the first step, and looks at its state dict."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seen = {}

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx) -> None:
        if batch_idx != 0:
            return
        if isinstance(model.t, nn.Embedding) and hasattr(model.t, "_embrace"):
            state = model.state_dict()
            self.seen = {k: (type(v), v.shape, v.dtype) for k, v in state.items() if k.startswith("t.")}
            value = state["t.weight"]
            assert value.placements == (Shard(1),)
            mesh = init_device_mesh("cpu", (trainer.world_size,))
            whole = torch.arange(V * 5, dtype=torch.float64).view(V, 5) / 50
            shard = distribute_tensor(whole, mesh, [Shard(1)])
            assert shard.to_local().shape == value.to_local().shape
            if self.kind == "dtensor":
                state["t.weight"] = shard
                model.load_state_dict(state)
                return
        full = {"t.weight": torch.arange(V * 5, dtype=torch.float64).view(V, 5) / 50}
        if self.kind == "module":
            model.t.load_state_dict({"weight": full["t.weight"]})
        else:
            model.load_state_dict(full, strict=False, assign=self.kind == "assign")


def _wrong_shapes_on_rank():
    """What loading tables of other shapes says, during fit."""
    said = []

    class Wrong(Callback):
        def on_train_batch_end(self, trainer, model, *args) -> None:
            for shape in ((V, 3), (V + 1, 5), (V, 5, 1)):
                with pytest.raises(RuntimeError) as raised:
                    model.load_state_dict({"t.weight": torch.zeros(shape)}, strict=False)
                said.append(str(raised.value))

    train(_model, [[[look("t", [1])]]], ALL(), 2, callbacks=[Wrong()])
    return said


def test_load_wrong_shapes_during_fit(ranks):
    """Regression: a table as narrow as this rank's shard was loaded as if it were the shard. Shapes are the whole's."""
    for said in ranks(2).run(_wrong_shapes_on_rank):
        for text, shape in zip(said, ("(9, 3)", "(10, 5)", "(9, 5, 1)")):
            assert "size mismatch for t.weight" in text
            assert f"shape {shape} from checkpoint, the shape in current model is (9, 5)" in text


def _load_on_rank(data, kind):
    load = _Load(kind)
    rank = int(os.environ["LOCAL_RANK"])
    model, _ = train(_model, [[s[rank]] for s in data], ALL(), len(data[0]), callbacks=[load])
    return model.t.weight.detach().clone(), load.seen


_model = functools.partial(Scripted, "sgd", t=_embedding)


@pytest.mark.parametrize(
    ("kind", "world_size"), [("full", 2), ("module", 2), ("dtensor", 2), ("dtensor", 3), ("assign", 2), ("full", 1)]
)
def test_load_state_dict_during_fit(ranks, kind, world_size):
    """A full table, or a DTensor of one, is loaded into the shards and seen by the very next look-up."""
    data = [[[look("t", [1, 2, r])] for r in range(world_size)] for _ in range(3)]
    plain, _ = train(_model, [list(s) for s in data], "auto", callbacks=[_Load("full")])
    for weight, seen in ranks(world_size).run(_load_on_rank, data, kind):
        torch.testing.assert_close(weight, plain.t.weight.detach(), rtol=0, atol=1e-12)
        assert seen == {"t.weight": (DTensor, (V, 5), torch.float64)}
