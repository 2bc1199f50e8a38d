"""Updates that arrive after their optimizer's step: applied before anything can read what they change."""

from __future__ import annotations

import threading
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_embrace.monitor.timeline import Recorder
from lightning_embrace.optim.parts import Settings, apply_late, snapshot_group


class Late(Protocol):
    """Gradients on their way: of a dense block, or of a table's delayed rows."""

    parameters: list[nn.Parameter]
    #: the optimizer's step has counted for these parameters: their first part went through it
    counted: bool

    def gradients(self) -> list[Tensor | None]:
        """Waits for them. Views are allowed."""
        ...


class _Entry:
    def __init__(self, late: Late) -> None:
        self.late = late
        self.optimizer: Optimizer | None = None
        self.settings: dict[int, Settings] = {}
        self.begun = False


class PendingUpdates:
    """What is still to be applied, by parameter (the paper's relaxed dependency, section 4.2.2).

    A gradient that is asked for before its optimizer has stepped becomes an ordinary ``grad``. After the step it is
    applied with the settings that the step had. Any thread may ask.

    Args:
        recorder: Gets to know when they are applied.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.RLock()
        #: a late gradient stays in ``grad`` as after an ordinary step, until `zero_grad` would have removed it
        self.keep_gradients = True

    def add(self, late: Late) -> None:
        """Call after backward, with the parameters' ``grad`` as the optimizer's step is to see it."""
        with self._lock:
            entry = _Entry(late)
            for parameter in late.parameters:
                assert id(parameter) not in self._entries, "an update was added before the last one was applied"
                self._entries[id(parameter)] = entry

    def stepped(self, optimizer: Optimizer) -> None:
        """Call after an optimizer's step: its schedulers may change its settings from now on."""
        with self._lock:
            for group in optimizer.param_groups:
                late = [p for p in group["params"] if id(p) in self._entries]
                settings = snapshot_group(group) if late else None
                for parameter in late:
                    entry = self._entries[id(parameter)]
                    if id(parameter) not in entry.settings and settings is not None:
                        entry.optimizer = optimizer
                        entry.settings[id(parameter)] = settings

    def settle(self, parameter: Tensor) -> None:
        """Applies what is pending for a parameter, and for those that arrive with it."""
        if id(parameter) in self._entries:
            with self._lock:
                entry = self._entries.get(id(parameter))
                if entry is not None:
                    self._apply(entry)

    def settle_all(self, counted: bool | None = None) -> None:
        """Applies all that is pending.

        Args:
            counted: Only what is of that kind, see :class:`Late`.
        """
        if self._entries:
            with self._lock:
                for entry in dict.fromkeys(self._entries.values()):
                    if counted is None or entry.late.counted == counted:
                        self._apply(entry)

    def drop(self) -> None:
        """Forgets everything, after a failure."""
        with self._lock:
            self._entries.clear()

    def _apply(self, entry: _Entry) -> None:
        if entry.begun:  # what applies it has read a parameter
            return
        gradients = entry.late.gradients()
        entry.begun = True
        # state that an optimizer makes in inference mode could not be trained with later
        apply = self._recorder.span("late update", "compute")
        with apply, torch.inference_mode(False), torch.no_grad():
            for parameter, gradient in zip(entry.late.parameters, gradients):
                if gradient is None:
                    continue
                settings = entry.settings.get(id(parameter))
                if settings is not None:
                    assert entry.optimizer is not None
                    apply_late(entry.optimizer, parameter, gradient, settings, counted=entry.late.counted)
                if settings is None or self.keep_gradients:
                    _add_gradient(parameter, gradient)
        # only now: other threads look here, without the lock, whether there is anything to wait for
        for parameter in entry.late.parameters:
            self._entries.pop(id(parameter), None)


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.clone()
    elif parameter.grad.is_sparse:
        parameter.grad = (parameter.grad + gradient).coalesce()
    else:
        parameter.grad.add_(gradient)
