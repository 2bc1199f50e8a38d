"""Checkpoint files on their way into training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from zipfile import is_zipfile

from torch import Tensor

from lightning_embrace.checkpoint.damage import check_content, check_file, check_kind
from lightning_embrace.checkpoint.layout import joined
from lightning_embrace.checkpoint.mapped import MappedFile, load_mapped


class Read(NamedTuple):
    """A file that was read.

    Attributes:
        content: What it holds.
        number: One that differs where the content does.
        file: In which tensors stay, None: all were read.
    """

    content: dict[str, Any]
    number: int
    file: MappedFile | None


def read_file(
    path: str,
    plain: bool,
    stays: Callable[[Tensor], bool] | None,
    weights_only: bool | None,
    load: Callable[[], Any],
    part: int = 0,
    parts: int = 1,
) -> Read:
    """Reads a file, and makes sure that it is what was written.

    Args:
        path: The file.
        plain: It is read by Lightning's own CheckpointIO, or ours.
        stays: Says of a tensor whether it stays in the file until it is copied from there. None: all are read.
        weights_only: As in ``torch.load``.
        load: Reads the file in Lightning's way.
        part: Which of its records are compared with their checksums here, from 0.
        parts: Among how many processes that is shared out.

    Raises:
        CheckpointError: It is damaged, or no checkpoint of Lightning's.
    """
    number = check_file(path, part, parts)
    if plain:
        check_kind(path)
    file: MappedFile | None = None
    if stays is not None and plain and is_zipfile(path):
        content, file = load_mapped(path, stays, weights_only)
    else:
        content = load()
    number ^= check_content(content)
    return Read(joined({}, content), number, file)
