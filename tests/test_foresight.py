"""One step's plan carried into the next, in a world of one rank: what is brought, when, and what is left out."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_embrace.comm.base import Done, Handle
from lightning_embrace.comm.fake import TwinCommunicator
from lightning_embrace.comm.torch_backend import ExchangeError
from lightning_embrace.foresight import Caution, Foresight, Known, verdicts_on
from lightning_embrace.tables.table import ShardedTable

CALM = Caution(False, False)


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


class World:
    """A table of one rank, its optimizer and the engine around it."""

    def __init__(self, vertical: bool = True, momentum: float = 0.0) -> None:
        self.comm = TwinCommunicator(1)
        weight = nn.Parameter(torch.arange(20, dtype=torch.float64).view(10, 2))
        self.table = ShardedTable(0, "t", weight, False, 2, 0, 1)
        self.optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
        self.foresight = Foresight(self.comm, [self.table], vertical)

    def begin(self, following: Tensor | None, caution: Caution = CALM) -> None:
        self.table.forget()
        self.foresight.begin(Known([following]), caution, [self.optimizer], 0, 0)

    def look_up(self, wanted: Tensor) -> None:
        """As a round does."""
        missing = self.table.window.missing(wanted)
        if len(missing):
            self.table.asked[0].append(missing)
            self.table.window.add(missing, self.table.read(missing))

    def end(self, synchronise: bool = True) -> None:
        self.foresight.forward_is_over(synchronise)
        self.foresight.plan_is_made()

    @property
    def here(self) -> list[int]:
        return sorted(self.table.asked_ids(0).tolist())


def test_rows_of_a_known_batch_are_here_before_the_first_look_up() -> None:
    """Early those that this step leaves alone; the rest when the next step begins; each row once."""
    world = World()
    world.begin(ids(1, 2, 3))
    assert world.here == [], "nobody has foretold the first batch"
    world.look_up(ids(1, 5))
    world.end()
    assert world.comm.issued("all_to_all") == ["ids of the next step", "early rows of the next step"]
    world.begin(None)
    assert world.here == [1, 2, 3] and world.foresight.planned == [0]
    assert (world.foresight.counts["early"], world.foresight.counts["rest"]) == (2, 1)
    assert world.comm.issued("all_to_all")[2:] == ["rows of step 0"]
    world.end()
    world.begin(None)
    assert world.here == [] and world.foresight.planned == []


@pytest.mark.parametrize(
    "how", ["not vertical", "momentum", "disturbed", "accumulating"], ids=lambda how: how.replace(" ", "-")
)
def test_nothing_leaves_early_that_may_move(how: str) -> None:
    """Then all rows come when the step begins, with what the optimizer has made of them."""
    world = World(vertical=how != "not vertical", momentum=0.9 if how == "momentum" else 0.0)
    world.begin(ids(4), Caution(False, True) if how == "disturbed" else CALM)
    world.look_up(ids(5))
    world.end(synchronise=how != "accumulating")
    assert "early rows of the next step" not in world.comm.issued()
    with torch.no_grad():
        world.table.parameter[4] += 100
    world.begin(None)
    assert world.table.window.rows_UD.tolist() == [[108.0, 109.0]]


def test_early_rows_are_given_up_when_somebody_has_changed_the_weights() -> None:
    """`load_state_dict`, or a callback with a `weight` in its hands: they are fetched anew."""
    world = World()
    world.begin(ids(4))
    world.look_up(ids(5))
    world.end()
    world.foresight.moved = True
    with torch.no_grad():
        world.table.parameter[4] += 100
    world.begin(None)
    assert world.table.window.rows_UD.tolist() == [[108.0, 109.0]]
    assert [world.foresight.counts[kind] for kind in ("early", "in vain", "rest")] == [0, 1, 1]


class _Late(Done):
    """Ids that arrive when they are let in."""

    def __init__(self, result: Tensor, error: Exception | None = None) -> None:
        super().__init__(result)
        self.error, self.here = error, threading.Event()

    def wait(self) -> Tensor:
        self.here.wait()
        if self.error is not None:
            raise self.error
        return super().wait()


def late_ids(world: World, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> list[_Late]:
    issue, late = world.comm.all_to_all, []

    def all_to_all(send: Tensor, *arguments: Any, **options: Any) -> Handle:
        handle = issue(send, *arguments, **options)
        if arguments[2] != "ids":
            return handle
        late.append(_Late(handle.wait(), error))
        return late[-1]

    monkeypatch.setattr(world.comm, "all_to_all", all_to_all)
    return late


def test_backward_goes_on_while_ids_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Early rows leave when the ids are there, whatever the training thread does; it waits at the end of backward."""
    world = World()
    late = late_ids(world, monkeypatch)
    world.begin(ids(4))
    world.foresight.forward_is_over(True)
    assert world.comm.issued()[-1] == "ids of the next step"
    late[0].here.set()
    world.foresight.plan_is_made()
    assert world.comm.issued()[-1] == "early rows of the next step"


def test_what_fails_beside_backward_fails_the_training_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    late = late_ids(world, monkeypatch, ExchangeError("gone"))
    world.begin(ids(4))
    world.foresight.forward_is_over(True)
    late[0].here.set()
    with pytest.raises(ExchangeError, match="gone"):
        world.foresight.plan_is_made()


def test_rows_of_the_next_step_split_gradients_only_where_that_is_allowed() -> None:
    world = World()
    world.begin(ids(4))
    world.end()
    assert {k: v.tolist() for k, v in world.foresight.next_rows().items()} == {0: [4]}
    world.begin(ids(4), Caution(True, False))
    world.end()
    assert world.foresight.next_rows() == {}
    plain = World(vertical=False)
    plain.begin(ids(4))
    plain.end()
    assert plain.foresight.next_rows() == {}


def test_what_an_optimizer_allows() -> None:
    tables = [World().table, World().table]
    tables[1].index = 1
    plain = torch.optim.SGD([tables[0].parameter], lr=0.1)
    trained, untrained = verdicts_on(tables, [plain])
    assert trained == (None, True)
    assert untrained == ("no optimizer trains it", False), "what nobody trains may be moved by anybody"
