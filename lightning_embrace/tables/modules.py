"""The classes that take over ``nn.Embedding`` and ``nn.EmbeddingBag`` while their table is sharded.

The module object stays the user's: its class is exchanged for a subclass of what it was, and back afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_embrace.tables.bags import pooled_is_smaller, to_bags
from lightning_embrace.tables.lookup import TableHandle
from lightning_embrace.tables.request import PooledRequest
from lightning_embrace.tables.state import load_shard

#: more pooled look-ups of one table in one step exchange rows: their bits must fit one header field
_MAX_POOLED = 62
_Forward = TypeVar("_Forward", bound=Callable[..., Tensor])


def _not_compiled(forward: _Forward) -> _Forward:
    """Keeps torch.compile out of a look-up: it waits for other ranks. The graph around it is compiled in two parts."""
    disable: Any = torch.compiler.disable
    reason = "a look-up in a sharded table exchanges rows with other ranks; leave out fullgraph=True"
    told = {"reason": reason} if "reason" in inspect.signature(disable).parameters else {}  # from torch 2.7 on
    return cast(_Forward, disable(forward, **told))


class _Sharded(nn.Module):
    """What both kinds share: the guarded weight and the shard's place in state dicts."""

    _embrace: TableHandle

    def _handle(self) -> TableHandle:
        """The way to the rows, if the weight is still the one that was sharded."""
        handle = self._embrace
        # past the gate that watches whoever else reads the weight
        if dict.get(self._parameters, "weight") is not handle.table.parameter:
            raise RuntimeError(
                f"`{handle.table.name}.weight` was replaced by another tensor (functional_call, or an assignment) while"
                " the table is sharded, and a look-up would not see it. Keep the table whole:"
                f" EmbRaceStrategy(tables=['*', '!{handle.table.name}'])."
            )
        return handle

    @property
    def weight(self) -> nn.Parameter:
        """This rank's shard [V, d]; raises inside a step, where only look-ups reach the whole table."""
        source = self._embrace.source
        source.check_alive(self._embrace.table)
        if source.in_step:
            name = self._embrace.table.name
            raise RuntimeError(
                f"`{name}.weight` was read inside a step, but this rank holds only some columns of that table. Use the"
                " module's look-up instead (`module(ids)`), or keep the table whole by excluding it:"
                f" EmbRaceStrategy(tables=['*', '!{name}'])."
            )
        return cast(nn.Parameter, self._parameters["weight"])

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self._embrace.source.shown(self._embrace.table)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key, handle = prefix + "weight", self._embrace
        if key in state_dict:
            try:
                state_dict[key] = load_shard(handle.table, state_dict[key])
            except ValueError as error:
                error_msgs.append(f"size mismatch for {key}: {error}")
                state_dict[key] = handle.table.shard_Vd
        # assign=True would replace the Parameter that the optimizer and the table hold
        metadata = {**local_metadata, "assign_to_params_buffers": False}
        with handle.source.changing(handle.table) if key in state_dict else nullcontext():
            super()._load_from_state_dict(
                state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs
            )


#: what puts a table into a state dict, unless a subclass of the user's comes first
SAVES_SHARDS = _Sharded._save_to_state_dict


class ShardedEmbedding(_Sharded, nn.Embedding):  # type: ignore[misc]  # the weight is guarded
    """An ``nn.Embedding`` whose table is sharded column-wise."""

    @_not_compiled
    def forward(self, input: Tensor) -> Tensor:
        """Looks up ids of any shape; returns that shape with D appended."""
        handle = self._handle()
        handle.check_ids(input)
        ids_U, inverse = torch.unique(input.long(), return_inverse=True)
        handle.count(input.numel(), ids_U.numel())
        padding = _position(ids_U, self.padding_idx)
        rows_UD = handle.rows(ids_U, padding)
        return F.embedding(inverse, rows_UD, padding, scale_grad_by_freq=self.scale_grad_by_freq)


