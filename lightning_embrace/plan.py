"""The plan: which table lives where and why, and what a step costs on the wire beside the alternatives."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tqdm import tqdm  # type: ignore[import-untyped]  # comes with Lightning

from lightning_embrace.comm.traffic import ring_bytes
from lightning_embrace.sizes import human_bytes
from lightning_embrace.tables.columns import column_ranges
from lightning_embrace.tables.find import TableSpec
from lightning_embrace.tables.replicated import dense_elements, rows_are_smaller
from lightning_embrace.tables.usage import Usage


class TableCost(NamedTuple):
    """Bytes that one rank sends per step for a table, by scheme, and what the table takes per rank.

    Attributes:
        ddp_dense: AllReduce of the dense gradient.
        ddp_sparse: AllGather of the sparse gradient (int64 ids and rows).
        here: What this strategy sends.
        memory: Bytes of the weight on the rank that holds most; an optimizer state of its shape adds as much.
    """

    ddp_dense: int
    ddp_sparse: int
    here: int
    memory: int


def table_cost(spec: TableSpec, usage: Usage, world_size: int, wire_itemsize: int | None = None) -> TableCost:
    """Costs of one table.

    Args:
        spec: The table.
        usage: What one rank looks up in a step.
        world_size: N.
        wire_itemsize: Bytes of an element of exchanged rows, None: the table's.

    Returns:
        The costs; see the paper's table of volumes.
    """
    rows, columns = spec.shape
    itemsize = spec.parameter.element_size()
    unique_rows = usage.rows
    dense = ring_bytes(spec.nbytes, world_size)
    sparse = round((world_size - 1) * unique_rows * (columns * itemsize + 8))
    if spec.place == "frozen":
        return TableCost(0, 0, 0, spec.nbytes)
    if spec.place == "dense":
        return TableCost(dense, dense, dense, spec.nbytes)
    if spec.place == "replicated":
        by_rows = rows_are_smaller([round(unique_rows)] * world_size, rows, columns, itemsize, spec.sparse)
        here = ring_bytes(dense_elements(rows, columns, spec.sparse) * itemsize, world_size)
        if by_rows:
            here = round((world_size - 1) * unique_rows * (columns * itemsize + 4))
        return TableCost(dense, sparse, here, spec.nbytes)
    # rows out in forward, gradients back in backward; ids to every rank that owns columns
    vectors = 2 * (world_size - 1) / world_size * usage.vectors * columns * (wire_itemsize or itemsize)
    here = round(vectors + (world_size - 1) * usage.asking)
    width = max(stop - start for start, stop in column_ranges(columns, world_size))
    return TableCost(dense, sparse, here, rows * width * itemsize)


def render_plan(
    specs: Sequence[TableSpec],
    usage: dict[str, Usage],
    world_size: int,
    wire_itemsize: int | None = None,
    whole: Mapping[str, str | None] | None = None,
    notes: Sequence[str] = (),
) -> Table:
    """Draws the plan as a table for people; the arguments are those of :func:`print_plan`."""
    caption = "; ".join(notes) or None
    table = Table(title=f"EmbRace on {_ranks(world_size)}", title_justify="left", caption=caption)
    table.caption_justify = "left"
    table.add_column("table", overflow="fold")
    table.add_column("rows × columns", justify="right")
    table.add_column("place")
    table.add_column("why", overflow="fold")
    table.add_column("rows a step", justify="right")
    for name in ("ddp dense", "ddp sparse", "here"):
        table.add_column(f"{name}\nsent a step", justify="right")
    table.add_column("weight\na rank", justify="right")
    if whole:
        table.add_column("gradient", overflow="fold")
    for spec in specs:
        rows, columns = spec.shape
        known = spec.name in usage
        cost = table_cost(spec, usage.get(spec.name, Usage(0.0, 0.0, 0.0)), world_size, wire_itemsize)
        table.add_row(
            spec.name,
            f"{rows:,} × {columns}",
            spec.place,
            spec.reason,
            f"{usage[spec.name].rows:,.0f}" if known else "–",
            human_bytes(cost.ddp_dense),
            human_bytes(cost.ddp_sparse) if known or spec.place in ("dense", "frozen") else "–",
            human_bytes(cost.here) if known or spec.place in ("dense", "frozen") else "–",
            human_bytes(cost.memory),
            *([_in_parts(whole[spec.name]) if spec.name in whole else "–"] if whole else []),
        )
    return table


def print_plan(
    specs: Sequence[TableSpec],
    usage: dict[str, Usage],
    world_size: int,
    wire_itemsize: int | None = None,
    bar: Any = None,
    whole: Mapping[str, str | None] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Prints the plan to stderr, where warnings go, without breaking a progress bar.

    Args:
        specs: All tables.
        usage: What a step used of them.
        world_size: N.
        wire_itemsize: Bytes of an element of exchanged rows, None: the table's.
        bar: Lightning's progress bar callback, if there is one.
        whole: By table, why its gradient comes in one part; None where it comes in several.
        notes: More to say below.
    """
    with console_beside(bar) as console:
        if specs:
            console.print(render_plan(specs, usage, world_size, wire_itemsize, whole, notes))
        else:
            console.print(f"EmbRace on {_ranks(world_size)}: no embedding table, all gradients are averaged as in ddp")


@contextmanager
def console_beside(bar: Any) -> Iterator[Console]:
    """A console on stderr, where warnings go, whose lines do not break a progress bar."""
    live = getattr(bar, "progress", None)
    if isinstance(live, Progress) and live.live.is_started:
        yield live.console  # prints above its bars, any other would print between their lines
        return
    # in a notebook rich would send a display message, which a forked rank cannot
    console = Console(stderr=True, force_jupyter=False)
    if not console.is_terminal:
        console.width = 180
    with tqdm.external_write_mode(sys.stderr):  # takes bars away, and puts them back below
        yield console


def _in_parts(reason: str | None) -> str:
    return "in parts" if reason is None else f"whole: {reason}"


def _ranks(world_size: int) -> str:
    return f"{world_size} rank{'s' if world_size > 1 else ''}"
