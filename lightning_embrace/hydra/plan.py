"""Which unit lives where. Pure decisions: sizes in, places out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_embrace.hydra.sizes import human

Place = Literal["device", "host", "disk"]
#: what of a unit's gradients is once more on the device while they are moved to the store
PACKING = 16 << 20


#: sizes are shown with three digits
_ROUNDING = 1.005


class DoesNotFitError(ValueError):
    """No plan keeps the budgets."""


@dataclass(frozen=True)
class UnitCost:
    """What one unit takes, in bytes.

    Attributes:
        name: For people.
        weights: Of its parameters.
        gradients: Of those that are trained.
        states: Of what the optimizer keeps for them.
        activations: Of its calls in one step, if they are kept: beside what they are given, which is kept in any case.
        calls: In a step; 0 where that is not known yet.
    """

    name: str
    weights: int
    gradients: int
    states: int
    activations: int = 0
    calls: int = 0

    @property
    def resident(self) -> int:
        """If it never leaves the device."""
        return self.weights + self.gradients + self.states


@dataclass(frozen=True)
class Budget:
    """What there is, in bytes.

    Attributes:
        device: Of the device.
        host: Of host memory.
        disk: Whether there is a disk tier.
        glue: What is always on the device: parameters outside of blocks, their gradients and states, buffers.
        working: What computing takes: activations of one block and of what is outside of blocks, what blocks are given,
            and what the optimizer's step takes.
        prefetch: Whether the next shard is to be loaded while one computes.
        spilled_gradients: Whether gradients wait in the store for a second pass.
        unmeasured: Until ``working`` is measured, the share that it is taken to be of what ``glue`` leaves.
    """

    device: int
    host: int
    disk: bool
    glue: int
    working: int
    prefetch: bool
    spilled_gradients: bool
    unmeasured: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Where everything is.

    Attributes:
        places: By unit.
        kept: By unit, whether activations are kept instead of computed again.
        activations: By unit, what they take.
        shards: Of the units that are not on the device: which move together.
        slots: How many shards the device has room for at a time.
        slot_bytes: Of each: weights and states.
        gradient_bytes: Of the gradients of shards that are in slots.
        device_bytes: All that the plan takes of the device.
        host_bytes: Of host memory.
        disk_bytes: Of the disk.
    """

    places: tuple[Place, ...]
    kept: tuple[bool, ...]
    activations: tuple[int, ...]
    shards: tuple[tuple[int, ...], ...]
    slots: int
    slot_bytes: int
    gradient_bytes: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int


class Planned(NamedTuple):
    """A plan with what it was made of."""

    units: tuple[UnitCost, ...]
    plan: Plan
    budget: Budget


def make_plan(units: Sequence[UnitCost], budget: Budget) -> Plan:
    """Puts on the device what fits, and into host memory and the disk what does not.

    Args:
        units: In forward order.
        budget: What there is.

    Returns:
        The plan.

    Raises:
        DoesNotFitError: There is none; the message says what is too large and what would help.
    """
    free = budget.device - budget.glue - budget.working
    places: list[Place] = ["device"] * len(units)
    kept = [False] * len(units)
    slots = slot_bytes = gradient_bytes = packing = 0
    left = free - sum(u.resident for u in units)
    spilling = left < 0
    if spilling:
        packing = min(PACKING, max((u.weights for u in units), default=0)) if budget.spilled_gradients else 0
        slots, slot_bytes, gradient_bytes = _slots(units, free - packing, budget)
        left = free - packing - slots * (slot_bytes + gradient_bytes)
    # the last ones first: they are where forward turns into backward. What has to be computed again takes longer than
    # what has to be moved, which is moved while something else computes
    for index in reversed(range(len(units))):
        if units[index].calls and units[index].activations <= left:
            left -= units[index].activations
            kept[index] = True
    for index in reversed(range(len(units))) if spilling else ():
        if units[index].resident <= left:
            left -= units[index].resident
        else:
            places[index] = "host"
    host, disk = _spill(units, places, budget)
    shards = tuple(_pack(units, places, slot_bytes, gradient_bytes))
    return Plan(
        tuple(places), tuple(kept), tuple(u.activations for u in units), shards, min(slots, len(shards)), slot_bytes,
        gradient_bytes, budget.device - left, host, disk,
    )  # fmt: skip


