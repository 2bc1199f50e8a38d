"""Lightning's gradient clipping, for parameters of which each rank holds some columns."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from torch.optim import Optimizer

from lightning_embrace.mixin import Base
from lightning_embrace.namespaces import Namespace
from lightning_embrace.optim.clipping import clip_by_norm, clip_by_value
from lightning_embrace.session import Session

_METHODS = ("clip_grad_by_norm", "clip_grad_by_value")


class ClippingMixin(Base):
    """Puts our clipping in the place of the precision plugin's while tables are sharded."""

    namespace: ClassVar[Namespace]

    def _take_clipping(self, session: Session) -> None:
        plugin = self.precision_plugin
        base = self.namespace.get("plugins.precision.Precision")
        for name, ours in zip(_METHODS, (_by_norm, _by_value)):
            if getattr(type(plugin), name) is getattr(base, name):  # else the user knows better
                setattr(plugin, name, partial(ours, plugin, session))

    def _give_clipping_back(self) -> None:
        for name in _METHODS:
            vars(self.precision_plugin).pop(name, None)


def _by_norm(plugin: Any, session: Session, optimizer: Optimizer, clip_val: float) -> None:
    sharded = {id(t.parameter) for t in session.tables}
    clip_by_norm(session.comm, plugin.main_params(optimizer), sharded, float(clip_val))


def _by_value(plugin: Any, session: Session, optimizer: Optimizer, clip_val: float) -> None:
    clip_by_value(plugin.main_params(optimizer), float(clip_val))
