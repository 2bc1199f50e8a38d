"""Breaks a process group, so that nothing waits in it any more."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_NOBODYS_TAG = 0x0EB4


def break_group(group: Any) -> None:
    """Makes what this rank has under way on a process group raise, and whatever it begins there later.

    No Python code reaches a thread that waits inside a collective, and a process that ends with a collective under way
    waits for it, up to the group's timeout. NCCL can abort. gloo cannot, but it closes all connections of a group when
    one receive times out, so one is made to. The other ranks see closed connections: tell them the reason before.

    Not reached is a receive from any source. gloo leaves it pending for ever, which keeps no process from ending.

    Args:
        group: A process group of which this rank is a member; one that was given back meanwhile is left alone.
    """
    with contextlib.suppress(ValueError):
        if dist.get_backend(group) == "nccl":
            group.abort()
            return
        for peer in range(group.size()):
            if peer != group.rank():
                with contextlib.suppress(RuntimeError):  # of the time-out, or this connection is closed already
                    group.recv([torch.empty(1)], peer, _NOBODYS_TAG).wait(timedelta(milliseconds=1))
