"""Parameters of blocks that are used past the blocks' calls, where they may be NaN, or another block's in a moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_embrace.hydra.errors import BlockError
from lightning_embrace.hydra.tape import Block
from lightning_embrace.hydra.unit import Unit, is_away
from lightning_embrace.overlay import Overlay


class Part:
    """Takes the calls of a module that is a part of a block over.

    Args:
        name: The module's.
        module: The module.
        parameter: One of its own that may be away.
        block: The block's name.
    """

    def __init__(self, name: str, module: nn.Module, parameter: Tensor, block: str) -> None:
        self.name = name
        self.block = block
        self.run: Any = module._compiled_call_impl or module._call_impl
        self._parameter = parameter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's call."""
        if is_away(self._parameter):
            raise BlockError(
                f"HydraStrategy: {self.name!r} is a part of block {self.block!r} and is called outside of the block's"
                " call, where its parameters are away. Make it a block as well, and name it first:"
                f" HydraStrategy(blocks=[{self.name!r}, {self.block!r}, ...])."
            )
        return self.run(*args, **kwargs)


class Outside:
    """Refuses it.

    Args:
        blocks: All blocks.
        units: All units.
        overlay: Is taken away when the blocks' calls are given back.
    """

    def __init__(self, blocks: Sequence[Block], units: Sequence[Unit], overlay: Overlay) -> None:
        self._blocks: dict[int, list[Block]] = {}
        self._unit_of = {id(p): unit for unit in units for p in unit.parameters}
        self._watched: dict[int, Any] = {}
        taken = {id(block.module) for block in blocks}
        for block in blocks:
            for parameter in block.parameters:
                self._blocks.setdefault(id(parameter), []).append(block)
            for name, part in block.module.named_modules():
                own = next((p for p in part.parameters(recurse=False) if self._spills(p)), None)
                if own is not None and id(part) not in taken:
                    taken.add(id(part))
                    overlay.lay(part, "_compiled_call_impl", Part(f"{block.name}.{name}", part, own, block.name))

    def watch(self) -> None:
        """Looks at the gradients of parameters that are trained."""
        for block in {id(b): b for blocks in self._blocks.values() for b in blocks}.values():
            for parameter in block.parameters:
                if parameter.requires_grad and self._spills(parameter) and id(parameter) not in self._watched:
                    self._watched[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._check)

    def remove(self) -> None:
        """Looks no more."""
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    def _spills(self, parameter: Tensor) -> bool:
        return id(parameter) in self._unit_of

    def _check(self, parameter: Tensor) -> None:
        blocks = self._blocks[id(parameter)]
        if self._unit_of[id(parameter)].place == "device" or any(block.going_back for block in blocks):
            return
        block = blocks[0]
        name = next(name for name, p in block.module.named_parameters() if p is parameter)
        raise BlockError(
            f"HydraStrategy: parameter '{block.name}.{name}' is used outside of the call of block {block.name!r}, where"
            " it reads as NaN: a penalty on weights, or a layer that is called as a function. Compute it in the block's"
            f" forward and return it, or leave the block on the device: HydraStrategy(blocks=['!{block.name}'])."
        )
