"""The least time that a step can take, whatever is sent when. Pure functions.

A step computes block by block, forward and then backward, and puts bytes on a link that carries both directions at the
same time. What any schedule has to respect, if it is to leave the numbers as they are:

- a block's dense gradient is there when its backward is over, and its average is needed before its next forward;
- prior gradient rows are there when backward is over; only after they have arrived and have been applied can the *rest*
  rows of the next step be read, which its forward pass begins with;
- delayed gradient rows, early rows and ids have a whole step's time, and need only room on the link.

From that, with all bytes as time on the link: between the end of block k's backward and the start of its next forward
travel the dense gradients of blocks 1 to k, the prior gradients and the rest rows. In this window the blocks before k
compute backward and forward; what does not fit beside them is time without compute, for k = 1 all of it. And no step is
shorter than all its bytes. Hence ::

    stall = max over k of (prior + rest + dense[1..k] - backward[1..k-1] - forward[1..k-1]), at least 0
    step  = max(all bytes, compute + stall)

Without dense gradients, with p the share of prior gradients and rest rows in the time T of all bytes, that is
p·T + max(C, (1 − p)·T).

Assumed in favour of the schedule, so that the result is a bound and no forecast: no latency, no cost of starting an
exchange, no arithmetic but the blocks' (optimizer, packing), any exchange can be interrupted for a more urgent one, and
the ranks run in step. AllReduces carry what a ring has, 2·(N−1)/N of the gradient each way; AlltoAlls what a rank sends
or receives, the larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class StepWork:
    """What one step asks of the busiest rank.

    Attributes:
        forward: Seconds of each block, in the order of the forward pass.
        backward: The same of backward, in the same order.
        dense: Bytes of each block's AllReduce in one direction, in the same order.
        prior: Bytes of gradient rows that must arrive before the next forward.
        rest: Bytes of rows that only the prior gradients make right.
        free: Bytes of everything else: delayed gradients, early rows, ids, headers.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    dense: Sequence[float]
    prior: float = 0.0
    rest: float = 0.0
    free: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.forward) == len(self.backward) == len(self.dense):
            counts = f"{len(self.forward)}, {len(self.backward)} and {len(self.dense)}"
            raise ValueError(f"`forward`, `backward` and `dense` need one value per block; they have {counts}.")

    @property
    def compute(self) -> float:
        """Seconds of all blocks, both ways."""
        return sum(self.forward) + sum(self.backward)

    @property
    def bytes(self) -> float:
        """All bytes in one direction."""
        return sum(self.dense) + self.prior + self.rest + self.free


def stall(work: StepWork, bytes_per_second: float) -> float:
    """Seconds of a step in which nothing can compute, see the module."""
    if bytes_per_second <= 0:
        return 0.0
    urgent = (work.prior + work.rest) / bytes_per_second
    computed = accumulate((f + b for f, b in zip(work.forward, work.backward)), initial=0.0)
    sent = accumulate(size / bytes_per_second for size in work.dense)
    return max([0.0, urgent, *(urgent + bytes_k - before for bytes_k, before in zip(sent, computed))])


def critical_path(work: StepWork, bytes_per_second: float) -> float:
    """The least seconds that a step can take.

    Args:
        work: What is to be done.
        bytes_per_second: Of the link, in each direction; 0: it is not shaped, and only compute counts.

    Returns:
        Seconds, see the module.
    """
    transfer = work.bytes / bytes_per_second if bytes_per_second > 0 else 0.0
    return max(transfer, work.compute + stall(work, bytes_per_second))
