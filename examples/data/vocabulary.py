"""A word-level vocabulary, most frequent word first."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

UNKNOWN = "<unk>"


@dataclass(frozen=True)
class Vocabulary:
    """Words and their ids.

    Ids follow frequency, most frequent first, because the log-uniform sampler takes an id for a frequency rank.

    Args:
        words: The words by id; one of them is ``<unk>``, the word for everything that is not in the vocabulary.
    """

    words: tuple[str, ...]
    ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the words."""
        object.__setattr__(self, "ids", {word: i for i, word in enumerate(self.words)})
        if UNKNOWN not in self.ids:
            raise ValueError(f"A vocabulary needs the word {UNKNOWN!r}.")

    @classmethod
    def build(cls, tokens: Iterable[str], min_count: int = 1, max_size: int | None = None) -> "Vocabulary":
        """Count words and keep the frequent ones.

        Args:
            tokens: The text, word by word. It may hold ``<unk>`` already, as prepared corpora do.
            min_count: Words seen less often become ``<unk>``.
            max_size: At most this many words, ``<unk>`` included.

        Returns:
            The vocabulary. ``<unk>`` stands where the number of words it replaces puts it.
        """
        if max_size is not None and max_size < 1:
            raise ValueError(f"`max_size` must leave room for {UNKNOWN!r}, got {max_size}.")
        counts = Counter(tokens)
        unknown = counts.pop(UNKNOWN, 0)
        # Ties are broken by the word itself, so that equal texts give equal ids on every rank and machine.
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        kept = [(word, count) for word, count in ranked if count >= min_count]
        if max_size is not None:
            kept = kept[: max_size - 1]
        unknown += sum(count for _, count in ranked[len(kept) :])
        place = sum(count >= unknown for _, count in kept)
        words = [word for word, _ in kept]
        return cls((*words[:place], UNKNOWN, *words[place:]))

    def __len__(self) -> int:
        """Number of words, ``<unk>`` included."""
        return len(self.words)

    def encode(self, tokens: Sequence[str]) -> Tensor:
        """Ids of ``tokens`` (int64)."""
        unknown = self.ids[UNKNOWN]
        return torch.tensor([self.ids.get(token, unknown) for token in tokens], dtype=torch.int64)
