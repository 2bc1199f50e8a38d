"""The names in a fleet's folder."""

from __future__ import annotations

import re

_NAME = re.compile(r"[A-Za-z0-9_=+,@-][A-Za-z0-9_=+,@. -]*")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_=+,@. -]")

#: in a task's folder: what it goes on from, and at the end the trained model
CHECKPOINT = "last.ckpt"
#: in a task's folder: what its process has printed, one attempt after the other
LOG = "log.txt"


def is_task_name(name: str) -> bool:
    """Whether a task, and so its folder, may be named so."""
    return _NAME.fullmatch(name) is not None


def task_name(text: str) -> str:
    """A task's name from what tells it from others: what a name cannot have becomes ``_``.

    Args:
        text: Such as ``"lr=0.1,path=a/b"``.
    """
    return _NOT_IN_NAMES.sub("_", text)
