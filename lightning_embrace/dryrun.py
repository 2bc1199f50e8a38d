"""What a model's tables would be on how many ranks, without making any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from rich.table import Table
from torch import nn

from lightning_embrace.plan import render_plan
from lightning_embrace.sizes import human_bytes
from lightning_embrace.tables.columns import column_ranges
from lightning_embrace.tables.find import Place, TableSpec, find_tables


class TablePlan(NamedTuple):
    """One table.

    Attributes:
        name: Name of its first module.
        rows: V.
        columns: D.
        place: ``"sharded"``, ``"replicated"``, ``"dense"`` or ``"frozen"``.
        reason: Why it lives there.
        ranges: By rank, the half-open range of columns that it holds.
        nbytes: By rank, the bytes of its weight; an optimizer state of the same shape adds as much.
    """

    name: str
    rows: int
    columns: int
    place: Place
    reason: str
    ranges: list[tuple[int, int]]
    nbytes: list[int]


class Plan(NamedTuple):
    """A model's tables on a number of ranks.

    Attributes:
        world_size: N.
        tables: The tables.
        rendered: The same for people; ``rich.print`` shows it.
    """

    world_size: int
    tables: list[TablePlan]
    rendered: Table

    def nbytes(self) -> list[int]:
        """By rank, the bytes of all tables' weights."""
        return [sum(table.nbytes[rank] for table in self.tables) for rank in range(self.world_size)]


def plan_of(
    model: nn.Module | Callable[[], nn.Module], world_size: int, tables: Literal["auto"] | Sequence[str] = "auto"
) -> Plan:
    """Decides where the tables of a model would live, without memory for any of them.

    Args:
        model: What builds it, a LightningModule's class say; called on the meta device, as is ``configure_model``. Or a
            module that was built there.
        world_size: N, the number of ranks.
        tables: As in :class:`~lightning_embrace.EmbRaceStrategy`.

    Returns:
        The plan.

    Raises:
        ValueError: ``world_size`` is not positive, a pattern matches no table, or a table asks for what torch refuses.
    """
    if world_size < 1:
        raise ValueError(f"plan_of(world_size={world_size!r}): give a positive number of ranks.")
    with torch.device("meta"):
        made = model if isinstance(model, nn.Module) else model()
        configure = getattr(made, "configure_model", None)
        if callable(configure):
            configure()
    specs = find_tables(made, tables)
    planned = [_planned(spec, world_size) for spec in specs]
    plan = Plan(world_size, planned, Table())
    note = f"a rank's tables take {human_bytes(max(plan.nbytes()))} at most, and as much again for each optimizer state"
    return plan._replace(rendered=render_plan(specs, {}, world_size, notes=[note]))


def _planned(spec: TableSpec, world_size: int) -> TablePlan:
    rows, columns = spec.shape
    ranges = [(0, columns)] * world_size
    if spec.place == "sharded":
        ranges = column_ranges(columns, world_size)
    nbytes = [rows * (stop - start) * spec.parameter.element_size() for start, stop in ranges]
    return TablePlan(spec.name, rows, columns, spec.place, spec.reason, ranges, nbytes)
