"""The fixed-size header with which everything begins that the ranks do together, in a training step or outside.

A rank that does something else than the others (saves a checkpoint alone, has run out of batches) sends a header that
does not fit theirs, so that all of them raise instead of exchanging tensors that mean different things.

| field | meaning |
|---|---|
| op | END, MEET, NONE, ROWS, POOL (bags) or BAD (an id out of range), see `rounds`; AHEAD: a step begins, see `ahead`;
ACT: outside of steps |
| table | the table's index; ACT: which one |
| ids | number of ids asked for |
| bags | POOL: number of bags |
| mode | POOL: 0 sum, 1 mean, plus 2 when weights per sample follow |
| bad id | BAD: the offending id |
| version | how often the rank's tables have changed, checked for equality |
| plan | fingerprint of the dense blocks, checked for equality at END |

In ACT the fields behind its number are words of the act's own, in AHEAD all but the version.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_embrace.comm.base import Communicator, Handle
from lightning_embrace.comm.torch_backend import ExchangeError

END, ROWS, POOL, BAD, MEET, NONE, ACT, AHEAD = range(8)
ASKING = (ROWS, POOL)


class Act(IntEnum):
    """What all ranks do together outside the forward passes of training."""

    STEP = 0
    STATE = 1
    VALIDATION = 2
    DATA_END = 3
    TEARDOWN = 4
    LOADER = 5
    NORM = 6
    OVERFLOW = 7
    AVERAGES = 8

    def __str__(self) -> str:
        return (
            "begins a training step",
            "gathers the state of the tables (for a checkpoint, or `full_state_dict()`)",
            "starts validation",
            "has no more batches",
            "has ended the training",
            "begins to read its training data",
            "takes the norm of gradients (clips them, or calls `grad_norm`)",
            "has unscaled its gradients",
            "exchanges its weights for averaged ones, or back",
        )[self]


class Header(NamedTuple):
    """One rank's header."""

    op: int = END
    table: int = 0
    ids: int = 0
    bags: int = 0
    mode: int = 0
    bad_id: int = 0
    version: int = 0
    plan: int = 0


# after this many seconds a note says what is waited for: a rank that does not come may be stuck in a
# collective of Lightning's, where it learns nothing of this one
NOTE_SECONDS = 30.0
_WORDS = len(Header._fields) - 2
#: yes or no answers in one field: an int64 holds 63 bits without its sign
BITS = 62
_CURE = (
    "Save checkpoints, clip gradients and call `full_state_dict()` on every rank, not on some, and give every rank the"
    " same number of batches (`limit_train_batches`, `max_steps`, or a sampler that pads)."
)


def gather_headers(comm: Communicator, mine: Header, what: str) -> list[Header]:
    """Tells every rank this rank's header. Collective.

    Args:
        comm: Carries the headers.
        mine: This rank's.
        what: The exchange's name, for errors.

    Returns:
        The headers by rank.

    Raises:
        RuntimeError: Some ranks act outside steps, and others do not, or otherwise.
    """
    return read_headers(send_header(comm, mine, what).wait())


def send_header(comm: Communicator, mine: Header, what: str) -> Handle:
    """Begins what :func:`gather_headers` does."""
    return comm.gather(torch.tensor(mine), f"header of {what}")


def read_headers(gathered_NH: Tensor) -> list[Header]:
    """What :func:`gather_headers` makes of the ranks' headers once they are there."""
    headers = [Header(*row) for row in gathered_NH.tolist()]
    if len({h.table if h.op == ACT else None for h in headers}) > 1:
        acts = [Act(h.table) if h.op == ACT else "is in a training step" for h in headers]
        where = ", ".join(f"rank {rank} {act}" for rank, act in enumerate(acts))
        raise RuntimeError(f"The ranks do different things at the same time: {where}. {_CURE}")
    return headers


def check_versions(headers: Sequence[Header], op: int | None = None) -> None:
    """Raises RuntimeError when the ranks' tables have not changed equally often, or some rank is not at ``op``."""
    if len({h.version for h in headers}) > 1 or (op is not None and any(h.op != op for h in headers)):
        raise RuntimeError(
            f"The tables have changed {[h.version for h in headers]} times on the ranks. Step optimizers and call"
            " `load_state_dict` on every rank, not on some."
        )


def act_together(comm: Communicator, act: Act, words: Sequence[int] = ()) -> list[list[int]]:
    """Makes sure that all ranks are about to do the same. Collective.

    Args:
        comm: Carries the headers.
        act: What this rank is about to do.
        words: What it says to the others, as many words on every rank.

    Returns:
        Every rank's words.

    Raises:
        RuntimeError: Another rank does something else.
        ExchangeError: Another rank did not come.
    """
    said: list[list[int]] = [[] for _ in range(comm.world_size)]
    for start in range(0, max(1, len(words)), _WORDS):
        part = words[start : start + _WORDS]
        try:
            with _note(comm.rank, act):
                headers = gather_headers(comm, Header(ACT, act, *part), f"meeting of ranks: this one {act}")
        except ExchangeError as error:
            raise ExchangeError(f"This rank {act}, and the others were waited for in vain. {_CURE} {error}") from error
        for rank, header in enumerate(headers):
            said[rank] += header[2 : 2 + len(part)]
    return said


@contextmanager
def _note(rank: int, act: Act) -> Iterator[None]:
    if act in (Act.STEP, Act.OVERFLOW):  # not worth a thread in every step
        yield
        return
    text = (
        f"[lightning_embrace] rank {rank} {act}, and has waited {NOTE_SECONDS:g} s for every other rank to do the"
        f" same. {_CURE}\n"
    )
    timer = threading.Timer(NOTE_SECONDS, lambda: sys.stderr.write(text))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
