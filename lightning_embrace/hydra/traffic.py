"""What a step moves between the device and the store, if blocks are called once each, in order."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from lightning_embrace.hydra.plan import Plan, UnitCost


def traffic(units: Sequence[UnitCost], plan: Plan, second_pass: bool) -> Counter[str]:
    """Follows shards through the slots for a step, in its steady state.

    Args:
        units: In forward order.
        plan: Where they are.
        second_pass: Shards are stepped when all gradients are there, and these wait in the store.

    Returns:
        Bytes by ``"host read"``, ``"host written"``, ``"disk read"``, ``"disk written"``, as the store counts them.
        With a second pass each gradient is taken to be written and read once; clipping and unscaling read and write
        them again.
    """
    moved: Counter[str] = Counter()

    def count(shard: int, kind: str, *parts: str) -> None:
        for unit in plan.shards[shard]:
            moved[f"{plan.places[unit]} {kind}"] += sum(getattr(units[unit], part) for part in parts)

    trained = [any(units[i].gradients for i in shard) for shard in plan.shards]
    forward = [(shard, False) for shard in range(len(plan.shards))]
    back = [(shard, not second_pass) for shard, _ in reversed(forward)]
    again = [(shard, True) for shard, _ in reversed(forward)] if second_pass else []
    # the shard that was used last comes last; whether its states are there
    slots: OrderedDict[int, bool] = OrderedDict()
    for _ in range(2):  # the second time the slots hold what a step leaves behind
        moved.clear()
        for shard, stepping in [*forward, *back, *again]:
            if shard not in slots:
                count(shard, "read", "weights")
                if len(slots) == plan.slots:
                    slots.popitem(last=False)
                slots[shard] = False
            if stepping and trained[shard] and not slots[shard]:
                count(shard, "read", "states")
                slots[shard] = True
            slots.move_to_end(shard)
    for shard in (s for s, has_gradients in enumerate(trained) if has_gradients):
        count(shard, "written", "weights", "states")
        if second_pass:
            count(shard, "read", "weights")
            count(shard, "written", "weights")
    return moved


def total(moved: Counter[str], kind: str) -> int:
    """Bytes that are ``"read"`` or ``"written"``, on whatever tier."""
    return moved[f"host {kind}"] + moved[f"disk {kind}"]
