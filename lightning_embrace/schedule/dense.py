"""AllReduce of the dense parameters' gradients, block by block, started during backward in one fixed order."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

from lightning_embrace.comm.base import Communicator, Handle
from lightning_embrace.schedule.blocks import Member, plan_blocks


class _Block:
    """Parameters that travel together, in one flat buffer with a used-flag per parameter behind the gradients."""

    def __init__(self, name: str, parameters: list[nn.Parameter]) -> None:
        self.name = name
        self.parameters = parameters
        #: ids of the parameters whose gradient is still to come in this backward pass
        self.waiting: set[int] = set()
        self.handle: Handle | None = None
        count = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(count + len(parameters), dtype=parameters[0].dtype, device=parameters[0].device)
        pieces = self.flat[:count].split([p.numel() for p in parameters])
        self.views = [piece.view(p.shape) for piece, p in zip(pieces, parameters)]
        self.flags = self.flat[count:]

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

    @torch.no_grad()
    def unpack(self) -> None:
        """Puts the averaged gradients back; a parameter that no rank used keeps ``grad=None``."""
        used = [flag != 0 for flag in self.flags.tolist()]
        grads: list[Tensor] = []
        for p, flag in zip(self.parameters, used):
            if flag:
                p.grad = torch.empty_like(p) if p.grad is None else p.grad
                grads.append(p.grad)
        if grads:
            torch._foreach_copy_(grads, [v for v, flag in zip(self.views, used) if flag])


class DenseSync:
    """Averages the gradients of replicated dense parameters as DDP does, unused ones without any flag.

    The blocks are a pure function of which parameters require a gradient; ranks compare the plan's fingerprint before
    the first AllReduce of a backward pass.

    Args:
        comm: Carries the AllReduces.
        parameters: The dense parameters by name, in registration order.
    """

    def __init__(self, comm: Communicator, parameters: dict[str, nn.Parameter]) -> None:
        self._comm = comm
        self._parameters = parameters
        self._plans: dict[tuple[str, ...], list[_Block]] = {}
        self._blocks: list[_Block] = []
        self._block_of: dict[int, _Block] = {}
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._launched = 0
        self._open = False

    def fingerprint(self) -> int:
        """A number that is equal on ranks that will AllReduce the same blocks."""
        return zlib.crc32("\n".join(self._trained()).encode())

    def begin(self) -> None:
        """Call before a backward pass whose gradients are to be synchronised."""
        names = self._trained()
        if names not in self._plans:
            self._plans[names] = self._plan(names)
        self._blocks = self._plans[names]
        self._block_of = {id(p): b for b in self._blocks for p in b.parameters}
        for name in names:
            if name not in self._hooks:
                hook = self._parameters[name].register_post_accumulate_grad_hook(self._ready)
                self._hooks[name] = hook
        for block in self._blocks:
            block.waiting = {id(p) for p in block.parameters}
        self._launched = 0
        self._open = True

    def send_rest(self) -> None:
        """Call after the backward pass: sends the blocks that hold parameters it did not reach."""
        self._open = False
        while self._launched < len(self._blocks):
            self._launch(self._blocks[self._launched])

    def finish(self) -> None:
        """Waits for all blocks and puts the averages into ``grad``."""
        for block in self._blocks:
            assert block.handle is not None
            block.handle.wait()
            block.handle = None
            block.unpack()

    def remove_hooks(self) -> None:
        """Leaves the parameters as they were found."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _trained(self) -> tuple[str, ...]:
        return tuple(name for name, p in self._parameters.items() if p.requires_grad)

    def _plan(self, names: tuple[str, ...]) -> list[_Block]:
        parameters = [self._parameters[name] for name in names]
        members = [Member(n, p.numel() * p.element_size(), p.dtype) for n, p in zip(names, parameters)]
        return [_Block(f"block {k}", [parameters[i] for i in b]) for k, b in enumerate(plan_blocks(members))]

    def _ready(self, parameter: Tensor) -> None:
        if not self._open:
            return
        block = self._block_of[id(parameter)]
        if block.handle is not None:
            name = next(n for n, p in self._parameters.items() if p is parameter)
            raise RuntimeError(
                f"The gradient of {name!r} changed after it was sent: the backward pass reached the parameter more than"
                " once, as reentrant activation checkpointing does. Use `checkpoint(..., use_reentrant=False)`."
            )
        block.waiting.discard(id(parameter))
        # one fixed order on all ranks: a block waits for those before it
        while self._launched < len(self._blocks) and not self._blocks[self._launched].waiting:
            self._launch(self._blocks[self._launched])

    def _launch(self, block: _Block) -> None:
        block.pack(self._comm.world_size)
        block.handle = self._comm.all_reduce(block.flat, "dense", f"gradients of {block.name}")
        self._launched += 1
