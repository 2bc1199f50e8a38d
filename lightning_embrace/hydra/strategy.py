"""HydraStrategy: the Lightning life cycle, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_embrace.config import StateDictType
from lightning_embrace.going_on import GoingOnMixin
from lightning_embrace.hydra.building import built_on_disk
from lightning_embrace.hydra.config import Blocks, HydraConfig
from lightning_embrace.hydra.constants import Constants
from lightning_embrace.hydra.folders import FoldersMixin
from lightning_embrace.hydra.heap import map_large_ones
from lightning_embrace.hydra.interrupts import Interrupts
from lightning_embrace.hydra.ledger import Ledger
from lightning_embrace.hydra.partition import divide
from lightning_embrace.hydra.pilot import Pilot
from lightning_embrace.hydra.plan import DoesNotFitError, Planned
from lightning_embrace.hydra.planning import default_sizes, glue_room, plan_of, smaller_glue_room
from lightning_embrace.hydra.precision import SpilledPrecision
from lightning_embrace.hydra.refusals import check_callbacks, check_model, check_optimizers, check_trainer
from lightning_embrace.hydra.render import show
from lightning_embrace.hydra.session import Session
from lightning_embrace.hydra.shapes import Growth, Shapes
from lightning_embrace.hydra.stepper import Stepper
from lightning_embrace.hydra.store import Store
from lightning_embrace.hydra.when import why_second_pass
from lightning_embrace.lookahead.reasons import LoaderKind
from lightning_embrace.namespaces import LIGHTNING, Namespace, shown
from lightning_embrace.signals import at_batch_end


class HydraMixin(GoingOnMixin, FoldersMixin):
    """The strategy without its base class, which differs between the two namespaces of Lightning."""

    namespace: ClassVar[Namespace]
    #: for Lightning: no sampler is injected, and nobody waits for other ranks
    is_distributed = False
    #: see :class:`~lightning_embrace.hydra.session.Session`; set before a run
    at_boundary: Callable[[], None] | None = None

    def __init__(
        self,
        *,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        disk: str | Path | None = None,
        blocks: Blocks = "auto",
        prefetch: bool = True,
        state_dict_type: StateDictType = "full",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        self.namespace.take_messages()
        self.config = HydraConfig.checked(device_memory, host_memory, disk, blocks, prefetch, state_dict_type)
        self._parallel_devices: list[torch.device] | None = None
        super().__init__(
            device="cpu",
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.parallel_devices = parallel_devices
        self._session: Session | None = None
        self._stepper: Stepper | None = None
        self._precision: SpilledPrecision | None = None
        self._glue_states = 0
        self._why_second_pass: str | None = None
        self._pilot: Pilot | None = None
        self._shapes = Shapes()
        self._unmap_large_ones: Callable[[], None] | None = None
        self._torn = False
        self._checkpoints: list[str] = []
        self._loader_kind = LoaderKind()
        self._interrupts = Interrupts()
        self._at_batch_end: Any = None
        self._said_direct = False
        #: the last plan, and what it was made of
        self.planned: Planned | None = None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device, in a list: strategies that are named by a string are given theirs in this way."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device] | None) -> None:
        if devices is not None and len(devices) > 1:
            error = self.namespace.get("utilities.exceptions.MisconfigurationException")
            raise error(
                f"HydraStrategy trains one model on one device, and Trainer(devices={len(devices)}) gives it"
                f" {len(devices)}. Write Trainer(strategy='hydra', devices=1); HydraFleet trains several models on"
                " several devices."
            )
        self._parallel_devices = None if not devices else list(devices)
        if devices:
            self._root_device = torch.device(devices[0])

    @property
    def num_nodes(self) -> int:
        """One."""
        return 1

    @num_nodes.setter
    def num_nodes(self, count: int) -> None:
        if count != 1:
            error = self.namespace.get("utilities.exceptions.MisconfigurationException")
            raise error(
                f"HydraStrategy trains one model on one device, and Trainer(num_nodes={count}) asks for {count} nodes."
                " Write num_nodes=1; HydraFleet trains several models on several machines."
            )

    # ---- setting up and tearing down -------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Models are built in host memory: the device is too small for them."""
        device, self._root_device = self._root_device, torch.device("cpu")
        try:
            with super().tensor_init_context(empty_init):
                yield
        finally:
            self._root_device = device

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Where there is a disk tier, what ``configure_model`` builds need not fit into host memory either."""
        with super().model_sharded_context(), built_on_disk(self.config.disk) if self.config.disk else nullcontext():
            yield

    def setup(self, trainer: Any) -> None:
        """Moves blocks to where they fit, and builds the optimizers."""
        assert self.accelerator is not None and self.model is not None
        fitting = trainer.state.fn == "fit"
        self.accelerator.setup(trainer)
        check_trainer(trainer, self.namespace)
        check_model(self.model, self.namespace)
        check_callbacks(trainer.callbacks, self.namespace)
        self._check_saves(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self._sizes = default_sizes(self.config, self.root_device)
        session = self._session = self._open(self.model, glue_room(self._sizes[0]))
        try:
            with self._interrupts.deferred():
                if self.root_device.type != "cpu":
                    session.park()  # what follows moves the whole model
                self.model_to_device()
                if fitting:
                    with Constants([p for unit in session.units for p in unit.parameters]):
                        self.setup_optimizers(trainer)
                    session = self._take_optimizer(session, trainer)
                    self._begin_anew(trainer)
                self._plan(session, self.model, None)
                self._check_reader(session, trainer)
            self._interrupts.deliver()
        except BaseException:
            self._give_up()
            raise
        self.setup_precision_plugin()

    def _begin_anew(self, trainer: Any) -> None:
        if self._torn:
            self.namespace.warn(
                "HydraStrategy: the fit before this one was interrupted within an optimizer step. Unless a checkpoint"
                " is loaded, this one begins with parameters of which some have made that step and others have not."
            )
        self._torn = False
        # the last one: what the others save in this hook is whole and has its step counted
        self._at_batch_end = at_batch_end(self.namespace, self._interrupts.deliver)
        trainer.callbacks.append(self._at_batch_end)

    def _open(self, model: Any, glue: int) -> Session:
        ledgers = {tier: Ledger(tier, size) for tier, size in zip(("device", "host"), self._sizes)}
        store = Store(self.root_device, ledgers["host"], self.config.disk)
        parts = divide(model, self.config.blocks, glue)
        session = Session(parts, self.root_device, ledgers, store, self.config.prefetch)
        session.at_boundary = self.at_boundary
        return session

    def _take_optimizer(self, session: Session, trainer: Any) -> Session:
        optimizer = check_optimizers(self.optimizers, self.namespace)
        self._stepper = Stepper(optimizer, session)
        self._glue_states = self._stepper.plan_states()
        smaller = smaller_glue_room(session, self._glue_states, self._sizes[0])
        if smaller is not None:
            session = self._divide_anew(session, smaller)
            self._stepper = Stepper(optimizer, session)
            self._glue_states = self._stepper.plan_states()
        self._why_second_pass = why_second_pass(
            trainer, self.lightning_module, self.precision_plugin, optimizer, self.namespace
        )
        self._stepper.install(in_backward=self._why_second_pass is None)
        self._precision = SpilledPrecision(self.precision_plugin, session)
        return session

    def _divide_anew(self, session: Session, glue: int) -> Session:
        """With more of what is outside of blocks as blocks: what the optimizer keeps is known now."""
        parked = any(unit.place != "device" for unit in session.units)
        self._session = None
        session.release()
        session = self._session = self._open(self.model, glue)
        if parked:
            session.park()
        return session

    def _plan(self, session: Session, model: Any, pilot: Pilot | None) -> None:
        states = None if self._stepper is None else self._glue_states
        second_pass = self._why_second_pass is not None
        stepping = 0 if self._stepper is None else self._stepper.temporaries()
        planned = plan_of(session, model, self.config, self._sizes, states, pilot, second_pass, stepping)
        if planned.plan.shards and self.root_device.type == "cpu" and self._unmap_large_ones is None:
            self._unmap_large_ones = map_large_ones()
        session.apply(planned.plan)
        if planned.plan.disk_bytes and not session.store.direct and not self._said_direct:
            self._said_direct = True
            self.namespace.get("utilities.rank_zero.rank_zero_info")(
                f"HydraStrategy(disk={str(self.config.disk)!r}): its file system has no direct access, and what is read"
                " and written there goes through the page cache, and is dropped from it."
            )
        if self._stepper is not None:
            self._stepper.make_whole()
        self.planned = planned

    def barrier(self, name: str | None = None) -> None:
        """There is nobody to wait for. Lightning names its barriers by what it is about to do with loaders."""
        self._loader_kind.hear(name)

    def teardown(self) -> None:
        """Makes the model an ordinary one again."""
        try:
            self._give_up()
        finally:
            super().teardown()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps, and lets no signal come between the first parameter and the last."""
        with self._interrupts.deferred():
            return super().optimizer_step(*args, **kwargs)

    def _give_up(self) -> None:
        session, self._session = self._session, None
        stepper, self._stepper = self._stepper, None
        precision, self._precision = self._precision, None
        self._glue_states, self._why_second_pass, self._pilot = 0, None, None
        self._shapes = Shapes()
        if precision is not None:
            precision.remove()
        if stepper is not None:
            self._torn = stepper.torn
            stepper.remove()
        self._interrupts.forget()
        module: Any = self.lightning_module
        callbacks = [] if module is None else module.trainer.callbacks
        if self._at_batch_end in callbacks:
            callbacks.remove(self._at_batch_end)
        self._at_batch_end = None
        if self._unmap_large_ones is not None:
            self._unmap_large_ones()
            self._unmap_large_ones = None
        if session is None:
            return
        try:
            with self._interrupts.deferred():
                session.release()
        except BaseException:
            self._torn = True  # the store has not taken what a step has changed, or does not give it
            raise
        self._interrupts.deliver()

    # ---- steps -----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's training step, on the tape. The first one is measured, and the plan follows from it."""
        session = self._session
        if session is None:
            return super().training_step(*args, **kwargs)
        self._plan_ahead(session, self._shapes.add((args, kwargs)))
        session.begin("training")
        pilot = session.pilot
        with nullcontext() if pilot is None else pilot.around(session.partition.glue):
            output = super().training_step(*args, **kwargs)
        session.expect_backward(stepping=True)
        return output

    def _plan_ahead(self, session: Session, growth: Growth | None) -> None:
        """The first step is measured, and the plan follows; so it is where a batch is larger, or more is trained."""
        changed = self._stepper is not None and self._stepper.has_changed()
        if changed:
            assert self._stepper is not None
            self._glue_states = self._stepper.plan_states()
        if self._pilot is None:
            if changed:
                self._plan(session, self.model, None)
            self._pilot = session.pilot = Pilot(self.root_device)
            return
        measured, session.pilot = session.pilot, None
        if measured is not None and measured is not self._pilot:
            self._pilot.include(measured)
        if growth is not None:
            self._plan_for_larger(session, self._pilot, growth)
            session.pilot = Pilot(self.root_device)
        elif measured is not None or changed:
            self._plan(session, self.model, self._pilot)
        if measured is self._pilot:
            assert self.lightning_module is not None and self.planned is not None
            show(self.planned, self._why_second_pass, self.lightning_module.trainer.progress_bar_callback)

    def _plan_for_larger(self, session: Session, pilot: Pilot, growth: Growth) -> None:
        """Until it is measured: it may grow with the square of a side, as attention does, if there is room for that."""
        try:
            self._plan(session, self.model, pilot.guess(growth.nbytes * growth.side))
        except DoesNotFitError:
            self._plan(session, self.model, pilot.guess(growth.nbytes))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's validation step, without a tape."""
        self._begin("validation")
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's test step, without a tape."""
        self._begin("test")
        return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's predict step, without a tape."""
        self._begin("predict")
        return super().predict_step(*args, **kwargs)

    def _begin(self, what: str) -> None:
        if self._session is not None:
            self._session.begin(what)

    def moved_bytes(self) -> dict[str, int]:
        """What has been moved so far, by ``"host read"``, ``"host written"``, ``"disk read"`` and ``"disk written"``.

        Disk is left out where there is no such tier.
        """
        moved = {} if self._session is None else self._session.store.traffic
        tiers = ("host", "disk") if self.config.disk else ("host",)
        return {kind: moved.get(kind, 0) for tier in tiers for kind in (f"{tier} read", f"{tier} written")}

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Adds ``hydra``."""
        strategy_registry.register(
            "hydra", cls, description="Trains what does not fit the device, spilled to host and disk", override=True
        )

    def __repr__(self) -> str:
        return shown("HydraStrategy", self.namespace)


class HydraStrategy(HydraMixin, SingleDeviceStrategy):
    """Trains one model of which only a part is on the device at a time, with the numbers of plain training.

    Args:
        device_memory: What the model may take of the device, such as ``"4GiB"``. On the CPU the device is a part of the
            machine's memory, by default 20 % of what this process may use.
        host_memory: What waits in host memory, by default 50 % of what this process may use.
        disk: A folder for what does not fit the host, or None.
        blocks: ``"auto"``: the members of the model's large lists; or fnmatch patterns of module names.
        prefetch: Whether the next shard is loaded while one computes.
        state_dict_type: What ``ModelCheckpoint`` and ``Trainer.save_checkpoint`` write: ``"full"``: the file that plain
            training writes; ``"sharded"``: a folder of ``torch.distributed.checkpoint``. Either is loaded whatever is
            set.
        accelerator: As in Lightning's SingleDeviceStrategy.
        parallel_devices: The one device.
        checkpoint_io: As in Lightning's SingleDeviceStrategy.
        precision_plugin: As in Lightning's SingleDeviceStrategy.

    Raises:
        ValueError: An argument has a value that is not allowed.
        MisconfigurationException: More than one device was asked for.
    """

    namespace = LIGHTNING
