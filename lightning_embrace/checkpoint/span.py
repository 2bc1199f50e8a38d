"""A save of the Trainer's from its beginning to its end: what makes state dicts knows that they are for a file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def span(trainer: Any, around: Callable[..., AbstractContextManager[None]]) -> None:
    """Makes a Trainer's ``save_checkpoint`` run inside a context, which is given the method's arguments. Only once."""
    save = trainer.save_checkpoint
    if getattr(save, "embrace", False):
        return

    @functools.wraps(save)
    def inside(filepath: Any, *args: Any, **kwargs: Any) -> None:
        with around(filepath, *args, **kwargs):
            save(filepath, *args, **kwargs)

    inside.embrace = True  # type: ignore[attr-defined]
    vars(trainer)["save_checkpoint"] = inside
