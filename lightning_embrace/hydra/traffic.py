"""What a step moves between the device and the store, if blocks are called once each, in order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from lightning_embrace.hydra.plan import Plan, UnitCost


def traffic(units: Sequence[UnitCost], plan: Plan, second_pass: bool) -> tuple[int, int]:
    """Follows shards through the slots for a step, in its steady state.

    Args:
        units: In forward order.
        plan: Where they are.
        second_pass: Shards are stepped when all gradients are there, and these wait in the store.

    Returns:
        Bytes that a step reads from the store and writes to it. With a second pass each gradient is taken to be written
        and read once; clipping and unscaling read and write them again.
    """
    weights = [sum(units[i].weights for i in shard) for shard in plan.shards]
    states = [sum(units[i].states for i in shard) for shard in plan.shards]
    trained = [any(units[i].gradients for i in shard) for shard in plan.shards]
    forward = [(shard, False) for shard in range(len(weights))]
    back = [(shard, not second_pass) for shard, _ in reversed(forward)]
    again = [(shard, True) for shard, _ in reversed(forward)] if second_pass else []
    slots: OrderedDict[int, bool] = (
        OrderedDict()
    )  # the shard that was used last comes last; whether its states are there
    for _ in range(2):  # the second time the slots hold what a step leaves behind
        read = 0
        for shard, stepping in [*forward, *back, *again]:
            if shard not in slots:
                read += weights[shard]
                if len(slots) == plan.slots:
                    slots.popitem(last=False)
                slots[shard] = False
            if stepping and trained[shard] and not slots[shard]:
                read += states[shard]
                slots[shard] = True
            slots.move_to_end(shard)
    written = sum(w + s for w, s, t in zip(weights, states, trained) if t)
    gradients = sum(w for w, t in zip(weights, trained) if t) if second_pass else 0
    return read + gradients, written + gradients
