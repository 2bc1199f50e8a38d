"""The optimizers that are known by name: what holds for them need not hold for a subclass."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from lightning_embrace.optim.adagrad import Adagrad
from lightning_embrace.optim.adam import Adam, AdamW
from lightning_embrace.optim.sgd import SGD

#: this package's optimizers: row by row on sparse gradients
ROW_SPARSE: frozenset[type[Optimizer]] = frozenset({SGD, Adam, AdamW, Adagrad})

#: optimizers that treat every element by itself: on shards they do what they do on the whole
ELEMENTWISE: frozenset[type[Optimizer]] = ROW_SPARSE | {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.ASGD,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SparseAdam,
}
