"""Makes a session's steps out of the forward and backward passes of a loop that the user wrote. Knows no Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_embrace.fabric.batches import Batches
from lightning_embrace.foresight import Known
from lightning_embrace.lookahead.source import Source
from lightning_embrace.session import Session


class Phase(Enum):
    """Where in a step the loop is."""

    CLEAN = auto()
    #: forward passes with gradients, of which backward is to come
    FORWARD = auto()
    #: gradients of this rank alone are there
    ACCUMULATED = auto()
    #: averaged gradients are there, and the optimizer has not stepped
    SYNCHRONISED = auto()


class Steps:
    """The steps of one module.

    As under ``ddp``, a forward pass with gradients begins a step, backward synchronises, and the optimizer ends it.
    Several forward passes may come before a backward pass, and several of both before the optimizer.

    Args:
        model: The module.
        session: Its session.
        source: Foresees look-ups.
        batches: What the loaders hand out.
        reporting: Tells the other ranks of an exception inside.
    """

    def __init__(
        self,
        model: nn.Module,
        session: Session,
        source: Source,
        batches: Batches,
        reporting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._session, self._source, self._batches, self._reporting = session, source, batches, reporting
        #: backward passes average gradients; else they accumulate
        self.synchronise = True
        self._has_buffers = next(model.buffers(), None) is not None
        self._phase = Phase.CLEAN

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A forward pass of the module. Collective where it has gradients, and with buffers at any time."""
        rows = self._session.rows
        with self._reporting():
            if torch.is_grad_enabled() and self._phase is not Phase.FORWARD:
                self._session.begin_training_step(self._known())
                self._phase = Phase.FORWARD
            else:
                self._batches.take()  # of these batches nothing is told
                self._sync_buffers()
            rows.in_step = True
            yield
            if self._phase is Phase.FORWARD:
                self._session.end_training_step(backward_follows=True)
            rows.in_step = self._phase is Phase.FORWARD  # a loss is computed from here to backward

    def backward(self, run: Callable[[], object]) -> None:
        """A backward pass. Collective, unless it belongs to no forward pass of the module.

        Args:
            run: Runs it.
        """
        with self._reporting():
            if self._phase is Phase.CLEAN:
                run()
                return
            if self._phase is Phase.FORWARD:
                self._looked_up()
            self._session.rows.in_step = False
            self._session.before_backward(self.synchronise)
            run()
            self._session.after_backward(self.synchronise)
            self._phase = Phase.SYNCHRONISED if self.synchronise else Phase.ACCUMULATED

    def watch(self, optimizer: Optimizer) -> None:
        """Learns from now on when an optimizer steps."""
        self._session.watch(optimizer)
        optimizer.register_step_pre_hook(lambda *_: self._before_step())
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    def _before_step(self) -> None:
        # nobody knows what the loop has done to the gradients: what was sent early must not move
        if self._session.foresight is not None:
            self._session.foresight.check_early_rows()

    def _after_step(self) -> None:
        if (
            self._phase is not Phase.FORWARD
        ):  # the loop is a forward pass ahead; its backward pass will say what is stale
            self._phase = Phase.CLEAN

    def _sync_buffers(self) -> None:
        """Gives every rank rank 0's buffers, as ddp does before every forward pass, but not while accumulating."""
        if self._has_buffers and self.synchronise:
            self._session.rows.meet()  # look-ups of other ranks come first
            self._session.begin_validation()

    def _known(self) -> Known:
        """What this rank tells the others of its next batch."""
        pair, tables = self._batches.take(), self._session.tables
        self._source.note(pair.current)
        ids: list[Tensor | None] = [None for _ in tables]
        if pair.known:
            foreseen = self._source.ids(pair.successor)
            ids = [None if (i := foreseen[t.index]) is None else i.to(t.parameter.device) for t in tables]
        self._session.record_lookups(self._source.learning)
        return Known(ids)

    def _looked_up(self) -> None:
        for index, foreseen in self._session.foreseen().items():
            self._source.checked(index, foreseen)
        if self._source.learning:
            self._source.observe(self._session.looked_up())


class SteppingModule(nn.Module):
    """A module whose forward passes are steps; in the place where ``ddp`` has ``DistributedDataParallel``.

    Args:
        module: The user's module.
        steps: Its steps.
    """

    def __init__(self, module: nn.Module, steps: Steps) -> None:
        super().__init__()
        self.module = module
        self.steps = steps

    # torch.compile goes on inside, where the user's code is
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *args: object, **kwargs: object) -> object:
        """The module's own, as a part of a step."""
        with self.steps.forward():
            return self.module(*args, **kwargs)
