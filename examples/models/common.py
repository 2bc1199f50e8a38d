"""What the example models share: their optimizer, the sampled softmax, and the LSTM layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, Optimizer

OptimizerName = Literal["adam", "adagrad", "sgd"]
#: The parts of a model that compute, by name, in the order of the forward pass.
Blocks = list[tuple[str, nn.Module]]

LEARNING_RATES: Mapping[str, float] = {"adam": 1e-3, "adagrad": 0.05, "sgd": 0.1}
_KINDS: dict[str, Callable[..., Optimizer]] = {"adam": Adam, "adagrad": Adagrad, "sgd": SGD}


def choose_optimizer(optimizer: OptimizerName | None, sparse: bool) -> OptimizerName:
    """The name of the optimizer: by default Adam, or Adagrad for tables with sparse gradients.

    Raises:
        ValueError: The optimizer is unknown, or refuses sparse gradients.
    """
    if optimizer is not None and optimizer not in _KINDS:
        raise ValueError(f"`optimizer` must be one of {', '.join(map(repr, _KINDS))}, got {optimizer!r}.")
    if sparse and optimizer == "adam":
        raise ValueError(
            "torch.optim.Adam refuses sparse gradients, and automatic optimization takes one optimizer for the"
            " whole model. HINT: with `sparse=True` use `optimizer='adagrad'` or `'sgd'`."
        )
    return optimizer or ("adagrad" if sparse else "adam")


def make_optimizer(name: OptimizerName, parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """The one optimizer of a model."""
    return _KINDS[name](parameters, lr=lr)


def sampled_cross_entropy(
    states_ND: Tensor, rows: Tensor, targets_N: Tensor, target_log_q_N: Tensor, batch: Mapping[str, Tensor]
) -> Tensor:
    """Cross entropy of each target among itself and the negatives that all share.

    Args:
        states_ND: What scores the words.
        rows: Rows of the output table for the N targets, then for the K negatives: one look-up, so that a table that
            is kept in parts exchanges rows once.
        targets_N: The right words.
        target_log_q_N: Log-probability of each target among the candidates.
        batch: Holds ``negatives`` (K,) and ``negative_log_q`` (K,).

    Returns:
        The mean over the targets.
    """
    negatives_K = batch["negatives"]
    target_rows_ND, negative_rows_KD = rows.split([len(targets_N), len(negatives_K)])
    target_logits_N = (states_ND * target_rows_ND).sum(-1) - target_log_q_N
    negative_logits_NK = states_ND @ negative_rows_KD.T - batch["negative_log_q"]
    # A negative that happens to be the target is no negative.
    hits_NK = targets_N[:, None] == negatives_K
    logits = torch.cat([target_logits_N[:, None], negative_logits_NK.masked_fill(hits_NK, -torch.inf)], dim=1)
    return F.cross_entropy(logits, torch.zeros_like(targets_N))


class Recurrent(nn.LSTM):
    """An LSTM over (B, T, width) that returns its states and nothing else."""

    def __init__(self, width: int, hidden: int, layers: int = 1, *, dropout: float = 0.0, **kwargs: int) -> None:
        super().__init__(
            width,
            hidden,
            layers,
            batch_first=True,
            dropout=dropout if layers > 1 else 0.0,
            **kwargs,
        )

    def forward(self, inputs_BTD: Tensor) -> Tensor:  # type: ignore[override]
        """States of all positions, each sequence starting from zeros."""
        states: Tensor
        states, _ = super().forward(inputs_BTD)
        return states
