"""Optimizers for dense and row-sparse parameters together."""

from lightning_embrace.optim.adagrad import Adagrad
from lightning_embrace.optim.adam import Adam, AdamW
from lightning_embrace.optim.sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "AdamW"]
