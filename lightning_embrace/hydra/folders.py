"""``state_dict_type="sharded"``: a spilled model is saved as a folder, and the reading of folders whatever it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_embrace.checkpoint.agreement import CheckpointError
from lightning_embrace.checkpoint.atomic import local_path
from lightning_embrace.checkpoint.damage import check_content
from lightning_embrace.checkpoint.fitting import misfits
from lightning_embrace.checkpoint.layout import MODELS, is_optimizers
from lightning_embrace.checkpoint.optimizer_names import named_state
from lightning_embrace.checkpoint.replacing import remove_at_once
from lightning_embrace.checkpoint.sharded import Place, Ranks, Sizes, check_folder, read_folder, write_folder
from lightning_embrace.hydra.config import HydraConfig
from lightning_embrace.hydra.saving import SavingMixin, alone
from lightning_embrace.namespaces import Namespace
from lightning_embrace.refusals import check_folders


class FoldersMixin(SavingMixin):
    """What differs where a checkpoint is a folder."""

    config: HydraConfig

    @property
    def _saves_folders(self) -> bool:
        return self.config.state_dict_type == "sharded"

    def _check_saves(self, trainer: Any) -> None:
        """Refuses, before training, checkpoints that could not be written."""
        if self._saves_folders:
            folders = [getattr(c, "dirpath", None) for c in trainer.checkpoint_callbacks]
            check_folders(self.checkpoint_io, folders, self.namespace, "HydraStrategy")

    # ---- saving ----------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What Lightning saves of an optimizer; in a folder, with names for numbers."""
        state = super().optimizer_state(optimizer)
        if not self._saves_folders:
            return state
        assert self.lightning_module is not None
        return named_state(self.lightning_module, [], getattr(optimizer, "_optimizer", optimizer), state)

    def _reader_of_file(self, path: Any) -> str | None:
        return None if self._saves_folders else super()._reader_of_file(path)

    def _write(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        if not self._saves_folders:
            super()._write(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError(
                "Trainer.save_checkpoint(storage_options=...) is for a CheckpointIO, and a sharded checkpoint is"
                " written by torch.distributed.checkpoint. Leave it out, or set state_dict_type='full'."
            )
        check_folders(self.checkpoint_io, [filepath], self.namespace, "HydraStrategy")
        ranks = Ranks(0, 1, alone, lambda own: [own])
        write_folder(ranks, Path(str(local_path(filepath))).absolute(), checkpoint, self._last)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a file or a folder."""
        path = Path(str(filepath))
        if not path.is_dir():
            super().remove_checkpoint(filepath)
            return
        remove_at_once(path)
        self._forget_checkpoint(filepath)

    # ---- loading ---------------------------------------------------------------------------------------------------

    def load_checkpoint(  # type: ignore[override]  # `weights_only` came later than what we support
        self, checkpoint_path: Any, **options: Any
    ) -> dict[str, Any]:
        """Reads a file or a folder.

        Raises:
            CheckpointError: It is damaged, or no checkpoint.
        """
        path = Path(str(checkpoint_path))
        if not path.is_dir():
            return super().load_checkpoint(checkpoint_path, **options)
        try:
            check_folder(path)
            content = read_folder(path, self._places, options.get("weights_only"))
            check_content(content)
        except CheckpointError as error:
            raise CheckpointError(f"The checkpoint {path} cannot be read: {error}") from error
        return content

    def _places(self, sizes: Sizes) -> Place:
        """Where to read the tensors of a folder into: states of optimizers later, into the store.

        Weights are read right where the model has them, if nothing else can be wrong with the folder any more.
        """
        model = self.lightning_module
        assert model is not None
        mine = next((name for name in MODELS if any(path[0] == name for path in sizes)), MODELS[0])
        saved = {path[-1]: size for path, size in sizes.items() if path[0] == mine}
        known = self._session is None and _loads_plainly(model, self.namespace)
        in_place = known and not misfits(model, saved, model.strict_loading)
        weights = model.state_dict() if in_place else {}

        def place(path: tuple[Any, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
            if is_optimizers(path[0]):
                return torch.empty(size, dtype=dtype, device="meta")
            target = weights.get(path[-1]) if path == (mine, path[-1]) else None
            return target if isinstance(target, Tensor) and tuple(target.shape) == size else None

        return place


def _loads_plainly(model: Any, namespace: Namespace) -> bool:
    """Whether all that is in a checkpoint goes into the model as it is."""
    hook = namespace.get("LightningModule").on_load_checkpoint
    return type(model).load_state_dict is nn.Module.load_state_dict and type(model).on_load_checkpoint is hook
