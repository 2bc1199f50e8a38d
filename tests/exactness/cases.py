"""The matrix of exactness: every way to train × every kind of table × N × D × schedule."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple, get_args

from lightning_embrace.schedule.order import Name
from tests.support.models import (
    OPTIMIZERS,
    Bag,
    ManualBag,
    ManualOneTable,
    ManualTwoTables,
    OneTable,
    Small,
    TwoTables,
)

DENSE = ("sgd", "momentum", "adam", "adamw", "adagrad")
#: of SparseAdam's two, the first trains a model of nothing but tables, the other one is stepped by hand beside SGD
SPARSE = ("sgd", "adagrad", "sparseadam", "sparseadam by hand", *(o for o in OPTIMIZERS if o.startswith("our ")))
TRAININGS = (*(f"{o}, dense" for o in DENSE), *(f"{o}, sparse" for o in SPARSE))
MODELS: dict[str, tuple[type[Small], type[Small]]] = {
    "embedding": (OneTable, ManualOneTable),
    "bag": (Bag, ManualBag),
    "two tables": (TwoTables, ManualTwoTables),
}
WORLD_SIZES = (1, 2, 3)
COLUMNS = (2, 10, 16)
SCHEDULES: tuple[Name, ...] = get_args(Name)


class Case(NamedTuple):
    """One entry of the matrix."""

    training: str
    model: str
    world_size: int
    columns: int
    schedule: Name

    def __str__(self) -> str:
        return f"{self.training} {self.model} N={self.world_size} D={self.columns} {self.schedule}"

    def make(self) -> Callable[[], Small]:
        """Builds the model; can be pickled."""
        optimizer, kind = self.training.split(", ")
        automatic, by_hand = MODELS[self.model]
        if optimizer == "sparseadam by hand":
            return functools.partial(by_hand, self.columns, True, "sparseadam")
        head = optimizer != "sparseadam"
        return functools.partial(automatic, self.columns, kind == "sparse", optimizer, head)


#: all of it, by N so that worker processes are used one pool after the other; schedules last: they share a reference
MATRIX = [
    Case(training, model, world_size, columns, schedule)
    for world_size, training, model, columns, schedule in itertools.product(
        WORLD_SIZES, TRAININGS, MODELS, COLUMNS, SCHEDULES
    )
]
