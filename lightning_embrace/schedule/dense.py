"""AllReduce of the dense parameters' gradients, block by block, started during backward in one order on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_embrace.comm.base import Communicator, Handle
from lightning_embrace.comm.queue import Slot
from lightning_embrace.schedule.blocks import CHUNK_BYTES, Member, issue_order, plan_blocks


class Queue(Protocol):
    """Where exchanges wait for their turn, see :class:`~lightning_embrace.comm.queue.LowPriorityQueue`."""

    def append(self, slots: Iterable[Slot]) -> None:
        """Adds slots at the end."""
        ...

    def ready(self, slot: Slot) -> None:
        """The data of a slot are there."""
        ...

    def restart(self) -> None:
        """Counts anew."""
        ...

    def progress(self) -> int:
        """Bytes of slots that have gone on the wire since then, or could have gone in another order."""
        ...


class Block:
    """Parameters that travel together, in one flat buffer with a used-flag per parameter behind the gradients."""

    #: a late block's gradient is the only one that its optimizer's step sees
    counted = False

    def __init__(self, name: str, parameters: list[nn.Parameter]) -> None:
        self.name = name
        self.parameters = parameters
        #: ids of the parameters whose gradient is still to come in this backward pass
        self.waiting: set[int] = set()
        self.packed = False
        #: what had gone on the wire when it was packed, see :meth:`Queue.progress`
        self.arrived = 0
        self.slots: list[Slot] = []
        count = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(count + len(parameters), dtype=parameters[0].dtype, device=parameters[0].device)
        pieces = self.flat[:count].split([p.numel() for p in parameters])
        self.views = [piece.view(p.shape) for piece, p in zip(pieces, parameters)]
        self.flags = self.flat[count:]

    def open(self, comm: Communicator, chunk_bytes: int) -> None:
        """Makes the slots of one backward pass."""
        chunks = self.flat.split(max(1, chunk_bytes // self.flat.element_size()))
        sends = [self._send(comm, chunk, k, len(chunks)) for k, chunk in enumerate(chunks)]
        self.slots = [Slot(s, s.what, c.numel() * c.element_size()) for s, c in zip(sends, chunks)]
        self.waiting = {id(p) for p in self.parameters}
        self.packed = False

    def _send(self, comm: Communicator, chunk: Tensor, number: int, count: int) -> _Send:
        part = "" if count == 1 else f", part {number + 1} of {count}"
        return _Send(comm, chunk, f"gradients of {self.name}{part}")

    @torch.no_grad()
    def pack(self, world_size: int) -> None:
        """Copies this rank's share of the average into the buffer; an unused parameter adds zeros and no flag."""
        used = [p.grad is not None for p in self.parameters]
        for p in self.parameters:
            if p.grad is not None and p.grad.is_sparse:  # a tied table that only look-ups reached in this step
                p.grad = p.grad.to_dense()
        for view, p in zip(self.views, self.parameters):
            if p.grad is None:
                view.zero_()
        targets = [v for v, u in zip(self.views, used) if u]
        if targets:
            torch._foreach_copy_(targets, [p.grad for p in self.parameters if p.grad is not None])
            torch._foreach_div_(targets, world_size)  # before the sum, as DDP does: fp16 must not overflow
        self.flags.copy_(torch.tensor(used, dtype=self.flags.dtype))
        self.packed = True

    def is_done(self) -> bool:
        """Whether the averages are there."""
        return all(slot.is_done() for slot in self.slots)

    def gradients(self) -> list[Tensor | None]:
        """Waits for the averages; None for a parameter that no rank used. Views: copy what is to stay."""
        for slot in self.slots:
            slot.wait()
        return [view if flag != 0 else None for view, flag in zip(self.views, self.flags.tolist())]

    @torch.no_grad()
    def unpack(self) -> None:
        """Puts the averaged gradients back; a parameter that no rank used keeps ``grad=None``."""
        averages = self.gradients()
        for p, average in zip(self.parameters, averages):
            if average is not None and p.grad is None:
                p.grad = torch.empty_like(p)
        grads = [p.grad for p, average in zip(self.parameters, averages) if average is not None and p.grad is not None]
        if grads:
            torch._foreach_copy_(grads, [average for average in averages if average is not None])


class _Send:
    """Starts one chunk's AllReduce."""

    def __init__(self, comm: Communicator, chunk: Tensor, what: str) -> None:
        self._comm, self._chunk, self.what = comm, chunk, what

    def __call__(self) -> Handle:
        return self._comm.all_reduce(self._chunk, "dense", self.what, low_priority=True)


