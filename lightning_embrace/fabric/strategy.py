"""The strategy of Fabric: the life cycle of a loop that the user wrote."""

# To type checkers, the parts that both strategies share have the Trainer's base class, whose methods differ.
# mypy: disable-error-code="override,arg-type"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_embrace.comm.connect import Connection
from lightning_embrace.comm.serve import RowService
from lightning_embrace.comm.traffic import Traffic
from lightning_embrace.config import EmbRaceConfig, Lookahead, StartMethod, WireDtype
from lightning_embrace.fabric.batches import Batches
from lightning_embrace.fabric.clipping import ClippingMixin
from lightning_embrace.fabric.ending import EndingMixin
from lightning_embrace.fabric.launch import make_launcher
from lightning_embrace.fabric.saving import SavingMixin
from lightning_embrace.fabric.steps import SteppingModule, Steps
from lightning_embrace.launch import register_by_start_method
from lightning_embrace.lookahead.source import make_source
from lightning_embrace.monitor.timeline import Profiled
from lightning_embrace.namespaces import Namespace, other
from lightning_embrace.opening import OpeningMixin
from lightning_embrace.optim.check import check_optimizers
from lightning_embrace.plan import print_plan
from lightning_embrace.refusals import check_model
from lightning_embrace.schedule.order import Name, Schedule
from lightning_embrace.tables.find import find_tables

_TIMEOUT = timedelta(minutes=30)
_MODULE = {"lightning.pytorch": "lightning_embrace.fabric", "pytorch_lightning": "lightning_embrace.lightning_fabric"}


