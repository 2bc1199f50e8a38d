"""A task as it is trained in its process: an ordinary Trainer under ``hydra``."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

import cloudpickle
import torch
from lightning.pytorch import seed_everything

from lightning_embrace.fleet.callbacks import Standing, keeps_checkpoint, metrics_of, takes_turns
from lightning_embrace.fleet.layout import CHECKPOINT
from lightning_embrace.fleet.pace import Pace
from lightning_embrace.fleet.protocol import Command, Failed, Finished, Order, Outcome, Paused, Report, Stopped
from lightning_embrace.fleet.replay import Replay
from lightning_embrace.fleet.turns import TaskPaused, TaskStopped, Turns
from lightning_embrace.namespaces import NAMESPACES, Namespace

_STRATEGIES = {
    "lightning.pytorch": "lightning_embrace.hydra.strategy",
    "pytorch_lightning": "lightning_embrace.pytorch_lightning",
}


class Training:
    """One task, from its order to its outcome.

    Args:
        order: What is trained with what.
        send: Tells the fleet; from two threads.
    """

    def __init__(self, order: Order, send: Callable[[Report], None]) -> None:
        self._order = order
        pace = Pace()
        self._standing = Standing(pace, order.pause)
        self._turns = Turns(send, self._standing.progress, pace)

    def hear(self, command: Command) -> None:
        """Does what the fleet says. Call it from another thread than :meth:`run`."""
        self._turns.hear(command)

    def run(self) -> Outcome:
        """Trains. Whatever is raised is an outcome."""
        try:
            outcome = self._fit()
        except TaskStopped:
            outcome = Stopped()
        except TaskPaused as pause:
            outcome = Paused(pause.score, pause.metrics)
        except BaseException as error:
            traceback.print_exc()
            return Failed("".join(traceback.format_exception_only(error)).strip()[-4000:])
        self._turns.leave()
        return outcome

    def _fit(self) -> Outcome:
        order = self._order
        torch.set_num_threads(order.threads)
        factory, loaders, trainer_kwargs, strategy_kwargs = cloudpickle.loads(order.job)
        seed_everything(order.seed, verbose=False)
        module, namespace = _module_of(factory)
        replay = Replay(namespace)
        data = _data_of(loaders, namespace, module, replay)
        trainer = self._trainer(namespace, trainer_kwargs, strategy_kwargs, replay)
        path = order.folder / CHECKPOINT
        trainer.fit(module, **data, ckpt_path=str(path) if order.goes_on and path.exists() else None)
        return Finished(metrics_of(trainer), str(path))

    def _trainer(
        self, namespace: Namespace, arguments: dict[str, Any], strategy_kwargs: dict[str, Any], replay: Replay
    ) -> Any:
        order = self._order
        strategy = import_module(_STRATEGIES[namespace.name]).HydraStrategy(
            device_memory=order.device_memory, host_memory=order.host_memory, disk=order.disk, **strategy_kwargs
        )
        strategy.at_boundary = self._turns.boundary
        callbacks = _as_list(arguments.get("callbacks"))
        saves = any(isinstance(c, namespace.get("callbacks.Checkpoint")) for c in callbacks)
        trainer = namespace.get("Trainer")(
            **{
                "default_root_dir": str(order.folder),
                "enable_progress_bar": False,
                "enable_checkpointing": saves,
                **arguments,
                "plugins": _plugins(arguments.get("plugins"), namespace),
                "callbacks": [takes_turns(namespace, self._turns, self._standing), *callbacks],
                "strategy": strategy,
                "accelerator": order.accelerator,
                "devices": 1,
            }
        )
        # whatever `enable_checkpointing` says: that is for the user's own
        trainer.callbacks.append(keeps_checkpoint(namespace, order, self._turns, replay))
        return trainer


def _module_of(factory: Any) -> tuple[Any, Namespace]:
    """The model, and the namespace whose Trainer takes it."""
    kinds = {n: n.get("LightningModule") for n in NAMESPACES if n.imported}  # this package imports what is installed
    module = factory if isinstance(factory, tuple(kinds.values())) else factory()
    namespace = next((n for n, kind in kinds.items() if isinstance(module, kind)), None)
    if namespace is None:
        raise TypeError(f"Task(factory=...) made {type(module).__name__}. It must make a LightningModule.")
    return module, namespace


def _data_of(loaders: Any, namespace: Namespace, module: Any, replay: Replay) -> dict[str, Any]:
    """The arguments of ``fit``. Training loaders can go on amid an epoch."""
    data = loaders() if callable(loaders) else loaders
    if isinstance(data, namespace.get("LightningDataModule")):
        replay.over_hook(data)
        return {"datamodule": data}
    if data is None:
        replay.over_hook(module)
        return {}
    if isinstance(data, tuple):
        if len(data) != 2:
            raise TypeError(
                f"Task(loaders=...) gave a tuple of {len(data)}. Give a loader, or one for training and one for"
                " validation, or a LightningDataModule."
            )
        return {"train_dataloaders": replay.over(data[0]), "val_dataloaders": data[1]}
    return {"train_dataloaders": replay.over(data)}


def _plugins(given: Any, namespace: Namespace) -> list[Any]:
    """The user's; the process is alone, whatever a scheduler's variables say of the fleet's."""
    plugins = _as_list(given)
    if not any(isinstance(p, namespace.get_fabric("plugins.ClusterEnvironment")) for p in plugins):
        plugins.append(namespace.get_fabric("plugins.environments.LightningEnvironment")())
    return plugins


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]
