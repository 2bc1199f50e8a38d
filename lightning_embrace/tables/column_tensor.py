"""A table while its model is built: holds some columns and takes initialisers as the whole table would.

Initialisers ask a weight for its shape, draw into it, scale it and clear rows of it. Here they find the whole shape,
and only this rank's columns are kept: what is drawn goes block by block through a small buffer of full width, from the
same stream of random numbers. Once the model is built its weights are ordinary parameters again (:func:`make_plain`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

aten = torch.ops.aten

#: torch's generator fills in groups of this many numbers: blocks of so many rows are drawn as the whole would be
_GROUP = 16
_BLOCK_BYTES = 32 << 20

_DRAWS = {aten.normal_.default, aten.uniform_.default}
_NEW_DRAWS = {aten.randn_like.default: aten.normal_.default, aten.rand_like.default: aten.uniform_.default}
#: elementwise, and not tagged so by torch
_ALIKE = {
    aten.alias.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.ones_like.default,
    aten._to_copy.default,
    aten.zero_.default,
    aten.zeros_like.default,
}
_OF_ROWS = {aten.select.int, aten.slice.Tensor}
#: new tensors, for which a weight only lends its dtype and device
_NEW = {aten.new_empty.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default}


class Share(NamedTuple):
    """Which columns are here.

    Attributes:
        start: The first one.
        width: D, the columns of the whole.
        any_rank: Whether something holds on any rank; collective. `trunc_normal_` draws again as long as some number of
            the whole table is out of bounds.
    """

    start: int
    width: int
    any_rank: Callable[[bool], bool] = bool


class ColumnTensor(Tensor):
    """Some columns that show themselves as the whole: logical shape [V, D] (or a row of it, [D]).

    Args:
        columns_Vd: The columns [V, d] (or [d]).
        share: Which columns these are.
    """

    columns_Vd: Tensor
    share: Share

    @staticmethod
    def __new__(cls, columns_Vd: Tensor, share: Share) -> ColumnTensor:
        """Makes a tensor without storage of its own."""
        shape = (*columns_Vd.shape[:-1], share.width)
        made: ColumnTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=columns_Vd.dtype, device=columns_Vd.device
        )
        made.columns_Vd, made.share = columns_Vd, share
        return made

    def __init__(self, columns_Vd: Tensor, share: Share) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        start, stop = self.share.start, self.share.start + self.columns_Vd.shape[-1]
        return f"ColumnTensor({tuple(self.shape)}, columns {start} to {stop} are here, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ColumnTensor:
        if id(self) not in memo:
            copied: ColumnTensor = self.detach().clone().requires_grad_(self.requires_grad)  # type: ignore[assignment]
            copied.__dict__.update({k: v for k, v in self.__dict__.items() if k != "columns_Vd"})
            memo[id(self)] = copied
        return memo[id(self)]  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``weight.data = value`` must move the columns too."""
        with torch._C.DisableTorchFunctionSubclass():
            if func != Tensor.data.__set__:  # type: ignore[attr-defined]  # a new object at every access
                return func(*args, **(kwargs or {}))
            target, value = args
            if not isinstance(value, ColumnTensor):
                if target.shape != value.shape:
                    return _refuse(func)
                return target.detach().copy_(value)
            func(target, value)
            target.columns_Vd, target.share = value.columns_Vd, value.share

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no func
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What initialisers do."""
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if not isinstance(first, ColumnTensor) and func._schema.is_mutable:
            return _refuse(func)
        if func in _DRAWS:
            return _draw(first, lambda block: func(block, *args[1:], **kwargs))
        if func in _NEW_DRAWS:
            return _draw(_on_columns(aten.empty_like.default, args, kwargs), _NEW_DRAWS[func])
        if func == aten.any.default:
            return torch.tensor(first.share.any_rank(bool(first.columns_Vd.any())), device=first.device)
        if func in _NEW:
            return func(first.columns_Vd, *args[1:], **kwargs)
        if func in _ALIKE or torch.Tag.pointwise in func.tags or _takes_rows(func, args):
            return _on_columns(func, args, kwargs)
        return _refuse(func)


def make_plain(parameter: ColumnTensor) -> None:
    """Turns a parameter into an ordinary one that holds the columns [V, d]; the object stays the same."""
    plain = nn.Parameter(parameter.columns_Vd, requires_grad=parameter.requires_grad)
    own = {k: v for k, v in parameter.__dict__.items() if k not in ("columns_Vd", "share", "_is_param")}
    plain.__dict__.update(own)
    torch.utils.swap_tensors(parameter, plain)


def _draw(tensor: ColumnTensor, fill: Callable[[Tensor], Any]) -> ColumnTensor:
    start, width, _ = tensor.share
    columns_Rd = tensor.columns_Vd if tensor.dim() > 1 else tensor.columns_Vd.unsqueeze(0)
    for first, last in _blocks(columns_Rd.shape[0], width, tensor.element_size()):
        block = columns_Rd.new_empty(last - first, width)
        fill(block)
        columns_Rd[first:last] = block[:, start : start + columns_Rd.shape[-1]]
    return tensor


def _blocks(rows: int, width: int, itemsize: int) -> list[tuple[int, int]]:
    """Ranges of rows, each of whole groups; the last one has what is left, and not less than a group."""
    step = max(1, _BLOCK_BYTES // max(1, _GROUP * width * itemsize)) * _GROUP
    starts = list(range(0, rows, step))
    if len(starts) > 1 and (rows - starts[-1]) * width < _GROUP:
        starts.pop()
    return list(zip(starts, [*starts[1:], rows]))


def _takes_rows(func: Any, args: Any) -> bool:
    """Whether it takes rows, or writes into rows, and leaves the columns alone."""
    tensor = args[0]
    if func in _OF_ROWS:
        dim = args[1] if len(args) > 1 else 0
        return bool(dim % tensor.dim() != tensor.dim() - 1)
    if func is aten.index_put_.default:
        return len(args[1]) == 1 and tensor.dim() == 2 and args[1][0].dim() == 1
    return False


def _on_columns(func: Any, args: Any, kwargs: Any) -> Any:
    tensors: list[ColumnTensor] = []
    tree_map(lambda v: tensors.append(v) if isinstance(v, ColumnTensor) else None, [args, kwargs])
    share = tensors[0].share
    if any(t.share[:2] != share[:2] for t in tensors):
        return _refuse(func)
    start, width, _ = share
    stop = start + tensors[0].columns_Vd.shape[-1]

    def mine(value: Any) -> Any:
        if isinstance(value, ColumnTensor):
            return value.columns_Vd
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape[-1] == width:
            return value[..., start:stop]
        return value

    result = func(*tree_map(mine, args), **tree_map(mine, kwargs))
    if func._schema.is_mutable:
        return args[0]
    return ColumnTensor(result, share) if isinstance(result, Tensor) else result


def _refuse(func: Any) -> Any:
    raise NotImplementedError(
        f"`{func}` needs a whole embedding table, but in `configure_model` each rank builds only some columns of it."
        " There a table can be filled with `normal_`, `uniform_`, `fill_` or `copy_` (as most of `torch.nn.init` does),"
        " changed element by element, and rows of it can be set. For anything else compute the whole first and write"
        " `nn.Embedding.from_pretrained(whole, freeze=False)`, or build the table in `__init__`."
    )
