"""One file of a sharded checkpoint, in the layout that DDP writes."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_embrace.checkpoint.agreement import CheckpointError
from lightning_embrace.checkpoint.atomic import written_whole
from lightning_embrace.checkpoint.optimizer_names import unpacked_state
from lightning_embrace.checkpoint.sharded import check_folder, read_folder


def consolidate(folder: Path | str, file: Path | str, weights_only: bool = True) -> None:
    """Makes one file of a sharded checkpoint. Takes memory for the whole.

    The folder may be ours, FSDPStrategy's or ModelParallelStrategy's; what differs from the file that training with
    ``state_dict_type="full"`` would have written is the order of keys.

    Args:
        folder: The checkpoint.
        file: The file to write.
        weights_only: As in ``torch.load``, for what is not a tensor.

    Raises:
        FileNotFoundError: There is no such folder.
        FileExistsError: The file exists.
        CheckpointError: The folder is not a whole checkpoint, or holds what ``weights_only`` forbids.
    """
    folder, file = Path(folder), Path(file)
    if not folder.is_dir():
        what = "is a file, and not a sharded checkpoint" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"{folder} {what}. Give the folder that a Trainer has written as a checkpoint.")
    if file.exists():
        raise FileExistsError(f"{file} exists, and is left as it is. Name another file, or remove it first.")
    try:
        check_folder(folder)
        checkpoint = read_folder(folder, lambda sizes: lambda *_: None, weights_only)
    except Exception as error:  # what damaged files raise is many things
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [unpacked_state(state) for state in checkpoint["optimizer_states"]]
    with written_whole(str(file)) as stream:
        torch.save(checkpoint, stream)
