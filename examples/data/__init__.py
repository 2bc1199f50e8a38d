"""Data for the examples: word-level text and the negatives of a sampled softmax."""

from examples.data.text import TextDataModule

__all__ = ["TextDataModule"]