class EmbRaceFabricMixin(SavingMixin, ClippingMixin, EndingMixin, OpeningMixin):
    """The strategy without its base class, which differs between the two namespaces of Lightning."""

    namespace: ClassVar[Namespace]

    def __init__(
        self,
        *,
        tables: Literal["auto"] | list[str] = "auto",
        schedule: Name = "2d",
        lookahead: Lookahead = "auto",
        wire_dtype: WireDtype | None = None,
        chunk_bytes: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = _TIMEOUT,
        start_method: StartMethod = "popen",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,  # type: ignore[call-arg]
        )
        self.config = EmbRaceConfig.checked(
            tables,
            schedule,
            wire_dtype,
            process_group_backend,
            timeout,
            start_method,
            lookahead,
            "stop",
            chunk_bytes,
            None,
        )
        #: payload that this rank has put on the wire
        self.traffic = Traffic()
        self._num_nodes = 1
        self._connection: Connection | None = None
        self._session = None
        self._service: RowService | None = None
        self._failed = self._stopping = False
        self._recorder = Profiled()
        self._batches = Batches(self._warn)
        self._steps: Steps | None = None
        self._optimizers: list[Optimizer] = []
        self._plan_printed = False
        self._backward_sync_control = _BackwardSync()

    def _set_world_ranks(self) -> None:
        """What Fabric calls it."""
        self.set_world_ranks()

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = make_launcher(self, self.namespace, self.config.start_method)

    def _begin_process(self) -> None:
        """Fabric leaves random numbers and the objects that it is given alone."""

    def _warn(self, message: str) -> None:
        self.namespace.get_fabric("utilities.rank_zero.rank_zero_warn")(message)

    # ---- setting up ------------------------------------------------------------------------------------------------

    def module_to_device(self, module: nn.Module) -> None:
        """Moves a module to this rank's device."""
        module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shards the tables and synchronises the initial weights. Collective."""
        return self.setup_module_and_optimizers(module, [])[0]

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Shards the tables, and checks that the optimizers can train shards. Collective.

        Raises:
            ValueError: An optimizer cannot, or another module has been set up before.
            MisconfigurationException: The precision has a gradient scaler.
        """
        with self._reporting():
            forward_module = self._set_up(module, optimizers)
            for optimizer in optimizers:
                self._watch(optimizer)
        return forward_module, optimizers, scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Checks that an optimizer can train the tables that have been set up.

        Raises:
            ValueError: It cannot, or there is none.
        """
        with self._reporting():
            if self._session is None:
                raise ValueError(
                    "fabric.setup_optimizers() was called before fabric.setup_module(). Set the module up first: its"
                    " tables are sharded then."
                )
            check_optimizers([optimizer], self._session.specs)
            self._watch(optimizer)
        return optimizer

    def _set_up(self, module: nn.Module, optimizers: list[Optimizer]) -> SteppingModule:
        assert self._connection is not None
        self._refuse(module)
        specs = find_tables(module, self.config.tables)
        self._connection.open_groups()
        session = self._open(module, specs, self._connection.communicator)
        with session.on_trial():
            check_optimizers(optimizers, specs)
        ahead = self._looks_ahead() and bool(session.tables) and self.world_size > 1
        if ahead:
            session.look_ahead()
        names, rows = [t.name for t in session.tables], [t.rows for t in session.tables]
        source = make_source(self.config.lookahead if ahead else "off", names, rows)
        self._steps = Steps(module, session, source, self._batches, self._reporting)
        return SteppingModule(module, self._steps)

    def _refuse(self, module: nn.Module) -> None:
        if self._session is not None:
            raise ValueError(
                "A second module was given to fabric.setup(), and strategy='embrace' trains one. Put both into one"
                " `nn.Module`, of which `forward` calls the one that is asked for."
            )
        check_model(module)
        if getattr(self.precision, "scaler", None) is not None:  # type: ignore[attr-defined]
            raise self.namespace.get_fabric("utilities.exceptions.MisconfigurationException")(
                f"Fabric(precision={self.precision.precision!r}, strategy='embrace') scales the loss, and"  # type: ignore[attr-defined]
                " ranks with different shards could disagree on an overflow. Use precision='bf16-mixed', or 32."
            )

    def _watch(self, optimizer: Optimizer) -> None:
        assert self._steps is not None
        self._steps.watch(optimizer)
        self._take_columns(optimizer)
        self._optimizers.append(optimizer)

    def _looks_ahead(self) -> bool:
        return self.config.lookahead != "off" and Schedule.of(self.config.schedule).ahead

    def process_dataloader(self, dataloader: Any) -> Any:
        """Lets a loader hold one batch ahead, where that is of use."""
        return self._batches.wrap(dataloader) if self._looks_ahead() and self.world_size > 1 else dataloader

    # ---- steps -----------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Backward with synchronised gradients, outside `no_backward_sync`. Collective."""
        run = partial(super().backward, tensor, module, *args, **kwargs)
        if self._steps is None:
            run()
            return
        self._steps.backward(run)
        if self._steps.synchronise:
            self._announce()

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """A step of an optimizer."""
        with self._reporting():
            return super().optimizer_step(optimizer, **kwargs)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over all ranks; anything else is returned as it is."""
        return self.reduce(tensor, group, reduce_op)

    def _before_collective(self) -> None:
        if self._session is not None:
            self._session.rows.meet()

    def _announce(self) -> None:
        if self._plan_printed or self._session is None:
            return
        self._plan_printed = True
        wire = self.config.wire_dtype
        if self.is_global_zero:
            print_plan(
                self._session.specs,
                self._session.usage(),
                self.world_size,
                wire.itemsize if wire is not None else None,
                notes=[f"schedule {self.config.schedule!r}", "updates are applied at the optimizer's step"],
            )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Adds ``embrace``, ``embrace_spawn``, ``embrace_fork`` and ``embrace_notebook``."""
        register_by_start_method(strategy_registry, cls)

    def __repr__(self) -> str:
        # Fabric's error about a strategy that it does not know shows this
        there = other(self.namespace)
        return (
            f"<EmbRaceStrategy for {self.namespace.fabric}; for {there.fabric}: from {_MODULE[there.name]} import"
            " EmbRaceStrategy; for a Trainer: from lightning_embrace import EmbRaceStrategy>"
        )


class _BackwardSync:
    """What `fabric.no_backward_sync` asks (Fabric's `_BackwardSyncControl`)."""

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Gradients of the backward passes inside stay local and are exchanged with the next one outside."""
        if not isinstance(module, SteppingModule):
            raise TypeError(f"no_backward_sync() needs the module that fabric.setup() returned, got {type(module)}.")
        before = module.steps.synchronise
        module.steps.synchronise = before and not enabled
        try:
            yield
        finally:
            module.steps.synchronise = before