class ShardedEmbeddingBag(_Sharded, nn.EmbeddingBag):  # type: ignore[misc]  # the weight is guarded
    """An ``nn.EmbeddingBag`` whose table is sharded column-wise.

    Sums and means travel pooled when that is fewer bytes than the rows; maxima and trained weights per sample need
    the rows.
    """

    @_not_compiled
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Looks up bags of ids; returns [B, D]."""
        handle = self._handle()
        handle.check_ids(input)
        self._check_weights(per_sample_weights)
        request = to_bags(
            input, offsets, per_sample_weights, self.mode == "mean", self.padding_idx, self.include_last_offset
        )
        ids_U, inverse_L = torch.unique(request.ids_L, return_inverse=True)
        handle.count(request.ids_L.numel(), ids_U.numel())
        if self._may_pool(request):
            # equal bags get equal answers: what activation checkpointing repeats must be what it was
            bags_BD = handle.pooled_before(request)
            if bags_BD is None and self._pays(request, ids_U):
                bags_BD = handle.pooled(request)
            if bags_BD is not None:
                return bags_BD
        return F.embedding_bag(
            inverse_L,
            handle.rows(ids_U),
            request.offsets_B(),
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode=self.mode,
            per_sample_weights=request.weights_L,
        )

    def _check_weights(self, weights: Tensor | None) -> None:
        if weights is None:
            return
        if self.mode != "sum":
            raise NotImplementedError(
                f"Table {self._embrace.table.name!r}: per_sample_weights is only supported for mode='sum', not"
                f" mode={self.mode!r}."
            )
        dtype = self._embrace.table.parameter.dtype
        if weights.dtype != dtype:
            raise RuntimeError(
                f"Table {self._embrace.table.name!r}: per_sample_weights must have the table's dtype {dtype}, but got"
                f" {weights.dtype}. Write `per_sample_weights.to({dtype})`."
            )

    def _may_pool(self, request: PooledRequest) -> bool:
        weights = request.weights_L
        # without gradients nobody knows whether they are trained: checkpointing may repeat the look-up with gradients
        trained = weights is not None and (weights.requires_grad or not torch.is_grad_enabled())
        return (
            self._embrace.source.in_training_step
            and self.mode in ("sum", "mean")
            and not self.scale_grad_by_freq
            and not trained
        )

    def _pays(self, request: PooledRequest, ids_U: Tensor) -> bool:
        handle = self._embrace
        return (
            not handle.source.in_backward
            and len(handle.table.window.bags) < _MAX_POOLED
            and pooled_is_smaller(request, ids_U, handle.table, handle.wants_gradient())
        )


def _position(ids_U: Tensor, wanted: int | None) -> int | None:
    """Where an id stands among sorted unique ids, None when it is not there."""
    if wanted is None:
        return None
    place = int(torch.searchsorted(ids_U, wanted))
    return place if place < ids_U.numel() and int(ids_U[place]) == wanted else None


def take_over(module: nn.Module, handle: TableHandle) -> None:
    """Makes a module look up in a sharded table; one that does so already looks up in this one from now on.

    Args:
        module: An ``nn.Embedding`` or ``nn.EmbeddingBag``, or a subclass of one.
        handle: Its table.
    """
    module.__dict__["_embrace"] = handle
    if is_sharded(module):
        return
    sharded: type[nn.Module] = ShardedEmbedding if isinstance(module, nn.Embedding) else ShardedEmbeddingBag
    original = type(module)
    if original not in (nn.Embedding, nn.EmbeddingBag):
        # the user's forward() runs first and its super().forward() finds ours
        sharded = type(f"Sharded{original.__name__}", (original, sharded), {})
    module.__dict__["_embrace_class"] = original
    module.__class__ = sharded


def give_back(module: nn.Module) -> None:
    """Undoes :func:`take_over`."""
    module.__class__ = module.__dict__.pop("_embrace_class")
    del module.__dict__["_embrace"]


def handle_of(module: nn.Module) -> TableHandle | None:
    """What a module keeps whose table is sharded."""
    return module.__dict__.get("_embrace")


def is_sharded(module: nn.Module) -> bool:
    """Whether :func:`take_over` was called on the module."""
    return "_embrace_class" in module.__dict__
