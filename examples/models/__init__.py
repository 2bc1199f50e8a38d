"""Ordinary LightningModules: nothing in here knows the strategy that trains it."""

from examples.models.bert import Bert
from examples.models.gnmt import GNMT
from examples.models.gpt import GPT
from examples.models.lm import LanguageModel
from examples.models.transformer import Transformer

__all__ = ["GNMT", "GPT", "Bert", "LanguageModel", "Transformer"]