def _slots(units: Sequence[UnitCost], free: int, budget: Budget) -> tuple[int, int, int]:
    if not units:
        raise DoesNotFitError(
            f"HydraStrategy(device_memory={human(budget.device)!r}): the model has no blocks that could be moved. It"
            f" takes {human(budget.glue)}, and computing {human(budget.working)}. Give device_memory="
            f"{human(_ROUNDING * (budget.glue + budget.working))!r} or more, or keep its parameters in modules that are"
            " called, such as nn.Linear."
        )
    slot, gradients = max(u.weights + u.states for u in units), max(u.gradients for u in units)
    for count in (2, 1) if budget.prefetch else (1,):
        if count * (slot + gradients) <= free:
            return count, slot, gradients
    largest = max(units, key=lambda u: u.resident)
    enough = (slot + gradients + (0 if budget.unmeasured else budget.working)) / (1 - budget.unmeasured) + budget.glue
    raise DoesNotFitError(
        f"HydraStrategy(device_memory={human(budget.device)!r}): block {largest.name!r} takes {human(largest.resident)}"
        f" (parameters {human(largest.weights)}, gradients {human(largest.gradients)}, optimizer states"
        f" {human(largest.states)}), and beside what is always on the device ({human(budget.glue)}) and what computing"
        f" takes ({human(budget.working)}) there are {human(max(0, free))}. Give device_memory="
        f"{human(_ROUNDING * enough)!r} or more, or name smaller blocks with blocks=[...]."
    )


def _spill(units: Sequence[UnitCost], places: list[Place], budget: Budget) -> tuple[int, int]:
    """Fills host memory, and puts what it has no room for on the disk: evenly, so that no neighbours wait for it."""
    away = [index for index, place in enumerate(places) if place != "device"]
    sizes = {i: units[i].weights + units[i].states for i in away}
    if budget.spilled_gradients:
        sizes = {i: nbytes + units[i].weights for i, nbytes in sizes.items()}
    whole, host, seen = sum(sizes.values()), 0, 0
    for index in away:
        seen += sizes[index]
        fits = host + sizes[index] <= budget.host
        if fits and (whole <= budget.host or (host + sizes[index]) * whole <= budget.host * seen):
            host += sizes[index]
            places[index] = "host"
        else:
            places[index] = "disk"
    for index in (i for i in away if places[i] == "disk"):
        if host + sizes[index] <= budget.host:
            host += sizes[index]
            places[index] = "host"
    disk = whole - host
    if disk and not budget.disk:
        raise DoesNotFitError(
            f"HydraStrategy(host_memory={human(budget.host)!r}, disk=None): {human(host + disk)} are to wait in host"
            f" memory, where there is room for {human(budget.host)}. Give host_memory more, or a folder:"
            " HydraStrategy(disk='/path')."
        )
    return host, disk


def _pack(
    units: Sequence[UnitCost], places: Sequence[Place], slot_bytes: int, gradient_bytes: int
) -> Iterator[tuple[int, ...]]:
    """Neighbours that fit one slot together."""
    shard: list[int] = []
    for index, unit in enumerate(units):
        if places[index] == "device":
            continue
        together = [units[i] for i in shard] + [unit]
        fits = sum(u.weights + u.states for u in together) <= slot_bytes
        if shard and not (fits and sum(u.gradients for u in together) <= gradient_bytes):
            yield tuple(shard)
            shard = []
        shard.append(index)
    if shard:
        yield tuple(shard)
