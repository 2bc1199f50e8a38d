"""PyTorch Lightning strategies for models with large embeddings; importing the package registers them by name."""

from lightning_embrace.registry import register

register()  # before the modules below import Lightning: it notes what the program itself has imported

from lightning_embrace.checkpoint.agreement import CheckpointError  # noqa: E402
from lightning_embrace.checkpoint.latest import last_whole_checkpoint  # noqa: E402
from lightning_embrace.comm.control import RankFailedError  # noqa: E402
from lightning_embrace.dryrun import plan_of  # noqa: E402
from lightning_embrace.fleet.fleet import HydraFleet  # noqa: E402
from lightning_embrace.fleet.halving import SuccessiveHalving  # noqa: E402
from lightning_embrace.fleet.task import Task, TaskResult, grid  # noqa: E402
from lightning_embrace.horovodrun import HorovodEnvironment  # noqa: E402
from lightning_embrace.hydra.monitoring import SpillMonitor  # noqa: E402
from lightning_embrace.hydra.strategy import HydraStrategy  # noqa: E402
from lightning_embrace.monitoring import CommunicationMonitor  # noqa: E402
from lightning_embrace.strategy import EmbRaceStrategy  # noqa: E402

__all__ = [
    "CheckpointError",
    "CommunicationMonitor",
    "EmbRaceStrategy",
    "HorovodEnvironment",
    "HydraFleet",
    "HydraStrategy",
    "RankFailedError",
    "SpillMonitor",
    "SuccessiveHalving",
    "Task",
    "TaskResult",
    "grid",
    "last_whole_checkpoint",
    "plan_of",
]
__version__ = "0.1.0.dev0"
