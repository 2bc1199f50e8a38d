"""Calls of blocks whose activations are computed again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_embrace.hydra.arguments import Packed, UnknownObject, pack
from lightning_embrace.hydra.attributes import kept_with_graph, plain_attributes
from lightning_embrace.hydra.autocast import Autocast, without_cache
from lightning_embrace.hydra.buffers import Buffers
from lightning_embrace.hydra.randomness import Randomness


class BlockError(ValueError):
    """A block does what cannot be repeated in backward."""


class Keeper(Protocol):
    """What sees to it that a block's parameters are on the device."""

    def forward_of(self, block: Block) -> AbstractContextManager[None]:
        """Around a run without a tape, or the first of two."""

    def backward_of(self, block: Block) -> AbstractContextManager[None]:
        """Around the second run and its backward."""

    def may_hold(self, call: Call) -> bool:
        """Whether a call's activations may stay until its backward: it is likely to be the next one."""

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
        #: whether its attributes were looked at
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
            if any(t.requires_grad for t in (*packed.tensors, *self.parameters)):
                call = Call(self, args, kwargs, packed)
                made = _Recomputed.apply(call, self.anchor, *packed.tensors)  # type: ignore[no-untyped-call]
                return call.result(made)
        with self.keeper.forward_of(self):
            return self.run(*args, **kwargs)

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

    def check_attributes(self, before: dict[str, Any]) -> None:
        """Call after the first second run.

        Args:
            before: Its plain attributes before that.

        Raises:
            BlockError: It talks through attributes.
        """
        self.checked = True
        kept = kept_with_graph(self.module)
        if kept is not None:
            raise BlockError(
                f"HydraStrategy: block {self.name!r} keeps a tensor in its attribute `{kept}`. Whoever reads it outside"
                " of the block has that of the first run, through which no gradient flows. Return it from forward, or"
                " keep it detached."
            )
        now = plain_attributes(self.module)
        changed = next((path for path, value in now.items() if before.get(path, value) != value), None)
        if changed is not None:
            raise BlockError(
                f"HydraStrategy: block {self.name!r} changes its attribute `{changed}` whenever it runs, and in"
                " training it runs twice a step. Make it a buffer (register_buffer), which is put back."
            )


class Call:
    """One call of a block."""

    def __init__(self, block: Block, args: Any, kwargs: Any, packed: Packed) -> None:
        self.block = block
        self._given: tuple[Any, Any] | None = (args, kwargs)
        self._packed: Packed | None = packed
        self._rebuild = packed.rebuild
        self._autocast = Autocast(block.device.type)
        self._randomness: Randomness | None = None
        self._changed: dict[int, dict[str, Tensor]] = {}
        self._passed: dict[int, int] = {}  # by place in the result: the argument that is returned as it is
        self._result: Packed | None = None
        self._held: tuple[list[Tensor], tuple[Tensor, ...]] | None = None

    def first_run(self) -> tuple[Tensor, ...]:
        """Runs the block without a graph.

        Returns:
            The tensors that it has made.

        Raises:
            BlockError: It has changed what it was given.
        """
        assert self._given is not None and self._packed is not None
        block, (args, kwargs), given = self.block, self._given, self._packed
        versions = [t._version for t in given.tensors]
        randomness = Randomness(block.device, block.generators)
        block.buffers.before()
        inputs: Sequence[Tensor] = given.tensors
        with block.keeper.forward_of(block), without_cache():
            hold = block.keeper.may_hold(self)
            if hold:
                inputs = _leaves(given.tensors)
                args, kwargs = self._rebuild(inputs)
            with torch.set_grad_enabled(hold):
                result = block.run(*args, **kwargs)
        self._changed = block.buffers.after()
        if randomness.keep_what_moved():
            self._randomness = randomness
        self._check_given(versions)
        self._result = block.pack(result, "returns")
        places = {id(t): i for i, t in enumerate(inputs)}
        self._passed = {i: places[id(t)] for i, t in enumerate(self._result.tensors) if id(t) in places}
        block.keeper.taped(block, given.tensors)
        made = self._made(self._result.tensors)
        if not hold:
            return made
        self._held = list(inputs), made
        return tuple(t.detach() for t in made)

    def let_go(self) -> None:
        """Forgets its activations; they are computed again if they are needed."""
        if self._held is not None:
            self._held = None
            self.block.keeper.released(self)

    def result(self, made: Sequence[Tensor]) -> Any:
        """What the block returns, with the tensors that are on the tape."""
        assert self._result is not None and self._packed is not None
        rest = iter(made)
        tensors = [
            self._packed.tensors[self._passed[i]] if i in self._passed else next(rest)
            for i in range(len(self._result.tensors))
        ]
        tree = self._result.rebuild(tensors)
        self._given = self._packed = self._result = None  # what is needed again is saved by autograd
        return tree

    def second_run(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Runs the block again, with a graph, and back through it.

        Args:
            tensors: What it was given.
            gradients: Of what it has made.

        Returns:
            Gradients of what it was given. Those of parameters are accumulated.
        """
        block = self.block
        with block.keeper.backward_of(block):
            if self._held is not None:
                inputs, made = self._held
            else:
                inputs = _leaves(tensors)
                before = None if block.checked else plain_attributes(block.module)
                made = self._made(block.pack(self._again(inputs), "returns").tensors)
                if before is not None:
                    block.check_attributes(before)
            pairs = [(m, g) for m, g in zip(made, gradients) if g is not None and m.requires_grad]
            if pairs:
                torch.autograd.backward([m for m, _ in pairs], [g for _, g in pairs])
            del made, pairs
            self.let_go()
        return [t.grad for t in inputs]

    def _again(self, inputs: Sequence[Tensor]) -> Any:
        args, kwargs = self._rebuild(inputs)
        block = self.block
        with torch.enable_grad(), self._autocast.again(), block.buffers.as_before(self._changed):
            if self._randomness is None:
                return block.run(*args, **kwargs)
            with self._randomness.replayed():
                return block.run(*args, **kwargs)

    def _made(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(t for i, t in enumerate(tensors) if i not in self._passed)

    def _check_given(self, versions: Sequence[int]) -> None:
        assert self._packed is not None
        now = self.block.pack(self._given, "is given")
        same = now.outline == self._packed.outline and len(now.tensors) == len(versions)
        if not same or any(a is not b for a, b in zip(now.tensors, self._packed.tensors)):
            raise BlockError(
                f"HydraStrategy: block {self.block.name!r} changes a list or dict that it is given. Its second run in"
                " backward would not do so again. Return what it adds instead."
            )
        for index, (tensor, before) in enumerate(zip(now.tensors, versions)):
            if tensor._version != before:
                raise BlockError(
                    f"HydraStrategy: block {self.block.name!r} changes its input tensor {index} (shape"
                    f" {tuple(tensor.shape)}) in place, and its second run in backward would begin with the changed"
                    " one. Write `x = x + y` for `x += y`, and nn.ReLU() for nn.ReLU(inplace=True)."
                )


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors, as the beginning of a graph of their own."""
    return [t.detach().requires_grad_(t.requires_grad) for t in tensors]


class _Recomputed(torch.autograd.Function):
    """A call as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        made = call.first_run()
        ctx.call = call
        ctx.save_for_backward(*tensors)
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