class DenseSync:
    """Averages the gradients of replicated dense parameters as DDP does, unused ones without any flag.

    The blocks are a pure function of which parameters require a gradient; ranks compare the plan's fingerprint before
    the first AllReduce of a backward pass.

    Args:
        comm: Carries the AllReduces.
        queue: Where they wait for their turn.
        parameters: The dense parameters by name, in registration order.
        in_backward: Called in backward whenever a parameter has its gradient, before its block may leave.
    """

    def __init__(
        self,
        comm: Communicator,
        queue: Queue,
        parameters: dict[str, nn.Parameter],
        in_backward: Callable[[], None] = lambda: None,
    ) -> None:
        self._comm = comm
        self._queue = queue
        self._parameters = parameters
        self._in_backward = in_backward
        self._plans: dict[tuple[str, ...], list[Block]] = {}
        self.blocks: list[Block] = []
        self._block_of: dict[int, Block] = {}
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._open = False

    def fingerprint(self) -> int:
        """A number that is equal on ranks that will AllReduce the same blocks."""
        return zlib.crc32("\n".join(self._trained()).encode())

    def begin(self, arrivals: Sequence[int] | None = None, chunk_bytes: int = CHUNK_BYTES[1]) -> None:
        """Call before a backward pass whose gradients are to be synchronised.

        Args:
            arrivals: What :meth:`arrivals` was in the step before, the largest of all ranks.
            chunk_bytes: What travels at once; the same on every rank.
        """
        names = self._trained()
        if names not in self._plans:
            self._plans[names] = self._plan(names)
        self.blocks = self._plans[names]
        self._block_of = {id(p): b for b in self.blocks for p in b.parameters}
        for name in names:
            if name not in self._hooks:
                hook = self._parameters[name].register_post_accumulate_grad_hook(self._ready)
                self._hooks[name] = hook
        for block in self.blocks:
            block.open(self._comm, chunk_bytes)
        if arrivals is not None and len(arrivals) != len(self.blocks):
            arrivals = None  # others are trained than in the step before
        self._queue.restart()
        if self.blocks:
            chunks = [[slot.nbytes for slot in block.slots] for block in self.blocks]
            self._queue.append([self.blocks[b].slots[c] for b, c in issue_order(chunks, arrivals)])
        self._open = True

    def arrivals(self) -> list[int]:
        """By block, what had gone on the wire when its gradient was there; call after :meth:`send_rest`."""
        return [block.arrived for block in self.blocks]

    def remaining(self) -> int:
        """Bytes of gradients that this backward pass has not brought yet."""
        return sum(block.flat.nbytes for block in self.blocks if not block.packed) if self._open else 0

    def send_rest(self) -> None:
        """Call after the backward pass: sends the blocks that hold parameters it did not reach."""
        self._open = False
        for block in self.blocks:
            if not block.packed:
                self._launch(block)

    def finish(self) -> None:
        """Waits for all blocks and puts the averages into ``grad``."""
        for block in self.blocks:
            block.unpack()

    def remove_hooks(self) -> None:
        """Leaves the parameters as they were found."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _trained(self) -> tuple[str, ...]:
        return tuple(name for name, p in self._parameters.items() if p.requires_grad)

    def _plan(self, names: tuple[str, ...]) -> list[Block]:
        parameters = [self._parameters[name] for name in names]
        members = [Member(n, p.numel() * p.element_size(), p.dtype) for n, p in zip(names, parameters)]
        return [Block(f"block {k}", [parameters[i] for i in b]) for k, b in enumerate(plan_blocks(members))]

    def _ready(self, parameter: Tensor) -> None:
        if not self._open:
            return
        self._in_backward()
        block = self._block_of[id(parameter)]
        if block.packed:
            name = next(n for n, p in self._parameters.items() if p is parameter)
            raise RuntimeError(
                f"The gradient of {name!r} changed after it was sent: the backward pass reached the parameter more than"
                " once, as reentrant activation checkpointing does. Use `checkpoint(..., use_reentrant=False)`."
            )
        block.waiting.discard(id(parameter))
        if not block.waiting:
            self._launch(block)

    def _launch(self, block: Block) -> None:
        block.pack(self._comm.world_size)
        block.arrived = self._queue.progress()
        for slot in block.slots:
            self._queue.ready(slot)
