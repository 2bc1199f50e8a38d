"""What is said when a checkpoint's table has another number of rows than the model's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_embrace.tables.modules import handle_of


def explain_mismatch(model: nn.Module, state_dict: dict[str, Any], error: RuntimeError) -> None:
    """Raises a torch error about sizes anew, with what to do, where only numbers of rows differ.

    Args:
        model: What was to load.
        state_dict: What it was to load.
        error: What torch said.

    Raises:
        RuntimeError: A table's number of rows is another one.
    """
    other = [
        (name, state_dict[f"{name}.weight"].shape[0], shape[0])
        for name, shape, _ in _tables(model)
        if _has_other_rows(state_dict.get(f"{name}.weight"), shape)
    ]
    if other and "size mismatch" in str(error):
        raise RuntimeError(f"{error}\n{_advice(*other[0])}") from error


def refuse_other_rows(model: nn.Module, optimizers: Sequence[Optimizer], states: Sequence[dict[str, Any]]) -> None:
    """Refuses optimizer states of tables with another number of rows, which torch would load and then fail on.

    Args:
        model: The model; of its tables this rank may hold some columns.
        optimizers: Its optimizers.
        states: Their state dicts, with whole states.

    Raises:
        ValueError: There is one.
    """
    shapes = {id(parameter): (name, shape) for name, shape, parameter in _tables(model)}
    for optimizer, state_dict in zip(optimizers, states):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            if id(parameter) not in shapes:
                continue
            name, shape = shapes[id(parameter)]
            for value in state_dict["state"].get(number, {}).values():
                if _has_other_rows(value, shape):
                    raise ValueError(
                        f"The optimizer's state of table {name!r} in the checkpoint has {value.shape[0]} rows."
                        f" {_advice(name, value.shape[0], shape[0])} If it has been resized, the state that grew was"
                        " another parameter's: tell `parameters`."
                    )


def _advice(name: str, saved: int, wanted: int) -> str:
    if wanted < saved:
        return f"Table {name!r} has {wanted} rows, fewer than the {saved} in the checkpoint: tables do not shrink."
    return (
        f"Table {name!r} has {wanted} rows in the model and {saved} in the checkpoint. Where the vocabulary has grown,"
        f" lightning_embrace.utilities.resize_embedding(checkpoint, {name!r}, {wanted}) adds the rows to a checkpoint"
        " and to its optimizer states."
    )


def _tables(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...], nn.Parameter]]:
    """Names, whole shapes and Parameters of a model's tables."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            handle, weight = handle_of(module), dict.get(module._parameters, "weight")
            if handle is not None:
                yield name, (handle.table.rows, handle.table.columns), handle.table.parameter
            elif weight is not None:
                yield name, tuple(weight.shape), weight


def _has_other_rows(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == shape[1] and value.shape[0] != shape[0]
