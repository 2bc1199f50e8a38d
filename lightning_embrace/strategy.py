"""EmbRaceStrategy: the Lightning life cycle, nothing else."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_embrace.announce import AnnouncingMixin
from lightning_embrace.comm.connect import Connection
from lightning_embrace.comm.serve import RowService
from lightning_embrace.comm.traffic import Traffic
from lightning_embrace.config import (
    Communication,
    EmbRaceConfig,
    Lookahead,
    StartMethod,
    StateDictType,
    UnevenLoaders,
    WireDtype,
)
from lightning_embrace.failing import FailingMixin
from lightning_embrace.launch import register_by_start_method
from lightning_embrace.lookahead.ahead import Lookahead as Ahead
from lightning_embrace.lookahead.ahead import Pair
from lightning_embrace.lookahead.reasons import LoaderKind
from lightning_embrace.lookahead.source import Source, make_source
from lightning_embrace.monitor.timeline import Profiled, Recorder, Timeline
from lightning_embrace.namespaces import LIGHTNING, Namespace, shown
from lightning_embrace.opening import OpeningMixin
from lightning_embrace.optim.check import check_optimizers
from lightning_embrace.refusals import check_callbacks, check_model, check_trainer
from lightning_embrace.relaxation import why_disturbed, why_not_relaxed
from lightning_embrace.resuming import ResumingMixin
from lightning_embrace.saving import SavingMixin
from lightning_embrace.schedule.buffers import broadcast_tensors
from lightning_embrace.schedule.order import Name
from lightning_embrace.session import Session
from lightning_embrace.signals import Signals
from lightning_embrace.stopping import StoppingMixin

_TIMEOUT = timedelta(minutes=30)


class EmbRaceMixin(StoppingMixin, ResumingMixin, SavingMixin, AnnouncingMixin, FailingMixin, OpeningMixin):
    """The strategy without its base class, which differs between the two namespaces of Lightning."""

    namespace: ClassVar[Namespace]

    def __init__(
        self,
        *,
        tables: Literal["auto"] | list[str] = "auto",
        schedule: Name = "2d",
        lookahead: Lookahead = "auto",
        wire_dtype: WireDtype | None = None,
        communication: Communication = "torch",
        state_dict_type: StateDictType = "full",
        uneven_loaders: UnevenLoaders = "stop",
        chunk_bytes: int | None = None,
        trace: str | Path | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = _TIMEOUT,
        start_method: StartMethod = "popen",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        self.namespace.take_messages()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.config = EmbRaceConfig.checked(
            tables,
            schedule,
            wire_dtype,
            process_group_backend,
            timeout,
            start_method,
            lookahead,
            uneven_loaders,
            chunk_bytes,
            trace,
            communication,
            state_dict_type,
        )
        self._take_horovod()
        #: payload that this rank has put on the wire; kept from one fit to the next
        self.traffic = Traffic()
        self._num_nodes = 1
        self._connection: Connection | None = None
        self._session: Session | None = None
        self._service: RowService | None = None
        self._synchronise = True
        self._failed = self._stopping = False
        self._signals = Signals()
        self._timeline: Timeline | None = None
        self._recorder: Recorder = Profiled()
        self._stepping = ExitStack()
        self._loader_kind = LoaderKind()
        self._lookahead: Ahead | None = None
        self._source: Source = make_source("off", [], [])
        self._pair = Pair()
        self._blind_because: str | None = None
        self._plan_printed = False
        self._barrier_because: str | None = None
        self._checkpoints: list[str] = []

    # ---- setting up and tearing down -------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Shards the tables, synchronises the initial weights and builds the optimizers."""
        with self._reporting():
            self._set_up(trainer)

    def _set_up(self, trainer: Any) -> None:
        assert self.accelerator is not None and self.model is not None and self._connection is not None
        self._resume_from_nothing()
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == "fit"
        check_model(self.model)
        if fitting:
            check_trainer(trainer, self.precision_plugin, self.namespace)
            if self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        specs = self._find_tables(fitting)
        check_callbacks(trainer.callbacks, specs, self.namespace)
        self._plan_printed = False
        self._connection.open_groups()
        if fitting:
            session = self._open_session(specs)
            self._look_ahead(session, trainer)
            with session.on_trial():
                self.model_to_device()
                self.setup_optimizers(trainer)
                check_optimizers(self.optimizers, specs)
                self._check_saves(session, trainer)
                self._take_callbacks(session, trainer)
            for optimizer in self.optimizers:
                session.watch(optimizer)
            self._relax(session, trainer)
            self._take_precision(session)
        elif specs:
            self._open(self.model, specs, self._connection.communicator)
            self.model_to_device()
        else:
            self.model_to_device()
            states = [*self.model.parameters(), *self.model.buffers()]
            broadcast_tensors(self._connection.communicator, states, "setup")
        self.setup_precision_plugin()
        if fitting:
            for optimizer in self.optimizers:
                self._optimizer_to_device(optimizer)

    def _open_session(self, specs: list[Any]) -> Session:
        assert self._connection is not None and self.model is not None
        communicator = self._traced(self._connection.communicator)
        return self._open(self.model, specs, communicator)

    def _relax(self, session: Session, trainer: Any) -> None:
        self._barrier_because = why_not_relaxed(trainer, self.lightning_module, self.precision_plugin, self.namespace)
        session.relaxed = self._barrier_because is None
        session.disturbed = why_disturbed(trainer, self.lightning_module, self.namespace) is not None

    def teardown(self) -> None:
        """Puts whole tables and optimizer states back, unless training ended with an exception."""
        try:
            if self.world_size == 1 or not self._failed:
                with self._reporting():
                    self._end_in_order()
        finally:
            self._let_tables_go()
            self._let_go()
            self._revert_layer_sync()
            super().teardown()

    def _end_in_order(self) -> None:
        self._let_loaders_go()
        self._give_precision_back()
        if self._session is not None:
            self._gather_copies()
            self._session.unshard(self.optimizers)
        self._give_callbacks_back()
        if self._connection is not None:
            self._write_trace()
            self.barrier("teardown")
            if self._service is not None:
                self._service.stop()
            self._connection.close()
            self._connection = None

    def _revert_layer_sync(self) -> None:
        trainer = getattr(self.lightning_module, "_trainer", None)
        if self._layer_sync and self.model is not None and trainer is not None and trainer.state.fn == "fit":
            self.model = self._layer_sync.revert(self.model)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's training step; its look-ups run as rounds."""
        session = self._session
        if session is None:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        with self._reporting():
            session.begin_training_step(self._known())
            self._told()
            try:
                with self._recorder.span("forward", "compute"):
                    output = super().training_step(*args, **kwargs)
            except StopIteration:  # `training_step(dataloader_iter)` asked for a batch, and there is none
                session.leave_training_step()
                raise
            session.end_training_step(*self._what_follows(self._synchronise))
            self._looked_up()
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's validation step; no look-up needs a partner."""
        with self._evaluating():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's test step."""
        with self._evaluating():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's predict step."""
        with self._evaluating():
            return super().predict_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward with synchronised gradients: hooks that follow it (``on_after_backward``) see the averages."""
        session = self._session
        if session is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        with self._reporting():
            session.before_backward(self._synchronise)
            with self._recorder.span("backward", "compute"):
                self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
            session.heard = self._signals.heard
            session.after_backward(self._synchronise)
            self._step_follows()
            self._stop_if_told(session)
        if self._synchronise:
            self._announce()
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Gradients of the backward passes inside stay local and are exchanged with the next one outside."""
        self._synchronise = False
        try:
            yield
        finally:
            self._synchronise = True

    def on_train_start(self) -> None:
        """Callbacks have what they want to keep by now."""
        super().on_train_start()
        if self._session is not None and self.lightning_module is not None:
            self._relax(self._session, self.lightning_module.trainer)

    def on_validation_start(self) -> None:
        """Every rank validates with rank 0's buffers, as under DDP."""
        if self._session is not None:
            with self._reporting():
                self._session.begin_validation()

    def _before_collective(self) -> None:
        if self._session is not None:
            self._session.rows.meet()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        session = self._session
        with self._reporting():
            if session is None:
                yield
                return
            session.rows.in_step = True
            try:
                yield
            finally:
                session.rows.in_step = False

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Adds ``embrace``, ``embrace_spawn``, ``embrace_fork``, ``embrace_notebook`` and ``embrace_horovod``."""
        register_by_start_method(strategy_registry, cls)
        strategy_registry.register(
            "embrace_horovod",
            cls,
            description="Sparsity-aware hybrid communication, carried by Horovod",
            override=True,
            communication="horovod",
        )

    def __repr__(self) -> str:
        return shown("EmbRaceStrategy", self.namespace)


class EmbRaceStrategy(EmbRaceMixin, ParallelStrategy):
    """Trains with column-sharded embedding tables (AlltoAll) and AllReduce for the rest.

    An unchanged LightningModule trains as under ``ddp``: the same parameters, optimizer state and losses, with fewer
    bytes on the wire. See section 4 of the paper (arXiv 2110.09132).

    Args:
        tables: Which embeddings to shard: ``"auto"`` (large enough to pay), or fnmatch patterns of module names: what
            they match is sharded whatever its size, ``"!name"`` excludes.
        schedule: What travels when, without changing any number (the paper's section 4.2). ``"2d"``: dense blocks go
            on the wire in the order of need and each is waited for by its first reader, and of a table's gradient the
            rows that nobody looks up next travel later; ``"horizontal"`` and ``"vertical"``: one of the two;
            ``"fifo"``: everything in the order in which it comes, waited for at once.
        lookahead: How the next batch's ids are known. ``"auto"``: learned in the first steps, and checked at every
            look-up; ``"off"``; or ``function(batch) -> {table name: ids}``. A wrong look-ahead is slow, never wrong.
        wire_dtype: ``"bf16"`` or ``"fp16"`` halves the bytes of exchanged rows and gradients; ``None`` is exact. Prefer
            ``"bf16"``: ``"fp16"`` has more digits, but gradients below 6e-8 vanish in it and above 65504 overflow.
        communication: What carries the exchanges: ``"torch"`` (gloo, nccl) or ``"horovod"``, which must have been built
            for the installed torch; Lightning and torchmetrics communicate with torch in any case.
        state_dict_type: What ``ModelCheckpoint`` and ``Trainer.save_checkpoint`` write: ``"full"``: one file with whole
            tables, as ``ddp`` writes it; ``"sharded"``: a folder to which every rank writes its part, so that no rank
            needs room for a whole table. Either is loaded whatever is set, by any number of ranks.
        uneven_loaders: Where the ranks' training loaders have unequal numbers of batches: ``"stop"``: all end where the
            first one does, with a warning; ``"raise"``.
        chunk_bytes: How much of a dense block's gradient travels at once; urgent exchanges come in between. ``None``:
            tuned to about 50 ms of the wire, between 64 KiB and 4 MiB.
        trace: A path: what was computed, exchanged and waited for is written there in Chrome's trace format. With
            Horovod, its own timeline is written beside it (``trace.horovod.json``).
        process_group_backend: ``"gloo"`` or ``"nccl"``; default: the device's.
        timeout: How long one exchange may take.
        start_method: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        accelerator: As in Lightning's DDPStrategy.
        parallel_devices: As in Lightning's DDPStrategy.
        cluster_environment: As in Lightning's DDPStrategy.
        checkpoint_io: As in Lightning's DDPStrategy.
        precision_plugin: As in Lightning's DDPStrategy.

    Raises:
        ValueError: An argument has a value that is not allowed.
        MisconfigurationException: ``communication="horovod"``, and Horovod cannot be used here.
    """

    namespace = LIGHTNING
