"""Calls of blocks as nodes of autograd's graph."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lightning_embrace.hydra.arguments import Packed, UnknownObject, pack
from lightning_embrace.hydra.attributes import Attributes
from lightning_embrace.hydra.buffers import Buffers
from lightning_embrace.hydra.call import Call
from lightning_embrace.hydra.errors import BlockError
from lightning_embrace.hydra.results import own_memory


class Keeper(Protocol):
    """What sees to it that a block's parameters are on the device."""

    def forward_of(self, block: Block) -> AbstractContextManager[None]:
        """Around a run without a tape, or the first of two."""

    def backward_of(self, call: Call, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Around the backward of a call, with its second run if there is one, and what it was given."""

    def moves(self, tensor: Tensor) -> bool:
        """Whether it is a parameter that is not always on the device."""

    def room(self, block: Block) -> int | None:
        """Bytes that the next call of it may keep until its backward; None: it is to be computed again."""

    def kept(self, call: Call) -> None:
        """They stay."""

    def released(self, call: Call) -> None:
        """They are gone."""

    def taped(self, block: Block, tensors: Sequence[Tensor]) -> None:
        """A call is on the tape, with what it was given: its backward will come."""


class Block:
    """Takes a module's calls over.

    Args:
        name: The module's.
        module: The module.
        own: One of its parameters that nobody outside of blocks has.
        keeper: Brings its parameters.
        device: Where it runs.
    """

    def __init__(self, name: str, module: nn.Module, own: nn.Parameter, keeper: Keeper, device: torch.device) -> None:
        self.name = name
        self.module = module
        self.own = own
        self.keeper = keeper
        self.device = device
        #: its parameters stay on the device, and so do its activations: it runs as it always has
        self.kept = False
        self.run: Any = module._compiled_call_impl or module._call_impl
        self.parameters = tuple(module.parameters())
        self.buffers = Buffers(module)
        self.attributes = Attributes(module, self._refuse_attribute)
        #: second runs whose backward is under way
        self.going_back = 0
        #: whether a second run was compared with a first one
        self.checked = False
        self.generators = [v for m in module.modules() for v in vars(m).values() if isinstance(v, torch.Generator)]
        # torch makes no node for a call none of whose inputs needs a gradient
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's call."""
        if self.kept:
            return self.run(*args, **kwargs)
        if torch.is_grad_enabled():
            packed = self.pack((args, kwargs), "is given")
            if any(self.keeper.moves(t) for t in packed.tensors):
                raise BlockError(
                    f"HydraStrategy: block {self.name!r} is given a parameter of a block, which is not always there."
                    " Give it what that block makes of it, or give the module itself to this block."
                )
            if any(t.requires_grad for t in (*packed.tensors, *self.parameters)):
                call = Call(self, packed)
                made = _Recomputed.apply(call, self.anchor, *packed.tensors)  # type: ignore[no-untyped-call]
                return self._hooked(args, kwargs, call.result(made))
        with self.keeper.forward_of(self), self._same_parameters():
            result = own_memory(self.run(*args, **kwargs), self.parameters)
        if torch.is_grad_enabled() and any(_needs_gradient(leaf) for leaf in pytree.tree_leaves(result)):
            self._refuse_attribute("of its modules")
        return result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One of two runs; forward hooks of the module itself are not called in either."""
        module = vars(self.module)
        hooks, module["_forward_hooks"] = module["_forward_hooks"], OrderedDict()
        try:
            with self._same_parameters():
                return self.run(*args, **kwargs)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise self.changes_input("what it is given") from error
        finally:
            module["_forward_hooks"] = hooks

    def pack(self, tree: Any, how: str) -> Packed:
        """Takes arguments or results apart, or says why that cannot be."""
        try:
            return pack(tree)
        except UnknownObject as error:
            raise BlockError(
                f"HydraStrategy: block {self.name!r} {how} a {type(error.found).__qualname__} ({error.path}), which may"
                " change between its forward and the second run in backward. Pass tensors and plain data in containers"
                " or dataclasses (transformers: use_cache=False), or choose other blocks with"
                " HydraStrategy(blocks=[...])."
            ) from None

    def changes_input(self, what: str) -> BlockError:
        """It cannot run again on what it has changed."""
        return BlockError(
            f"HydraStrategy: block {self.name!r} changes {what} in place, and its second run in backward would begin"
            " with what was changed. Write `x = x + y` for `x += y`, and nn.ReLU() for nn.ReLU(inplace=True)."
        )

    def _hooked(self, args: Any, kwargs: Any, result: Any) -> Any:
        """Forward hooks of the module itself, outside of the two runs: what they hand out is on the tape."""
        module = self.module
        for key, hook in list(module._forward_hooks.items()):
            if key in module._forward_hooks_with_kwargs:
                changed = hook(module, args, kwargs, result)
            else:
                changed = hook(module, args, result)
            result = result if changed is None else changed
        return result

    @contextmanager
    def _same_parameters(self) -> Iterator[None]:
        """What is written to parameters in a forward would be lost when they leave."""
        before = [p._version for p in self.parameters]
        yield
        if before != [p._version for p in self.parameters]:
            raise BlockError(
                f"HydraStrategy: block {self.name!r} changes a parameter in its forward. Parameters come from the store"
                " for each run, and only an optimizer's step is written back. Make it a buffer (register_buffer)."
            )

    def _refuse_attribute(self, path: str) -> None:
        raise BlockError(
            f"HydraStrategy: gradients flow through attribute `{path}` of block {self.name!r}, which would reach what"
            " is outside of the block past it. Give the tensor to the block as an argument, or detach it."
        )


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _Recomputed(torch.autograd.Function):
    """A call as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        made = call.first_run()
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(t for t, flows in zip(made, call.differentiable) if not flows))
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        name = ctx.call.block.name
        if not torch.autograd._is_checkpoint_valid():
            raise BlockError(
                f"HydraStrategy: torch.autograd.grad, or backward(inputs=...), reaches block {name!r}, whose"
                " parameters would be given gradients as well. Call backward() on a loss."
            )
        try:
            tensors = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise BlockError(
                f"HydraStrategy: a tensor that block {name!r} was given has been changed in place before the block's"
                " backward. Write `x = x + y` for `x += y` where the model goes on with the block's input."
            ) from error
        return None, None, *ctx.call.second_run(tensors, gradients)
