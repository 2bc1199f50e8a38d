"""Graphs inside of a block: they begin at what it is given, and nothing flows back through those that are not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_embrace.hydra.errors import BlockError


@contextmanager
def without_saving(block: str) -> Iterator[None]:
    """Inside, a graph is made as ever, and what its backward would need is not kept.

    So whatever looks at gradients being enabled does as in plain training.

    Args:
        block: The block's name. Whoever goes back through the graph is told so.
    """

    def forget(tensor: Tensor) -> None:
        return None

    def asked(nothing: None) -> Tensor:
        raise leaked(block)

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(forget, asked):
        yield


def saving_is_hooked() -> bool:
    """Whether somebody else, such as activation checkpointing, decides what is kept for backward."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # not in every release
    return top is not None and top(True) is not None


def leaf_of(tensor: Tensor, reached: Callable[[], None]) -> Tensor:
    """The same tensor, as the beginning of a graph of its own.

    Args:
        tensor: The tensor.
        reached: Called when a gradient comes to it.
    """
    leaf = tensor.detach().requires_grad_(tensor.requires_grad)
    if leaf.requires_grad:
        leaf.register_hook(lambda gradient: reached())
    return leaf


def root_of(made: Sequence[Tensor]) -> Callable[[Sequence[Tensor | None]], None]:
    """The way back through a graph, which holds none of the tensors that it begins at.

    Args:
        made: What somebody is given of the graph's results.

    Returns:
        Goes back, once, and is given the gradients of these.
    """
    ends = [index for index, tensor in enumerate(made) if tensor.requires_grad]
    arrived: list[Tensor | None] = []
    if not ends:
        return lambda gradients: None
    with torch.enable_grad():
        root: Tensor = _Root.apply(arrived, *(made[index] for index in ends))  # type: ignore[no-untyped-call]

    def go_back(gradients: Sequence[Tensor | None]) -> None:
        arrived.extend(gradients[index] for index in ends)
        if any(gradient is not None for gradient in arrived):
            root.backward()
        arrived.clear()

    return go_back


class _Root(torch.autograd.Function):
    """One number that depends on several tensors, whose gradients somebody else has."""

    @staticmethod
    def forward(ctx: Any, arrived: list[Tensor | None], *made: Tensor) -> Tensor:
        ctx.arrived = arrived
        return made[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.arrived


def leaked(block: str) -> BlockError:
    """A block's tensor is used outside, and was not returned."""
    return BlockError(
        f"HydraStrategy: a loss depends on a tensor that block {block!r} has made and not returned: a hook inside of"
        " it, an attribute or a closure has handed it out, and no gradient can flow back through it. Return it from the"
        " block's forward, or use it detached. A forward hook of the block itself may hand out what it returns."
    )
