"""What is refused before it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_embrace.checkpoint.filling import check_disk


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    """With the arithmetic, and who wanted to write."""
    with (tmp_path / "file").open("wb") as file:
        check_disk(file.fileno(), 1)
        with pytest.raises(
            OSError, match=r"No space left on device: 1,152,921,505 GB are to be written, and .* GB are fr"
        ):
            check_disk(file.fileno(), 1 << 60)
        with pytest.raises(OSError, match="it: No space"):
            check_disk(file.fileno(), 1 << 60, "it")
