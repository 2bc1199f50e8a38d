"""Which buffers travel, without processes. That they end up equal is checked against ddp in tests/exactness."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from lightning_embrace.comm.base import Done, Handle
from lightning_embrace.comm.fake import TwinCommunicator
from lightning_embrace.schedule.buffers import BufferSync, broadcast_tensors

MANY = 130  # more than two header words hold


class Others(TwinCommunicator):
    """Rank 1, with a rank 0 whose tensors are all zero and whose changed buffers can be told."""

    def __init__(self) -> None:
        super().__init__(2, rank=1)
        self.words: Sequence[int] = (0, 0, 0)

    def gather(self, header_H: Tensor, what: str) -> Handle:
        mine = super().gather(header_H, what).wait()[0]
        other = mine.clone()  # op and purpose are the same
        other[2:5] = torch.tensor(self.words)
        return Done(torch.stack([other, mine]))

    def broadcast(self, flat: Tensor, kind: str, what: str):  # type: ignore[no-untyped-def]
        return super().broadcast(flat.zero_(), kind, what)


def model(count: int = 3) -> nn.Module:
    module = nn.Module()
    for k in range(count):
        module.register_buffer(f"b{k}", torch.full((2,), float(k + 1)))
    return module


def test_what_nobody_changed_does_not_travel() -> None:
    """Causal masks and position ids are large; ddp sends them in every step."""
    comm, module = Others(), model()
    sync = BufferSync(comm, module)
    for _ in range(3):
        sync.sync()
    assert comm.issued("broadcast") == []
    assert module.b0.tolist() == [1.0, 1.0]


def add(module: nn.Module) -> None:
    module.b1.add_(1)


def add_behind_autograd(module: nn.Module) -> None:
    module.b1.data.add_(1)


def replace(module: nn.Module) -> None:
    module.b1 = module.b1 + 1


def replace_twice(module: nn.Module) -> None:
    module.b1 = module.b1 * 2
    module.b1 = module.b1 + 0


@pytest.mark.parametrize("change", [add, add_behind_autograd, replace, replace_twice])
def test_every_way_to_change_a_buffer_is_seen(change) -> None:  # type: ignore[no-untyped-def]
    """Codebooks are often updated through `.data`, which leaves no trace in version counters: these were not sent."""
    comm, module = Others(), model()
    sync = BufferSync(comm, module)
    change(module)
    sync.sync()
    assert [m.tolist() for m in (module.b0, module.b1, module.b2)] == [[1.0, 1.0], [0.0, 0.0], [3.0, 3.0]]
    sync.sync()
    assert len(comm.issued("broadcast")) == 1, "it travels once"


@pytest.mark.parametrize("number", [0, 61, 62, 123, 124, MANY - 1])
def test_what_another_rank_changed_travels_too(number: int) -> None:
    """A rank that changed nothing takes part in the broadcast all the same, of the same buffer."""
    comm, module = Others(), model(MANY)
    sync = BufferSync(comm, module)
    comm.words = [1 << number - 62 * field if field == number // 62 else 0 for field in range(3)]
    sync.sync()
    assert [k for k in range(MANY) if getattr(module, f"b{k}").tolist() == [0.0, 0.0]] == [number]


def test_nan_counts_as_changed() -> None:
    """NaN differs from itself: one broadcast too many, never one too few."""
    comm, module = TwinCommunicator(), model(1)
    module.b0.fill_(float("nan"))
    BufferSync(comm, module).sync()
    assert sum(e.elements for e in comm.events if e.operation == "broadcast") == 8


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_message_without_buffers_or_partner(world_size: int) -> None:
    comm = TwinCommunicator(world_size)
    module = model(0 if world_size > 1 else 2)
    sync = BufferSync(comm, module)
    if world_size == 1:
        module.b0.add_(1)
    sync.sync()
    assert comm.events == []


DTYPES = (torch.float32, torch.bool, torch.int16, torch.complex64, torch.bfloat16, torch.uint8, torch.float64)


def test_any_dtype_and_shape_travels() -> None:
    """Backends carry fewer dtypes than models have: everything travels as bytes, one message per dtype."""
    comm = Others()
    tensors = [torch.ones(shape, dtype=dtype) for dtype in DTYPES for shape in ((2, 3), (), (0,), (3,))]
    tensors.append(torch.ones(3, 2).t())
    broadcast_tensors(comm, tensors, "setup")
    assert all(not t.any() for t in tensors)
    assert len(comm.issued("broadcast")) == len(DTYPES)
    assert comm.traffic.received["setup"] == sum(t.numel() * t.element_size() for t in tensors)
