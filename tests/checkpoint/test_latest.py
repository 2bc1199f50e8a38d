"""The checkpoint from which a run goes on."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lightning_embrace import last_whole_checkpoint


def test_the_newest_that_is_whole(tmp_path: Path) -> None:
    """Not what was cut off, not what is being written, not what lies beside, and None where there is nothing."""
    assert last_whole_checkpoint(tmp_path) is last_whole_checkpoint(tmp_path / "none") is None
    names = ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt", ".embrace-partial-x.ckpt", "events.pt"]
    for age, name in enumerate(names):
        torch.save({"global_step": age}, tmp_path / name)
        os.utime(tmp_path / name, (1e9 + age, 1e9 + age))
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "step=6.ckpt")
    cut = tmp_path / "step=6.ckpt"
    cut.write_bytes(cut.read_bytes()[:300])
    assert last_whole_checkpoint(str(tmp_path)) == str(tmp_path / "step=4.ckpt")
