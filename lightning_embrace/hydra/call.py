"""One call of a block: its graph is kept until backward, or it is run again there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_embrace.hydra.arguments import Packed
from lightning_embrace.hydra.attributes import Moment
from lightning_embrace.hydra.autocast import Autocast, without_cache
from lightning_embrace.hydra.errors import BlockError
from lightning_embrace.hydra.graphs import leaf_of, leaked, root_of, saving_is_hooked, without_saving
from lightning_embrace.hydra.kept import Kept
from lightning_embrace.hydra.randomness import Randomness
from lightning_embrace.hydra.results import outside_of_graphs, own_memory, same_sums, sums

if TYPE_CHECKING:
    from lightning_embrace.hydra.tape import Block


class Call:
    """A call whose activations are kept where there is room, and else computed again.

    Args:
        block: Whose.
        packed: What it is given.
    """

    def __init__(self, block: Block, packed: Packed) -> None:
        self.block = block
        self._packed: Packed | None = packed
        self._rebuild = packed.rebuild
        self._autocast = Autocast(block.device.type)
        self._randomness: Randomness | None = None
        self._changed: dict[int, dict[str, Tensor]] = {}
        self._attributes: Moment | None = None
        self._passed: dict[int, int] = {}  # by place in the result: the argument that is returned as it is
        self._result: Packed | None = None
        self._kept: Kept | None = None
        self._graph: tuple[list[Tensor], Callable[[Sequence[Tensor | None]], None]] | None = None
        self._going_back = False
        self._sums: list[tuple[float, float]] | None = None
        #: of what it has made, whether gradients flow through it
        self.differentiable: list[bool] = []
        #: what its activations take, while they are kept
        self.kept_bytes = 0

    def first_run(self) -> tuple[Tensor, ...]:
        """Runs the block, with a graph that keeps what backward needs, or nothing.

        Returns:
            The tensors that it has made, without a graph.

        Raises:
            BlockError: It does what it could not do again.
        """
        assert self._packed is not None
        block, given = self.block, self._packed.tensors
        versions = [t._version for t in given]
        randomness = Randomness(block.device, block.generators)
        block.buffers.before()
        with block.attributes.cut() as self._attributes, block.keeper.forward_of(block):
            inputs = self._leaves(given)
            args, kwargs = self._rebuild(inputs)
            with self._recorded(given) as kept:
                result = own_memory(block.forward(*args, **kwargs), block.parameters)
        self._changed = block.buffers.after()
        if randomness.keep_what_moved():
            self._randomness = randomness
        self._check(args, kwargs, inputs, versions)
        self._result = block.pack(result, "returns")
        places = {id(t): i for i, t in enumerate(inputs)}
        self._passed = {i: places[id(t)] for i, t in enumerate(self._result.tensors) if id(t) in places}
        made = self._made(self._result.tensors)
        self.differentiable = [t.requires_grad for t in made]
        if not block.checked:
            self._sums = sums(made)
        if any(self.differentiable):
            if kept is not None and kept.usable:
                self._keep(kept, inputs, made)
            block.keeper.taped(block, given)
        return tuple(outside_of_graphs(made))

    @contextmanager
    def _recorded(self, given: Sequence[Tensor]) -> Iterator[Kept | None]:
        """Around the first run; returns what its graph keeps, or None."""
        block = self.block
        if block.checked and block.keeper.room(block) is not None and not saving_is_hooked():
            kept = Kept(block.name, block.parameters, given)
            with kept.recording():
                yield kept
        else:
            with without_cache(), without_saving(block.name):
                yield None

    def _keep(self, kept: Kept, inputs: list[Tensor], made: Sequence[Tensor]) -> None:
        """Keeps the graph, unless it has saved more than there is room for."""
        room = self.block.keeper.room(self.block)
        if room is None or kept.nbytes > room:
            return
        self._kept, self._graph = kept, (inputs, root_of(made))
        self.kept_bytes = kept.nbytes
        self.block.keeper.kept(self)

    def let_go(self) -> None:
        """Forgets its activations; they are computed again if they are needed."""
        kept, self._kept, self._graph = self._kept, None, None
        if kept is not None:
            kept.forget()
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
        self._packed = self._result = None  # what is needed again is saved by autograd
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
        with block.keeper.backward_of(self, tensors):
            if self._graph is None:
                inputs = self._leaves(tensors)
                made = self._made(block.pack(self._again(inputs), "returns").tensors)
                self._check_again(made, len(gradients))
                go_back = root_of(made)
                del made
            else:
                inputs, go_back = self._graph
            with self._on_the_way_back():
                go_back(gradients)
            del go_back
            self.let_go()
        return [t.grad for t in inputs]

    def _again(self, inputs: Sequence[Tensor]) -> Any:
        args, kwargs = self._rebuild(inputs)
        block = self.block
        assert self._attributes is not None
        random = nullcontext() if self._randomness is None else self._randomness.replayed()
        with (
            torch.enable_grad(),
            self._autocast.again(),
            block.buffers.as_before(self._changed),
            block.attributes.as_before(self._attributes),
            random,
        ):
            return block.forward(*args, **kwargs)

    @contextmanager
    def _on_the_way_back(self) -> Iterator[None]:
        self._going_back = True
        self.block.going_back += 1
        try:
            with nullcontext() if self._kept is None else self._kept.opened():
                yield
        finally:
            self._going_back = False
            self.block.going_back -= 1

    def _leaves(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [leaf_of(t, self._reached) for t in tensors]

    def _reached(self) -> None:
        if not self._going_back:
            raise leaked(self.block.name)

    def _made(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(t for i, t in enumerate(tensors) if i not in self._passed)

    # ---- what could not be repeated --------------------------------------------------------------------------------

    def _check(self, args: Any, kwargs: Any, inputs: Sequence[Tensor], versions: Sequence[int]) -> None:
        block = self.block
        assert self._packed is not None and self._attributes is not None
        now = block.pack((args, kwargs), "is given")
        same = now.outline == self._packed.outline and len(now.tensors) == len(inputs)
        if not same or any(a is not b for a, b in zip(now.tensors, inputs)):
            raise BlockError(
                f"HydraStrategy: block {block.name!r} changes a list or dict that it is given. Its second run in"
                " backward would not do so again. Return what it adds instead."
            )
        for index, (tensor, before) in enumerate(zip(inputs, versions)):
            if tensor._version != before:
                raise block.changes_input(f"its input tensor {index} (shape {tuple(tensor.shape)})")
        changed = block.attributes.changed_in_place(self._attributes)
        if changed is not None:
            raise BlockError(
                f"HydraStrategy: block {block.name!r} changes its attribute `{changed}` in place whenever it runs, and"
                " in training it runs twice a step. Make it a buffer (register_buffer), which is put back."
            )

    def _check_again(self, made: Sequence[Tensor], count: int) -> None:
        self.block.checked = True
        if len(made) != count or (self._sums is not None and not same_sums(self._sums, sums(made))):
            raise BlockError(
                f"HydraStrategy: block {self.block.name!r} gives other numbers when it runs again in backward."
                " What is neither an argument, a buffer nor an attribute has changed, or it draws from a random"
                " generator other than torch's, Python's and NumPy's global ones. Pass what changes as an argument."
            )
