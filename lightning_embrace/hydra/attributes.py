"""Blocks that talk through attributes, which a second run in backward would not repeat, or repeat too often."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

_PLAIN = (bool, int, float, str)


def plain_attributes(block: nn.Module) -> dict[str, Any]:
    """By path, what modules of a block keep in attributes and is neither tensor nor container."""
    return {path: value for path, value in _attributes(block) if isinstance(value, _PLAIN)}


def kept_with_graph(block: nn.Module) -> str | None:
    """Finds a tensor that a run with a graph has left in an attribute.

    Args:
        block: A block that has just run with a graph.

    Returns:
        Its path, or None. What ``spectral_norm`` and ``weight_norm`` set for their own module is none of it.
    """
    for name, part in block.named_modules():
        own = {getattr(hook, "name", None) for hook in part._forward_pre_hooks.values()}
        for attribute, value in vars(part).items():
            if attribute not in own and any(
                isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in pytree.tree_leaves(value)
            ):
                return f"{name}.{attribute}" if name else attribute
    return None


def _attributes(block: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in block.named_modules():
        for attribute, value in vars(part).items():
            yield f"{name}.{attribute}" if name else attribute, value
