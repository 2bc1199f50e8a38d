"""Emulated compute: a block takes its time without using the CPU, as if every rank had an accelerator.

A block of a model (see ``blocks()``) takes tensors (B, T, width) and returns one. In mode ``"emulated"``

- its forward sleeps and returns a cheap function of the inputs in the right shape,
- its backward sleeps and gives every parameter of the block a gradient of its shape, block by block as in the real
  model, so that whoever exchanges dense gradients has the same bytes at the same times,
- look-ups, the loss, the optimizer and everything else outside the blocks stay real.

The results are deterministic, and the loss still depends on every table: peers can be held against each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

Mode = Literal["real", "emulated"]


class Blocked(Protocol):
    """A model that tells what computes in it."""

    def blocks(self) -> list[tuple[str, nn.Module]]:
        """The parts that compute, by name, in the order of the forward pass."""
        ...


@dataclass(frozen=True)
class BlockTime:
    """How long a block takes, in seconds."""

    forward: float
    backward: float


def spread(model: Blocked, seconds: float) -> dict[str, BlockTime]:
    """Divides a step's compute among the blocks by their parameters, a third to forward and two thirds to backward.

    Arithmetic goes with parameters times words, and all blocks see about as many words.

    Args:
        model: Has the blocks.
        seconds: Forward and backward of a whole step.

    Returns:
        By block.
    """
    sizes = {name: sum(p.numel() for p in block.parameters()) for name, block in model.blocks()}
    unit = seconds / sum(sizes.values())
    return {name: BlockTime(size * unit / 3, size * unit * 2 / 3) for name, size in sizes.items()}


def set_compute(model: Blocked, mode: Mode, times: Mapping[str, BlockTime] | None = None) -> None:
    """Lets a model's blocks compute really, or take a given time.

    Args:
        model: Has the blocks; call this before a strategy wraps it.
        mode: ``"real"`` leaves it alone.
        times: By block, for ``"emulated"``: :func:`spread` makes them of one number.

    Raises:
        ValueError: The mode is unknown, or ``times`` does not name the model's blocks.
    """
    if mode not in ("real", "emulated"):
        raise ValueError(f"`mode` must be 'real' or 'emulated', got {mode!r}.")
    if mode == "real":
        return
    blocks, times = dict(model.blocks()), times or {}
    if blocks.keys() != times.keys():
        raise ValueError(f"`times` must name the blocks {', '.join(blocks)}; it names {', '.join(times) or 'none'}.")
    for name, block in blocks.items():
        block.forward = _Emulated(block, times[name])


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


class _Emulated:
    """Stands in for a block's ``forward``."""

    def __init__(self, block: nn.Module, times: BlockTime) -> None:
        self._block = block
        self._real: Callable[..., Tensor] = block.forward
        self._times = times
        self._widths: dict[tuple[torch.Size, ...], int] = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        if inputs[0].is_meta:
            return self._real(*inputs)
        parameters = [p for p in self._block.parameters() if p.requires_grad]
        result: Tensor = Timed.apply(self._times, self._cheap(inputs), *parameters)  # type: ignore[no-untyped-call]
        return result

    def _cheap(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The first input, and the mean of each other one over its positions, in the width of the real result."""
        width = self._width(inputs)
        first, *others = inputs
        result = _fit(first, width)
        for other in others:
            result = result + _fit(other.mean(dim=-2, keepdim=True), width)
        return result

    def _width(self, inputs: tuple[Tensor, ...]) -> int:
        """Found once for each shape, by running the real block without data."""
        shapes = tuple(i.shape for i in inputs)
        if shapes not in self._widths:
            state = {k: v.detach().to("meta") for k, v in self._block.state_dict(keep_vars=True).items()}
            with torch.no_grad():
                shape = functional_call(self._block, state, tuple(i.detach().to("meta") for i in inputs)).shape
            if shape[:-1] != inputs[0].shape[:-1]:
                raise ValueError(
                    f"A block must keep all dimensions of its first input but the last: {shapes[0]}, {shape}."
                )
            self._widths[shapes] = shape[-1]
        return self._widths[shapes]


def _fit(x: Tensor, width: int) -> Tensor:
    """Brings the last dimension to ``width``: repeats it, or folds it into a mean, so that nothing is cut off."""
    have = x.size(-1)
    if have > width:
        folded: Tensor = F.pad(x, (0, -have % width)).unflatten(-1, (-1, width)).mean(-2)
        return folded
    if have < width:
        x = x.unsqueeze(-2).expand(*x.shape[:-1], -(-width // have), have).flatten(-2)
    return x[..., :width]


class Timed(torch.autograd.Function):
    """Passes a tensor through, takes its time both ways, and gives the parameters their gradients."""

    @staticmethod
    def forward(ctx: Any, times: BlockTime, result: Tensor, *parameters: Tensor) -> Tensor:
        """Sleeps."""
        _sleep(times.forward)
        ctx.times = times
        ctx.likes = [(p.shape, p.dtype, p.device) for p in parameters]
        return result.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Sleeps; every element of a parameter gets the mean size of what arrived.

        Sizes, because the plain mean of a softmax's gradient is rounding, which an Adam would make much of.
        """
        (gradient,) = gradients
        _sleep(ctx.times.backward)
        value = float(torch.linalg.vector_norm(gradient, ord=1)) / max(1, gradient.numel())
        made = (torch.full(shape, value, dtype=dtype, device=device) for shape, dtype, device in ctx.likes)
        return None, gradient, *made
