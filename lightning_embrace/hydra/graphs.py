"""Graphs inside of a block: they begin at what it is given, and nothing flows back through those that are not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


def leaked(block: str) -> BlockError:
    """A block's tensor is used outside, and was not returned."""
    return BlockError(
        f"HydraStrategy: a loss depends on a tensor that block {block!r} has made and not returned: a hook inside of"
        " it, an attribute or a closure has handed it out, and no gradient can flow back through it. Return it from the"
        " block's forward, or use it detached. A forward hook of the block itself may hand out what it returns."
    )
