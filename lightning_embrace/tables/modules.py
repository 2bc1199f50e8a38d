"""The classes that take over ``nn.Embedding`` and ``nn.EmbeddingBag`` while their table is sharded.

The module object stays the user's: its class is exchanged for a subclass of what it was, and back afterwards.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_embrace.tables.bags import pooled_is_smaller, to_bags
from lightning_embrace.tables.lookup import TableHandle
from lightning_embrace.tables.state import load_shard, shard_as_dtensor

#: more pooled look-ups of one table in one step exchange rows: their bits must fit one header field
_MAX_POOLED = 62


class _Sharded(nn.Module):
    """What both kinds share: the guarded weight and the shard's place in state dicts."""

    _embrace: TableHandle

    @property
    def weight(self) -> nn.Parameter:
        """This rank's shard [V, d]; raises inside a step, where only look-ups reach the whole table."""
        source = self._embrace.source
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
        destination[prefix + "weight"] = shard_as_dtensor(self._embrace.table)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key = prefix + "weight"
        if key in state_dict:
            state_dict[key] = load_shard(self._embrace.table, state_dict[key])
            # rows fetched before are those of the old weights
            self._embrace.source.changed(self._embrace.table)
        super()._load_from_state_dict(state_dict, prefix, *args)


class ShardedEmbedding(_Sharded, nn.Embedding):  # type: ignore[misc]  # the weight is guarded
    """An ``nn.Embedding`` whose table is sharded column-wise."""

    def forward(self, input: Tensor) -> Tensor:
        """Looks up ids of any shape; returns that shape with D appended."""
        rows_UD, inverse, padding = self._embrace.unique_rows(input, self.padding_idx)
        return F.embedding(inverse, rows_UD, padding, scale_grad_by_freq=self.scale_grad_by_freq)


class ShardedEmbeddingBag(_Sharded, nn.EmbeddingBag):  # type: ignore[misc]  # the weight is guarded
    """An ``nn.EmbeddingBag`` whose table is sharded column-wise.

    Sums and means travel pooled when that is fewer bytes than the rows; maxima and trained weights per sample need
    the rows.
    """

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Looks up bags of ids; returns [B, D]."""
        handle = self._embrace
        if self._may_pool(per_sample_weights):
            handle.check_ids(input)
            request = to_bags(
                input, offsets, per_sample_weights, self.mode == "mean", self.padding_idx, self.include_last_offset
            )
            if pooled_is_smaller(request, handle.table):
                return handle.pooled(request)
        rows_UD, inverse, padding = handle.unique_rows(input, self.padding_idx)
        return F.embedding_bag(
            inverse,
            rows_UD,
            offsets,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    def _may_pool(self, per_sample_weights: Tensor | None) -> bool:
        handle = self._embrace
        return (
            handle.source.in_training_step
            and self.mode in ("sum", "mean")
            and not self.scale_grad_by_freq
            and not (per_sample_weights is not None and per_sample_weights.requires_grad)
            and len(handle.table.asked_pooled[handle.table.rank]) < _MAX_POOLED
        )


def take_over(module: nn.Module, handle: TableHandle) -> None:
    """Makes a module look up in a sharded table.

    Args:
        module: An ``nn.Embedding`` or ``nn.EmbeddingBag``, or a subclass of one.
        handle: Its table.
    """
    sharded: type[nn.Module] = ShardedEmbedding if isinstance(module, nn.Embedding) else ShardedEmbeddingBag
    original = type(module)
    if original not in (nn.Embedding, nn.EmbeddingBag):
        # the user's forward() runs first and its super().forward() finds ours
        sharded = type(f"Sharded{original.__name__}", (original, sharded), {})
    module.__dict__["_embrace"] = handle
    module.__dict__["_embrace_class"] = original
    module.__class__ = sharded


def give_back(module: nn.Module) -> None:
    """Undoes :func:`take_over`."""
    module.__class__ = module.__dict__.pop("_embrace_class")
    del module.__dict__["_embrace"]


def is_sharded(module: nn.Module) -> bool:
    """Whether :func:`take_over` was called on the module."""
    return "_embrace_class" in module.__dict__
