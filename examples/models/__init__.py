"""Ordinary LightningModules: nothing in here knows the strategy that trains it."""

from examples.models.lm import LanguageModel

__all__ = ["LanguageModel"]
