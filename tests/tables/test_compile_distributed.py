"""torch.compile on parts of a model: look-ups stay out of the graphs, the rest is compiled, and the numbers are equal.

Reference is the same model, not compiled, in one process that plays all ranks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_embrace import EmbRaceStrategy
from lightning_embrace.tables.modules import give_back, take_over
from tests.exactness import story as s
from tests.support.lifecycle import At
from tests.support.ranks import Ranks
from tests.support.training import Outcome, assert_equal, outcome, train

STEPS = 5
#: what each graph of this process calls
_graphs: list[set[str]] = []


def recording(graph: Any, inputs: Any) -> Any:
    """A backend: compiles forward and backward, and notes what is in them."""
    _graphs.append({str(node.target) for node in graph.graph.nodes if node.op in ("call_function", "call_method")})
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


class Around(nn.Module):
    """Dense layers before and after look-ups, in a module that may be compiled as one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(s.ROWS, 10, sparse=True, padding_idx=0)
        self.bags = nn.EmbeddingBag(s.ROWS, 10, sparse=True, mode="sum")
        self.scale = nn.Parameter(torch.full((10,), 0.7))
        self.body = nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, ids: Tensor, more: Tensor) -> Tensor:
        ids = (ids + 1) % s.ROWS
        words = torch.sin(self.words(ids).sum(1) * self.scale)
        words = words + self.words(more).sum(1)
        return self.body(torch.tanh(words + self.bags(more) * self.scale))


class Decorated(Around):
    """Its ``forward`` is compiled where it is written."""

    forward = torch.compile(Around.forward, backend=recording)


@torch.compile(backend=recording)
def outside(around: Around, x: Tensor) -> Tensor:
    """A compiled function of which no module knows, and that reads parameters."""
    return torch.tanh(x * around.scale)


def wrapped(around: nn.Module, backend: Any) -> Any:
    """`torch.compile(module)`."""
    return torch.compile(around, backend=backend)


def in_place(around: nn.Module, backend: Any) -> Any:
    """`module.compile()`."""
    around.compile(backend=backend)
    return around


def the_parts(around: Any, backend: Any) -> Any:
    """The dense layers and a table, each by itself."""
    around.body, around.words = (torch.compile(m, backend=backend) for m in (around.body, around.words))
    return around


def a_method(around: Any, backend: Any) -> Any:
    """`self.forward = torch.compile(self.forward)`."""
    around.forward = torch.compile(around.forward, backend=backend)
    return around


def decorated(around: Any, backend: Any) -> Any:
    """`@torch.compile` on the method."""
    around.__class__ = Decorated
    return around


def nothing(around: nn.Module, backend: Any) -> Any:
    """The reference."""
    return around


HOW = {how.__name__: how for how in (wrapped, in_place, the_parts, a_method, decorated)}


class Compiled(s.Story):
    """A model with a part that is compiled in ``__init__`` or in ``configure_model``.

    Args:
        optimizer: As in :class:`~tests.exactness.story.Story`.
        how: Compiles it.
        late: In ``configure_model``.
        backend: For torch.compile.
    """

    def __init__(self, optimizer: str, how: Any = nothing, late: bool = False, backend: Any = recording) -> None:
        super().__init__(optimizer)
        del self.words, self.bags, self.body
        self.around: Any = Around()
        self.how, self.backend, self.done = how, backend, False
        if not late:
            self.around, self.done = how(self.around, backend), True

    def configure_model(self) -> None:
        if not self.done:
            self.around, self.done = self.how(self.around, self.backend), True

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        value = self.around(batch["ids"], batch["more"])
        return (value.mean(1) - batch["target"]).pow(2).sum()


class UsedOutside(Compiled):
    """Its parameter is read by a compiled function that no module keeps."""

    compiled = True

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        around = self.around
        function: Any = outside if self.compiled else outside._torchdynamo_orig_callable
        x = function(around, around.words(batch["ids"]).sum(1))
        return (around.body(x).mean(1) - batch["target"]).pow(2).sum()


class UsedOutsidePlainly(UsedOutside):
    """The reference."""

    compiled = False


class Seen(NamedTuple):
    """What a run leaves behind on a rank."""

    outcome: Outcome
    #: number of graphs after each step
    counts: list[int]
    graphs: list[set[str]]
    relaxed: list[bool]


def on_rank(make: Callable[[], Any], data: s.Steps, schedule: str, look: Any) -> Seen:
    """Runs in a worker."""
    torch._dynamo.reset()
    _graphs.clear()
    mine: Any = [step[int(os.environ["LOCAL_RANK"])] for step in data]
    count = At("on_train_batch_end", lambda *_: len(_graphs))
    witness = s.Witness()
    strategy = EmbRaceStrategy(tables=["around.words", "around.bags"], schedule=schedule, lookahead=look)  # type: ignore[arg-type]
    with s.slow_wire():
        model, trainer = train(make, mine, strategy, len(data[0]), callbacks=[count, witness])
    return Seen(named(outcome(model, trainer)), count.results, list(_graphs), [w["relaxed"] for w in witness.seen])


