"""The plan, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from lightning_embrace.hydra.plan import Budget, Plan, Planned, UnitCost
from lightning_embrace.hydra.sizes import human
from lightning_embrace.hydra.traffic import total, traffic
from lightning_embrace.plan import console_beside


def render_plan(units: Sequence[UnitCost], plan: Plan, budget: Budget, notes: Sequence[str] = ()) -> Table:
    """Draws which units live where, which move together, and what a step moves.

    Args:
        units: In forward order.
        plan: Where they are.
        budget: What there is.
        notes: More to say below.

    Returns:
        The table; ``rich.print`` shows it.
    """
    moved = traffic(units, plan, budget.spilled_gradients)
    captions = [
        f"device {human(plan.device_bytes)} of {human(budget.device)}: {human(budget.glue)} outside of blocks,"
        f" {human(budget.working)} for computing, {plan.slots} × {human(plan.slot_bytes)} for shards",
        f"host {human(plan.host_bytes)} of {human(budget.host)}, disk {human(plan.disk_bytes)}",
        f"a step reads {human(total(moved, 'read'))} ({human(moved['disk read'])} from the disk) and writes"
        f" {human(total(moved, 'written'))} ({human(moved['disk written'])})",
        *notes,
    ]
    table = Table(title="Hydra", title_justify="left", caption="\n".join(captions))
    table.caption_justify = "left"
    table.add_column("shard", justify="right")
    table.add_column("blocks", overflow="fold")
    table.add_column("place")
    for name in ("parameters", "gradients", "optimizer"):
        table.add_column(name, justify="right")
    table.add_column("activations")
    for number, indices in _rows(plan):
        chosen = [units[i] for i in indices]
        first, last = chosen[0].name, chosen[-1].name
        places = sorted({plan.places[i] for i in indices})
        table.add_row(
            number,
            first if len(chosen) == 1 else f"{first} … {last}",
            ", ".join(places),
            human(sum(u.weights for u in chosen)),
            human(sum(u.gradients for u in chosen)),
            human(sum(u.states for u in chosen)),
            _activations([plan.kept[i] for i in indices]),
        )
    return table


def show(planned: Planned, second_pass: str | None, bar: Any = None) -> None:
    """Prints the plan to stderr, where warnings go, without breaking a progress bar.

    Args:
        planned: The plan.
        second_pass: Why shards are not stepped in backward, or None.
        bar: Lightning's progress bar callback, if there is one.
    """
    with console_beside(bar) as console:
        if not planned.plan.shards:
            needed, there = human(planned.plan.device_bytes), human(planned.budget.device)
            console.print(f"Hydra: the model fits the device ({needed} of {there}), nothing is spilled")
            return
        when = "a shard is stepped in backward, as soon as its gradients are complete"
        if second_pass is not None:
            when = f"shards are stepped in a second pass: {second_pass}"
        console.print(render_plan(planned.units, planned.plan, planned.budget, [when]))


def _activations(kept: Sequence[bool]) -> str:
    if any(kept) and not all(kept):
        return f"kept of {sum(kept)}, the others' computed again"
    return "kept" if any(kept) else "computed again"


def _rows(plan: Plan) -> list[tuple[str, tuple[int, ...]]]:
    shards = [(str(n), indices) for n, indices in enumerate(plan.shards)]
    staying: list[list[int]] = []
    for index, place in enumerate(plan.places):
        if place == "device":
            if staying and staying[-1][-1] == index - 1 and plan.kept[index] == plan.kept[index - 1]:
                staying[-1].append(index)
            else:
                staying.append([index])
    return sorted(shards + [("–", tuple(s)) for s in staying], key=lambda row: row[1])
