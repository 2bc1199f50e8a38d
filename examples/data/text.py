"""Word-level text as a LightningDataModule."""

import re
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from examples.data.sampling import draw_negatives, log_inclusion
from examples.data.vocabulary import Vocabulary

Batch = dict[str, Tensor]


def default_text() -> str:
    """The reference topics that ``help()`` shows: half a megabyte of English that every Python brings along."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


class Windows(Dataset[tuple[int, Tensor]]):
    """Consecutive stretches of ``length`` tokens, each with the token that follows it.

    Args:
        tokens: The ids of a text.
        length: Tokens per window; what is left over at the end is dropped.
    """

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        """Number of whole windows."""
        return max(0, (len(self.tokens) - 1) // self.length)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        """The index, from which the negatives are seeded, and ``length + 1`` tokens."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.length
        return index, self.tokens[start : start + self.length + 1]


class Collate:
    """Makes a batch of windows, and draws its negatives when asked to.

    Negatives come with the batch because whoever exchanges embedding rows ahead of time must see every id that a step
    looks up before the step starts. They are a function of the seed and of the windows in the batch: neither the rank,
    nor the number of loader workers, nor a resumed run changes them.

    Args:
        vocab_size: Number of words.
        negatives: Draws per batch; 0 draws none.
        seed: Seed of the draws.
    """

    def __init__(self, vocab_size: int, negatives: int = 0, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.negatives = negatives
        self.seed = seed

    def __call__(self, samples: list[tuple[int, Tensor]]) -> Batch:
        """Batch ``samples``: ``inputs`` and ``targets`` (B, T), and the candidates of a sampled softmax."""
        windows = torch.stack([window for _, window in samples])
        batch = {"inputs": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}
        if self.negatives:
            indices = ",".join(str(index) for index, _ in samples)
            generator = torch.Generator().manual_seed(crc32(indices.encode(), self.seed))
            drawn = draw_negatives(self.vocab_size, self.negatives, generator)
            batch["negatives"] = drawn
            # The sampler's own probabilities travel with its samples, so a model cannot correct by the wrong ones.
            batch["negative_log_q"] = log_inclusion(drawn, self.vocab_size, self.negatives)
            batch["target_log_q"] = log_inclusion(batch["targets"], self.vocab_size, self.negatives)
        return batch


class TextDataModule(LightningDataModule):
    """Word-level text in windows of equal length, in a train part and, at the end of the text, a validation part.

    Args:
        text: Path of a UTF-8 text; without one, the help topics of the Python standard library.
        sequence_length: Tokens per sample.
        batch_size: Samples per batch and rank.
        negatives: Draws per batch for a sampled softmax, 0 for a full one.
        min_count: Words seen less often are unknown.
        max_vocab: Largest vocabulary, ``<unk>`` included.
        pattern: Regular expression of a word. The default takes what stands between white space, as prepared corpora
            (WikiText, the 1-billion-word benchmark) have it; ``\\w+|[^\\w\\s]`` splits punctuation off.
        val_fraction: Part of the text that is held out.
        num_workers: Processes that load batches.
        seed: Seed of the order of samples (one process) and of the negatives.
    """

    def __init__(
        self,
        text: str | None = None,
        sequence_length: int = 20,
        batch_size: int = 16,
        negatives: int = 0,
        min_count: int = 1,
        max_vocab: int | None = None,
        pattern: str = r"\S+",
        val_fraction: float = 0.1,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 0.0 < val_fraction < 1.0:
            raise ValueError(f"`val_fraction` must lie between 0 and 1, got {val_fraction}.")
        self.save_hyperparameters()
        self.text = text
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.negatives = negatives
        self.min_count = min_count
        self.max_vocab = max_vocab
        self.pattern = pattern
        self.val_fraction = val_fraction
        self.num_workers = num_workers
        self.seed = seed

    @cached_property
    def _words(self) -> list[str]:
        text = default_text() if self.text is None else Path(self.text).read_text(encoding="utf-8")
        return re.findall(self.pattern, text)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the whole text, as language-model corpora define theirs."""
        return Vocabulary.build(self._words, self.min_count, self.max_vocab)

    @property
    def vocab_size(self) -> int:
        """Number of words, ``<unk>`` included; known before ``setup`` so that a model can be built from it."""
        return len(self.vocabulary)

    @property
    def num_tokens(self) -> int:
        """Number of words in the text."""
        return len(self._words)

    @cached_property
    def _parts(self) -> tuple[Windows, Windows]:
        tokens = self.vocabulary.encode(self._words)
        cut = int(len(tokens) * (1.0 - self.val_fraction))
        parts = Windows(tokens[:cut], self.sequence_length), Windows(tokens[cut:], self.sequence_length)
        if len(parts[0]) < self.batch_size or not len(parts[1]):
            raise ValueError(
                f"{self.text or 'the default text'} has {len(tokens)} words: {len(parts[0])} training and"
                f" {len(parts[1])} validation windows of {self.sequence_length}. One batch needs {self.batch_size}."
                " HINT: give a longer text, or lower `sequence_length` or `batch_size`."
            )
        return parts

    def setup(self, stage: str | None = None) -> None:
        """Read the text, so that a text that is too short raises before training starts."""
        _ = self._parts

    def _loader(self, part: Windows, **kwargs: Any) -> "DataLoader[tuple[int, Tensor]]":
        return DataLoader(
            part,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=Collate(self.vocab_size, self.negatives, self.seed),
            **kwargs,
        )

    def train_dataloader(self) -> "DataLoader[tuple[int, Tensor]]":
        """Shuffled windows of the train part, whole batches only."""
        order = torch.Generator().manual_seed(self.seed)
        return self._loader(self._parts[0], shuffle=True, drop_last=True, generator=order)

    def val_dataloader(self) -> "DataLoader[tuple[int, Tensor]]":
        """The validation part in order."""
        return self._loader(self._parts[1])
