"""The checkpoint from which a run that was killed goes on."""

from __future__ import annotations

from pathlib import Path

from lightning_embrace.checkpoint.completeness import last_whole


def last_whole_checkpoint(folder: str | Path) -> str | None:
    """Finds the newest checkpoint in a folder that has all that it should. Contents are checked when it is loaded.

    ``trainer.fit(model, ckpt_path=last_whole_checkpoint(folder))`` goes on from wherever a run has come, or begins.
    Lightning's ``ckpt_path="last"`` knows only checkpoints that ``ModelCheckpoint(save_last=True)`` has called so.

    Args:
        folder: Where checkpoints are saved: files, or folders of ``state_dict_type="sharded"``. It need not exist.

    Returns:
        The path, or None where there is none.
    """
    found = last_whole(Path(folder)) if Path(folder).is_dir() else None
    return None if found is None else str(found)
