"""What Lightning's model summary says of sharded tables: their logical size, and the shard's beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_embrace.tables.table import ShardedTable

#: Lightning's name for the column, which its rich summary knows from DeepSpeed
_PER_DEVICE = "Params per Device"


class WholeSizes:
    """A summary of Lightning's in which tables count whole.

    Args:
        summary: Lightning's ``ModelSummary`` of the sharded model.
        model: The model.
        tables: Its sharded tables.
        readable: Lightning's way to write a count.
    """

    def __init__(
        self, summary: Any, model: nn.Module, tables: Sequence[ShardedTable], readable: Callable[[int], str]
    ) -> None:
        self._summary, self._model, self._readable = summary, model, readable
        self._elsewhere = {id(t.parameter): t.rows * t.columns - t.parameter.numel() for t in tables}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._summary, name)

    @property
    def total_parameters(self) -> int:
        """Of the whole model."""
        return int(self._summary.total_parameters) + self._missing(self._model)

    @property
    def trainable_parameters(self) -> int:
        """Of the whole model."""
        return int(self._summary.trainable_parameters) + self._missing(self._model, trainable=True)

    @property
    def model_size(self) -> float:
        """Of the whole model, in MB."""
        return float(self.total_parameters * self._summary._precision_megabytes)

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        columns = list(self._summary._get_summary_data())
        place = next(n for n, (name, _) in enumerate(columns) if name == "Params")
        here = columns[place][1]
        whole = [
            self._readable(count + self._missing(self._model.get_submodule(name)))
            for name, count in zip(self._summary.layer_names, self._summary.param_nums)
        ]
        rest = here[len(whole) :]  # parameters that belong to no layer
        return [*columns[:place], ("Params", whole + rest), (_PER_DEVICE, here), *columns[place + 1 :]]

    def _missing(self, module: nn.Module, trainable: bool = False) -> int:
        """Elements of a module's tables that other ranks hold."""
        counted = (p for p in module.parameters() if p.requires_grad or not trainable)
        return sum(self._elsewhere.get(id(p), 0) for p in counted)
