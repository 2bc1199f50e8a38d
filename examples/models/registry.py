"""The four models of the benchmark by name, in two sizes, with what their batches hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning.pytorch import LightningModule
from torch import nn

from examples.models.bert import Bert
from examples.models.common import OptimizerName
from examples.models.gnmt import GNMT
from examples.models.lm import LanguageModel
from examples.models.transformer import Transformer

SizeName = Literal["small", "paper"]
Task = Literal["language", "translation", "masked"]


@dataclass(frozen=True)
class BatchSpec:
    """What a batch of one rank and step looks like.

    Attributes:
        task: ``"language"``: the next word; ``"translation"``: a sequence from another; ``"masked"``: missing words.
        vocabulary: Rows of each table. All ids are below; the last one is a special word (mask, begin), except in
            ``"language"``, which has none.
        batch: Sequences.
        length: Tokens per sequence; in a translation, of either side.
        negatives: Draws of a sampled softmax; 0: no softmax is sampled.
        lookups: By table, the entries of a batch that are looked up in it.
    """

    task: Task
    vocabulary: int
    batch: int
    length: int
    negatives: int
    lookups: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class _Size:
    vocabulary: int
    dim: int
    batch: int
    length: int
    negatives: int = 0
    #: arguments that no caller of the benchmark chooses
    fixed: Mapping[str, Any] = field(default_factory=dict)
    #: width of the LSTM, as a multiple of ``dim``
    hidden_per_dim: int | None = None


@dataclass(frozen=True)
class _Entry:
    model: Callable[..., LightningModule]
    task: Task
    lookups: Mapping[str, tuple[str, ...]]
    #: the tables' share of the parameters, as published
    share: float
    sizes: Mapping[str, _Size]


MODELS: dict[str, _Entry] = {
    "lm": _Entry(
        LanguageModel,
        "language",
        LanguageModel.lookups,
        0.97,
        {
            "small": _Size(100_000, 128, 16, 32, 512, {"layers": 2}, hidden_per_dim=2),
            "paper": _Size(793_471, 512, 128, 20, 8192, {"layers": 2}, hidden_per_dim=4),
        },
    ),
    "gnmt": _Entry(
        GNMT,
        "translation",
        GNMT.lookups,
        0.34,
        {"small": _Size(8_080, 256, 16, 32), "paper": _Size(32_320, 1024, 128, 32)},
    ),
    "transformer": _Entry(
        Transformer,
        "translation",
        Transformer.lookups,
        0.25,
        {"small": _Size(4_210, 256, 16, 32, fixed={"layers": 3}), "paper": _Size(33_708, 1024, 128, 32)},
    ),
    "bert": _Entry(
        Bert,
        "masked",
        Bert.lookups,
        0.21,
        {
            "small": _Size(5_150, 256, 4, 128, 512, {"layers": 6, "max_length": 128}),
            "paper": _Size(30_522, 768, 32, 128, 4096, {"layers": 12, "max_length": 512}),
        },
    ),
}


def _size(name: str, size: str) -> _Size:
    if name not in MODELS:
        raise ValueError(f"There is no model {name!r}. Write one of {', '.join(map(repr, MODELS))}.")
    sizes = MODELS[name].sizes
    if size not in sizes:
        raise ValueError(f"There is no size {size!r}. Write one of {', '.join(map(repr, sizes))}.")
    return sizes[size]


def build(
    name: str,
    size: SizeName = "small",
    vocabulary: int | None = None,
    dim: int | None = None,
    sparse: bool = False,
    optimizer: OptimizerName | None = None,
    lr: float | None = None,
    **arguments: Any,
) -> LightningModule:
    """Make a model; seed torch before, for equal weights on every rank.

    The tables' share of the parameters is the published one as long as ``vocabulary`` and ``dim`` are the size's own
    or keep their ratio; :func:`embedding_share` tells what it is.

    Args:
        name: ``"lm"``, ``"gnmt"``, ``"transformer"`` or ``"bert"``.
        size: ``"paper"``, or ``"small"``: the same shares in a size that CPUs train.
        vocabulary: Rows of each table, if not the size's.
        dim: Columns of each table, if not the size's.
        sparse: Whether the tables have sparse gradients.
        optimizer: ``"sgd"``, ``"adam"`` or ``"adagrad"``; by default Adam, or Adagrad with ``sparse``.
        lr: Learning rate; by default one that suits the optimizer.
        arguments: More arguments of the model's class.

    Returns:
        An ordinary LightningModule, whose ``blocks()`` are its parts that compute.

    Raises:
        ValueError: The model or the size is unknown, or the optimizer does not go with ``sparse``.
    """
    chosen = _size(name, size)
    dim = dim or chosen.dim
    fixed = dict(chosen.fixed)
    if chosen.hidden_per_dim is not None:
        fixed["hidden"] = chosen.hidden_per_dim * dim
    return MODELS[name].model(
        vocab_size=vocabulary or chosen.vocabulary,
        dim=dim,
        **{"sparse": sparse, "optimizer": optimizer, "lr": lr, **fixed, **arguments},
    )


def batch_spec(
    name: str,
    size: SizeName = "small",
    vocabulary: int | None = None,
    batch: int | None = None,
    length: int | None = None,
    negatives: int | None = None,
) -> BatchSpec:
    """What the batches of a model must look like; arguments left out take the size's own.

    Args:
        name: As in :func:`build`.
        size: As in :func:`build`.
        vocabulary: As in :func:`build`.
        batch: Sequences per rank.
        length: Tokens per sequence.
        negatives: Draws of the sampled softmax, where the model has one.

    Returns:
        The specification.

    Raises:
        ValueError: The model or the size is unknown.
    """
    chosen, entry = _size(name, size), MODELS[name]
    return BatchSpec(
        entry.task,
        vocabulary or chosen.vocabulary,
        batch or chosen.batch,
        length or chosen.length,
        (negatives or chosen.negatives) if chosen.negatives else 0,
        entry.lookups,
    )


def embedding_share(model: nn.Module) -> float:
    """The part of all parameters that is in look-up tables."""
    tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    return sum(tables.values()) / sum(p.numel() for p in model.parameters())