def named(seen: Outcome) -> Outcome:
    """The names that they have without torch.compile."""
    return seen._replace(state={name.replace("_orig_mod.", ""): value for name, value in seen.state.items()})


def ids(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model looks up, by the names that the user wrote."""
    return {"around.words": torch.cat([(batch["ids"] + 1) % s.ROWS, batch["more"]]), "around.bags": batch["more"]}


def compare(
    ranks: Callable[[int], Ranks],
    make: Callable[[], Any],
    plain: Callable[[], Any],
    schedule: str = "2d",
    world_size: int = 2,
    look: Any = ids,
    steps: int = STEPS,
) -> list[Seen]:
    """Asserts equal numbers."""
    data = s.drawn(steps, world_size)
    reference = named(s.in_one_process(plain, data).outcome)
    seen = ranks(world_size).run(on_rank, make, data, schedule, look)
    for rank, ours in enumerate(seen):
        assert_equal(ours.outcome, reference._replace(losses=reference.losses[rank::world_size]))
    return seen


def assert_compiled(seen: list[Seen]) -> None:
    """Dense layers are in graphs, no look-up is, and nothing is compiled anew after the first steps."""
    for rank in seen:
        called = set().union(*rank.graphs)
        assert any("linear" in name or "addmm" in name for name in called), called
        assert not any("embedding" in name or "unique" in name or "c10d" in name for name in called), called
        assert rank.counts[-1] == rank.counts[1] > 0, rank.counts
        assert not any(rank.relaxed), "a graph reads its parameters unseen: no update may be late"


@pytest.mark.parametrize(
    ("how", "late", "schedule"),
    [
        ("wrapped", True, "2d"),
        ("in_place", False, "fifo"),
        ("the_parts", True, "2d"),
        ("a_method", False, "2d"),
        ("decorated", False, "2d"),
    ],
)
def test_a_compiled_part(ranks: Callable[[int], Ranks], how: str, late: bool, schedule: str) -> None:
    """However it was compiled, and wherever: graphs around the look-ups, and the numbers of plain training.

    The tables are named as the user wrote them, in `tables=` and in `lookahead=`: torch.compile puts `_orig_mod` in
    between.
    """
    make = functools.partial(Compiled, "adam", HOW[how], late)
    assert_compiled(compare(ranks, make, functools.partial(Compiled, "adam"), schedule))


@pytest.mark.matrix
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("schedule", ["2d", "horizontal", "vertical", "fifo"])
@pytest.mark.parametrize("how", HOW)
def test_every_compiled_part(
    ranks: Callable[[int], Ranks], how: str, late: bool, schedule: str, world_size: int
) -> None:
    """The full product, with a look-ahead that learns."""
    make = functools.partial(Compiled, "momentum", HOW[how], late)
    plain = functools.partial(Compiled, "momentum")
    assert_compiled(compare(ranks, make, plain, schedule, world_size, look="auto", steps=10))


def test_a_compiled_function_that_no_module_keeps(ranks: Callable[[int], Ranks]) -> None:
    """It reads a parameter of which an update is late. It must see the update, every time, compiled or not."""
    make = functools.partial(UsedOutside, "adam")
    seen = compare(ranks, make, functools.partial(UsedOutsidePlainly, "adam"))
    assert all(any(rank.relaxed) for rank in seen), "nothing was late"


@pytest.mark.matrix
def test_inductor(ranks: Callable[[int], Ranks]) -> None:
    """The default backend, which generates and builds C++ code."""
    make = functools.partial(Compiled, "adam", wrapped, backend="inductor")
    compare(ranks, make, functools.partial(Compiled, "adam"))


def test_a_compiled_lightning_module_is_refused_by_lightning() -> None:
    """Before anything is started: Lightning allows it for strategies of its own only. Compile parts instead."""
    model = torch.compile(Compiled("adam"), backend="eager")
    trainer = Trainer(accelerator="cpu", devices=2, strategy="embrace", logger=False, enable_checkpointing=False)
    with pytest.raises(
        RuntimeError, match=r"compiled model is incompatible with the current strategy.*EmbRaceStrategy"
    ):
        trainer.fit(model, [])  # type: ignore[arg-type]


@pytest.mark.parametrize("table", [nn.Embedding(3, 2), nn.EmbeddingBag(3, 2)], ids=lambda table: type(table).__name__)
def test_fullgraph_cannot_be_had(table: nn.Module) -> None:
    """A look-up waits for other ranks: the error says so, instead of a graph that hangs or is wrong."""
    handle: Any = None
    take_over(table, handle)
    try:
        with pytest.raises(
            torch._dynamo.exc.Unsupported, match=r"exchanges rows with other ranks; leave out fullgraph"
        ):
            torch.compile(lambda ids: table(ids) * 2, backend="eager", fullgraph=True)(torch.tensor([[1, 2]]))
    finally:
        give_back(table)
