"""The names in a fleet's folder."""

from __future__ import annotations

#: in a task's folder: what it goes on from, and at the end the trained model
CHECKPOINT = "last.ckpt"
#: in a task's folder: what its process has printed, one attempt after the other
LOG = "log.txt"
