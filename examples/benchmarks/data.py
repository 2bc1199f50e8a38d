"""Batches for the benchmark: a batch is a pure function of the source of its ids and of (seed, rank, step).

Every peer that trains on the same source and seed sees the same batches, whatever loads them and in which order.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from examples.data.sampling import draw_negatives, log_inclusion
from examples.data.text import default_text
from examples.data.vocabulary import Vocabulary
from examples.models.registry import BatchSpec

Batch = dict[str, Tensor]

#: Where Debian's package dict-gcide puts a dictionary of English: 40 MB of text with a large vocabulary.
GCIDE = Path("/usr/share/dictd/gcide.dict.dz")
_MASKED = 0.15  # of the words, as published; of these 80 % are hidden, 10 % are replaced, 10 % stay


class Source(Protocol):
    """Where ids come from. Ids count from the most frequent word, which the sampler of negatives relies on."""

    #: what a table says of it
    name: str

    def sequences(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Ids (count, length), int64."""
        ...


class Zipf:
    """Independent ids with probability ``(k + 1) ** -exponent``.

    Args:
        words: Number of ids.
        exponent: 0 is uniform; about 1 is what words of a text have.
    """

    def __init__(self, words: int, exponent: float) -> None:
        if exponent < 0:
            raise ValueError(f"`exponent` must not be negative, got {exponent}.")
        self.name = f"Zipf ids, exponent {exponent:g}"
        weights = torch.arange(1, words + 1, dtype=torch.float64).pow(-exponent)
        self._cumulative = weights.cumsum(0) / weights.sum()

    def sequences(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Ids (count, length), int64."""
        u = torch.rand(count, length, dtype=torch.float64, generator=generator)
        # The last sum may be a rounding below one.
        return torch.searchsorted(self._cumulative, u, right=True).clamp_(max=len(self._cumulative) - 1)


class Text:
    """Stretches of a text, which may overlap.

    Args:
        tokens: Its ids.
        words: Number of ids that the vocabulary has room for.
        name: What a table says of it.
    """

    def __init__(self, tokens: Tensor, words: int, name: str) -> None:
        self.tokens, self.words, self.name = tokens, words, name

    @classmethod
    def encode(cls, text: str, words: int, name: str = "text") -> Text:
        """Takes for a word what stands between white space; the rarest become unknown where there are too many."""
        tokens = re.findall(r"\S+", text)
        vocabulary = Vocabulary.build(tokens, max_size=words)
        stated = f"{name}, {len(tokens):,} words, {len(vocabulary):,} different"
        return cls(vocabulary.encode(tokens), words, stated)

    def save(self, file: Path) -> None:
        """Keeps the ids: encoding a large text takes longer than a benchmark, and every rank would have to."""
        torch.save({"tokens": self.tokens, "words": self.words, "name": self.name}, file)

    @classmethod
    def load(cls, file: Path) -> Text:
        """What :meth:`save` kept."""
        return cls(**torch.load(file, weights_only=True))

    def sequences(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Ids (count, length), int64."""
        if len(self.tokens) < length:
            raise ValueError(f"The text has {len(self.tokens)} words, and one sequence needs {length}.")
        starts = torch.randint(len(self.tokens) - length + 1, (count, 1), generator=generator)
        return self.tokens[starts + torch.arange(length)]


def read_text(path: str = "") -> str:
    """A text: the default one (empty), ``"gcide"`` (Debian's package dict-gcide), or a file, also one with gzip.

    Raises:
        FileNotFoundError: There is no such file; for ``"gcide"`` the message says what to install.
    """
    if not path:
        return default_text()
    file = GCIDE if path == "gcide" else Path(path)
    if not file.exists():
        hint = " HINT: it comes with `apt-get install dict-gcide`." if path == "gcide" else ""
        raise FileNotFoundError(f"There is no text {file}.{hint}")
    data = file.read_bytes()
    return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8", errors="replace")


def words_of(spec: BatchSpec) -> int:
    """Number of ordinary words: the vocabulary without the special one."""
    return spec.vocabulary - (spec.task != "language")


def make_source(spec: BatchSpec, exponent: float = 0.0, text: str = "") -> Source:
    """The source of a model's ids.

    Args:
        spec: Says how many words there are.
        exponent: Of Zipf ids; 0 takes real text.
        text: As in :func:`read_text`, or a file ``*.pt`` that :meth:`Text.save` wrote for as many words.

    Returns:
        The source.

    Raises:
        ValueError: The saved text was encoded for a larger vocabulary.
    """
    words = words_of(spec)
    if exponent:
        return Zipf(words, exponent)
    if not text.endswith(".pt"):
        return Text.encode(read_text(text), words, text or "help topics of Python")
    saved = Text.load(Path(text))
    if saved.words > words:
        raise ValueError(f"{text} was encoded with room for {saved.words} words, and the model has {words}.")
    return saved


def make_batch(spec: BatchSpec, source: Source, seed: int, rank: int, step: int) -> Batch:
    """The batch of one rank and step.

    Args:
        spec: What it looks like.
        source: Of its ids.
        seed: Of the run.
        rank: Ranks have different batches.
        step: So have steps.

    Returns:
        Entries as the model's docstring has them.
    """
    digest = blake2b(f"{seed},{rank},{step}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    make = {"language": _language, "translation": _translation, "masked": _masked}[spec.task]
    batch = make(spec, source, generator)
    if spec.negatives:
        drawn = draw_negatives(spec.vocabulary, spec.negatives, generator)
        batch["negatives"] = drawn
        batch["negative_log_q"] = log_inclusion(drawn, spec.vocabulary, spec.negatives)
        batch["target_log_q"] = log_inclusion(batch["targets"], spec.vocabulary, spec.negatives)
    return batch


def _language(spec: BatchSpec, source: Source, generator: torch.Generator) -> Batch:
    windows = source.sequences(spec.batch, spec.length + 1, generator)
    return {"inputs": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}


def _translation(spec: BatchSpec, source: Source, generator: torch.Generator) -> Batch:
    """A text's continuation stands for its translation: as many words, as frequent, in the same vocabulary."""
    windows = source.sequences(spec.batch, 2 * spec.length, generator)
    left, right = (half.contiguous() for half in windows.chunk(2, dim=1))
    begin = torch.full((spec.batch, 1), spec.vocabulary - 1)
    return {"source": left, "target_inputs": torch.cat([begin, right[:, :-1]], dim=1), "target_outputs": right}


def _masked(spec: BatchSpec, source: Source, generator: torch.Generator) -> Batch:
    """Equally many masked words in every batch, so that the mean over ranks is the mean over words."""
    words = source.sequences(spec.batch, spec.length, generator)
    flat = words.flatten()
    count = max(1, round(_MASKED * flat.numel()))
    positions = torch.randperm(flat.numel(), generator=generator)[:count].sort().values
    fate = torch.rand(count, generator=generator)
    random = torch.randint(words_of(spec), (count,), generator=generator)
    targets = flat[positions]
    shown = torch.where(fate < 0.8, spec.vocabulary - 1, torch.where(fate < 0.9, random, targets))
    inputs = flat.clone()
    inputs[positions] = shown
    return {"inputs": inputs.view_as(words), "positions": positions, "targets": targets}


def looked_up(spec: BatchSpec, batch: Batch) -> dict[str, Tensor]:
    """By table, all ids that a training step on ``batch`` looks up in it; fit for ``lookahead=``."""
    return {table: torch.cat([batch[key].flatten() for key in keys]) for table, keys in spec.lookups.items()}


class StepBatches(Dataset[Batch]):
    """The batches of one rank, by step.

    Args:
        spec: What they look like.
        source: Of their ids.
        rank: Whose.
        steps: How many.
        seed: Of the run.
    """

    def __init__(self, spec: BatchSpec, source: Source, rank: int, steps: int, seed: int = 0) -> None:
        self.spec, self.source, self.rank, self.steps, self.seed = spec, source, rank, steps, seed

    def __len__(self) -> int:
        """Number of steps."""
        return self.steps

    def __getitem__(self, step: int) -> Batch:
        """The batch of a step."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of {self.steps}")
        return make_batch(self.spec, self.source, self.seed, self.rank, step)

    def __iter__(self) -> Iterator[Batch]:
        """All batches in order."""
        return (self[step] for step in range(self.steps))


class BenchmarkData(LightningDataModule):
    """The batches of each rank for a Trainer, which must have ``use_distributed_sampler=False``: ranks differ already.

    Args:
        spec: What they look like.
        steps: How many.
        exponent: Of Zipf ids; 0 takes real text.
        text: As in :func:`read_text`.
        seed: Of the run.
    """

    def __init__(self, spec: BatchSpec, steps: int, exponent: float = 0.0, text: str = "", seed: int = 0) -> None:
        super().__init__()
        self.spec, self.steps, self.seed = spec, steps, seed
        self.source = make_source(spec, exponent, text)

    def train_dataloader(self) -> DataLoader[Batch]:
        """This rank's batches in order."""
        assert self.trainer is not None
        data = StepBatches(self.spec, self.source, self.trainer.global_rank, self.steps, self.seed)
        return DataLoader(data, batch_size=None, shuffle=False)
