"""What the graph of a call has saved. Weights are left out: they may leave, and are looked up again in backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from lightning_embrace.hydra.errors import BlockError
from lightning_embrace.hydra.graphs import leaked


class _Weights(NamedTuple):
    """A view of a parameter.

    Attributes:
        parameter: Its place in the block.
        size: Of the view.
        stride: In elements.
        offset: From the parameter's first element, in elements.
        version: The parameter's, when the view was saved.
    """

    parameter: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int


class _Activation:
    """Any other tensor.

    Attributes:
        tensor: None once it was forgotten.
        version: When it was saved.
    """

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()  # without its graph, which would hold it in a circle
        self.version = tensor._version


class Kept:
    """What one call's graph needs for its backward.

    Args:
        block: The block's name.
        parameters: All that the block has.
        given: What the call is given, which somebody else keeps.

    Attributes:
        usable: Whether the graph can be gone back through. It cannot once something was saved that would not be the
            same after a parameter has left.
    """

    def __init__(self, block: str, parameters: Sequence[nn.Parameter], given: Sequence[Tensor]) -> None:
        self.usable = True
        self._open = False
        self._block = block
        self._parameters = parameters
        self._given = {_address(t) for t in given}
        self._aliases: dict[int, int] = {}
        self._slots: set[int] = set()
        self._saved: list[weakref.ref[_Activation]] = []
        self._sizes: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of what was saved beside weights and what the call was given."""
        return sum(self._sizes.values())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the call's only run."""
        with (
            self._parameters_by_themselves(),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack),
        ):
            yield

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, one may go back through the graph: the block's parameters are there."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def forget(self) -> None:
        """Frees it all, whoever else still has the graph."""
        self.usable = False
        for reference in self._saved:
            activation = reference()
            if activation is not None:
                activation.tensor = None
        self._saved.clear()
        self._sizes.clear()

    @contextmanager
    def _parameters_by_themselves(self) -> Iterator[None]:
        """Inside, each parameter's memory has a name of its own, so that whoever still has it afterwards is noticed."""
        before = [p.data for p in self._parameters]
        self._slots = {data.untyped_storage()._cdata for data in before}
        watched = []
        try:
            for index, parameter in enumerate(self._parameters):
                if parameter.numel():
                    parameter.data = _alias(parameter.data)
                    storage = parameter.untyped_storage()
                    self._aliases[storage._cdata] = index
                    watched.append(weakref.ref(storage))
                    del storage
            yield
        finally:
            for parameter, data in zip(self._parameters, before):
                parameter.data = data
            self._aliases.clear()
        if any(reference() is not None for reference in watched):
            self.forget()  # such as a view that a Function of the user's has put in an attribute

    # ---- hooks -----------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> _Weights | _Activation | None:
        if self.usable and not _is_ordinary(tensor):
            self.forget()
        if not self.usable:
            return None
        storage = tensor.untyped_storage()
        index = self._aliases.get(storage._cdata)
        if index is None and storage._cdata not in self._slots:
            activation = _Activation(tensor)
            self._saved.append(weakref.ref(activation))
            address = storage.data_ptr()
            if address not in self._given:
                self._sizes[address] = storage.nbytes()
            return activation
        parameter = None if index is None else self._parameters[index]
        if index is None or parameter is None or not _is_alike(tensor, parameter):
            self.forget()
            return None
        return _Weights(index, tensor.size(), tensor.stride(), int(tensor.storage_offset()), parameter._version)

    def _unpack(self, saved: _Weights | _Activation | None) -> Tensor:
        if saved is None or not self._open:
            raise leaked(self._block)
        if isinstance(saved, _Weights):
            parameter = self._parameters[saved.parameter]
            self._check(parameter, saved.version, "A parameter of it")
            start = parameter.storage_offset() + saved.offset
            return parameter.detach().as_strided(saved.size, saved.stride, start)
        if saved.tensor is None:
            raise leaked(self._block)
        self._check(saved.tensor, saved.version, f"A tensor of shape {tuple(saved.tensor.shape)} in it")
        return saved.tensor

    def _check(self, tensor: Tensor, version: int, what: str) -> None:
        if tensor._version != version:
            raise BlockError(
                f"HydraStrategy: one of the variables that block {self._block!r} needs for its backward has been"
                f" modified by an inplace operation. {what} is at version {tensor._version}, expected {version}. Write"
                " `x = x + y` for `x += y` there, and step the optimizer after backward."
            )


def _alias(data: Tensor) -> Tensor:
    """The same memory under a storage of its own, which is gone when nobody has it."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(data.size(), data.stride()))
    flat = data.as_strided((extent,), (1,)).view(torch.uint8)
    alias: Tensor = from_dlpack(flat)
    return alias.view(data.dtype).as_strided(data.size(), data.stride())


def _is_ordinary(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested


def _is_alike(view: Tensor, parameter: Tensor) -> bool:
    return (
        view.dtype == parameter.dtype and view.is_conj() == parameter.is_conj() and view.is_neg() == parameter.is_neg()
    )


def _address(tensor: Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if _is_ordinary(tensor) else None
