"""Lightning's DDP with every byte of its gradient exchange counted."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override


class DDPTraffic:
    """Bytes that this rank puts on the wire.

    An AllReduce of B bytes among N ranks counts 2·(N-1)/N·B, what a ring sends. An AllReduce of a sparse gradient is,
    on gloo, an AllGather of its coalesced ids and rows, and counts (N-1) times their bytes.

    Attributes:
        sent: Bytes by kind, ``"dense"`` or ``"sparse"``.
        steps: Optimizer steps.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.steps = 0

    def total_sent(self) -> int:
        """Bytes of all kinds."""
        return sum(self.sent.values())


# torch reads these annotations and refuses others.
def counting_hook(traffic: DDPTraffic, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
    """DDP communication hook: average a bucket's gradients as DDP does by itself, and count them.

    Args:
        traffic: Where to count.
        bucket: The gradients that are ready.

    Returns:
        The averaged gradients, once they are there.
    """
    ranks = dist.get_world_size()
    gradient = bucket.buffer()
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        traffic.sent["sparse"] += (ranks - 1) * (gradient.indices().nbytes + gradient.values().nbytes)
    else:
        traffic.sent["dense"] += 2 * (ranks - 1) * gradient.nbytes // ranks
    work = dist.all_reduce(gradient.div_(ranks), async_op=True)
    assert work is not None
    averaged: Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
    return averaged


class CountingDDPStrategy(DDPStrategy):
    """``ddp`` whose ``traffic`` says what its gradients cost.

    Lightning hands communication hooks to DDP on CUDA only, though torch takes them on any device: hence a subclass.
    Buffers that DDP broadcasts in forward are not counted; the models it is used for here have none.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.traffic = DDPTraffic()

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(self.traffic, counting_hook)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self.traffic.steps += 1
        return output
