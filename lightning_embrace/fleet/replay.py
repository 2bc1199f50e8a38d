"""Training loaders without a state of their own go on amid an epoch all the same: the epoch is begun once more."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from lightning_embrace.checkpoint.random_states import random_states, set_random_states
from lightning_embrace.namespaces import Namespace

_WARNING = "You're resuming from a checkpoint that ended before the epoch ended and your dataloader is not resumable"
_CPU = torch.device("cpu")


class Replay:
    """Remembers how an epoch's batches began, and begins them again so.

    Where a loader cannot say how far it was, Lightning goes on with an epoch's first batches. Here they are loaded once
    more and left out: in the order, and by loaders' processes with the seeds, that the random numbers at the epoch's
    beginning gave.

    Args:
        namespace: Of Lightning.
    """

    def __init__(self, namespace: Namespace) -> None:
        self._combined = namespace.get("utilities.combined_loader.CombinedLoader")
        self._stateful = namespace.get_fabric("utilities.types._Stateful")
        self._began: dict[str, Any] | None = None
        self._pending: dict[str, Any] | None = None

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state(self, trainer: Any) -> dict[str, Any]:
        """What goes on amid the epoch.

        Args:
            trainer: In a fit.

        Returns:
            Nothing at the end of an epoch: the next one begins by itself; nor where loaders have states.
        """
        batches = trainer.fit_loop.epoch_loop.batch_progress
        if self._began is None or batches.is_last_batch:
            return {}
        return {"began": self._began, "batches": int(batches.current.ready)}

    def load(self, state: dict[str, Any]) -> None:
        """The next iterator is that of an epoch of which some batches have been trained on."""
        self._pending = state
        warnings.filterwarnings("ignore", message=_WARNING)

    # ---- loaders -----------------------------------------------------------------------------------------------------

    def over(self, loaders: Any) -> Any:
        """What Lightning makes of training loaders, but that it can begin in the middle.

        Args:
            loaders: A loader, or a collection of them, or a CombinedLoader.
        """
        combined = loaders if isinstance(loaders, self._combined) else self._combined(loaders, "max_size_cycle")
        kind = type(combined)
        combined.__class__ = type(kind.__name__, (kind,), {"__iter__": lambda own: self._iterate(own, kind.__iter__)})
        return combined

    def over_hook(self, owner: Any) -> None:
        """The same for what a module or a datamodule gives when Lightning asks for it.

        Args:
            owner: Has ``train_dataloader``.
        """
        hook = owner.train_dataloader

        def train_dataloader() -> Any:
            return self.over(hook())

        vars(owner)["train_dataloader"] = train_dataloader

    def _iterate(self, combined: Any, begin: Callable[[Any], Any]) -> Any:
        state, self._pending = self._pending, None
        self._began = None
        if any(isinstance(loader, self._stateful) for loader in combined.flattened):
            return begin(combined)  # Lightning has told them where to go on
        now = random_states(_CPU)
        if not state:
            self._began = now
            return begin(combined)
        self._began = state["began"]
        set_random_states(state["began"], _CPU)
        begin(combined)
        for _ in range(state["batches"]):
            next(combined)
        set_random_states(now, _CPU)
        return combined
