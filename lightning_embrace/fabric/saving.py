"""What Fabric saves and loads: whole tables and whole optimizer states, as ddp has them."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_embrace.checkpoint.optimizer_state import shard_optimizer, shard_optimizer_state
from lightning_embrace.fabric.steps import SteppingModule
from lightning_embrace.mixin import Base
from lightning_embrace.session import Session


class SavingMixin(Base):
    """State dicts of modules and optimizers that were set up, and of others."""

    _session: Session | None

    def full_state_dict(self) -> dict[str, Any]:
        """The module's state dict with whole tables on every rank. Collective: call it on all ranks.

        Returns:
            The state dict that plain training would have.
        """
        if self._session is None:
            raise RuntimeError("No module has been set up: call fabric.setup(module, optimizer) first.")
        return self._session.full_state_dict(to_all=True)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """What Fabric saves: whole tables on rank 0. Collective."""
        if isinstance(module, SteppingModule) and self._session is not None:
            return self._session.full_state_dict()
        return module.state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads whole tables, each rank its columns. Call it on all ranks."""
        (module.module if isinstance(module, SteppingModule) else module).load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What Fabric saves: whole table states on rank 0. Collective."""
        if self._session is None:
            return optimizer.state_dict()
        return self._session.full_optimizer_state(optimizer)

    def _take_columns(self, optimizer: Optimizer) -> None:
        """Of whole states that the optimizer has, and of those that are loaded into it, this rank's columns remain."""
        assert self._session is not None
        shard_optimizer(self._session.tables, optimizer)
        optimizer.register_load_state_dict_pre_hook(partial(_columns, self._session))


def _columns(session: Session, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return shard_optimizer_state(session.tables, optimizer, state_dict)
