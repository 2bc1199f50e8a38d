"""PyTorch Lightning strategies for models with large embeddings; importing the package registers them by name."""

from lightning_embrace.comm.control import RankFailedError
from lightning_embrace.registry import register
from lightning_embrace.strategy import EmbRaceStrategy

__all__ = ["EmbRaceStrategy", "RankFailedError"]
__version__ = "0.1.0.dev0"

register()
