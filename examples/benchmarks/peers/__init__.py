"""What a user would pick instead: one small adapter per peer.

An adapter module has ``train(job) -> dict``: it trains the job's model on the job's batches and returns
:meth:`~examples.benchmarks.meter.Meter.result` of its rank.
"""

from __future__ import annotations

from typing import NamedTuple


class Peer(NamedTuple):
    """A peer.

    Attributes:
        module: Its adapter in this package.
        environment: The virtual environment it runs in: ``"main"``, ``"horovod"`` or ``"torchrec"``.
        label: How tables call it.
        optimizers: What it can run with here.
        sparse: Whether the model's tables have ``sparse=True``.
        schedule: Of ``embrace``; empty for others.
    """

    module: str
    environment: str
    label: str
    optimizers: tuple[str, ...] = ("sgd", "adam", "adagrad")
    sparse: bool = False
    schedule: str = ""

    @property
    def adapter(self) -> str:
        """The full name of its adapter."""
        return f"{__name__}.{self.module}"


PEERS: dict[str, Peer] = {
    "embrace": Peer("lightning", "main", "embrace", schedule="2d"),
    "embrace-horizontal": Peer("lightning", "main", "embrace, horizontal alone", schedule="horizontal"),
    "embrace-vertical": Peer("lightning", "main", "embrace, vertical alone", schedule="vertical"),
    "embrace-fifo": Peer("lightning", "main", "embrace, fifo", schedule="fifo"),
    "embrace-sparse": Peer("lightning", "main", "embrace, sparse=True", ("sgd", "adagrad"), sparse=True, schedule="2d"),
    "embrace-horovod": Peer("lightning", "main", "embrace (horovod)", schedule="2d"),
    "ddp": Peer("lightning", "main", "ddp, dense gradients"),
    "ddp-sparse": Peer("lightning", "main", "ddp, sparse=True", ("sgd", "adagrad"), sparse=True),
    "horovod-allreduce": Peer("horovod", "horovod", "Horovod AllReduce (sparse_as_dense)"),
    "horovod-allgather": Peer("horovod", "horovod", "Horovod AllGather", ("sgd", "adagrad"), sparse=True),
    "torchrec-column": Peer("torchrec", "torchrec", "TorchRec, column-wise", ("sgd",)),
    "torchrec-row": Peer("torchrec", "torchrec", "TorchRec, row-wise", ("sgd",)),
    "none": Peer("lightning", "main", "no communication (bound)"),
}
