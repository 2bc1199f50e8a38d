"""While a model is built, ``nn.Embedding`` and ``nn.EmbeddingBag`` make only this rank's columns of their tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_embrace.tables.column_tensor import ColumnTensor, Share
from lightning_embrace.tables.columns import column_ranges

_KINDS: tuple[type[nn.Module], ...] = (nn.Embedding, nn.EmbeddingBag)


@contextmanager
def building_columns(
    rank: int, world_size: int, wanted: Callable[[int], bool], any_rank: Callable[[bool], bool] = bool
) -> Iterator[None]:
    """Tables that are built inside hold this rank's columns.

    Not those with ``max_norm``, which needs whole rows, those that are given their values (``from_pretrained``), and
    those on the meta device.

    Args:
        rank: This process' rank.
        world_size: Number of ranks.
        wanted: Whether a table of so many bytes is to be built so.
        any_rank: Whether something holds on any rank. Collective.
    """

    def columns(module: nn.Module, empty: Callable[[tuple[int, int]], Tensor], rows: int, width: int) -> Tensor | None:
        start, stop = column_ranges(width, world_size)[rank]
        columns_Vd = empty((rows, stop - start))
        fits = wanted(rows * width * columns_Vd.element_size()) and columns_Vd.is_floating_point()
        if not fits or columns_Vd.is_meta or module.max_norm is not None:
            return None
        return ColumnTensor(columns_Vd, Share(start, width, any_rank))

    with ExitStack() as stack:
        for kind in _KINDS:
            stack.callback(setattr, kind, "__init__", kind.__init__)
            kind.__init__ = _narrow(kind.__init__, columns)  # type: ignore[method-assign]
        yield


#: (module, how torch makes an empty tensor, V, D) → its columns, or None where it is to be whole
_Columns = Callable[[nn.Module, Callable[[tuple[int, int]], Tensor], int, int], "Tensor | None"]


def _narrow(original: Any, columns: _Columns) -> Any:
    @functools.wraps(original)
    def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        with _FirstTable(module, columns):
            original(module, *args, **kwargs)

    return init


class _FirstTable(TorchFunctionMode):
    """Catches the ``torch.empty`` with which a look-up module makes its table; what a subclass makes comes later."""

    def __init__(self, module: nn.Module, columns: _Columns) -> None:
        super().__init__()
        self._module, self._columns = module, columns
        self._open = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and self._open:
            self._open = False
            made = self._columns(self._module, lambda shape: func(shape, *args[1:], **kwargs), *args[0])
            if made is not None:
                return made
        return func(*args, **kwargs)
