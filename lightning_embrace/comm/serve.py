"""Request and serve: a rank looks rows up in other ranks' shards without needing their main threads.

Outside training steps ranks run unequal numbers of batches (uneven predict samplers, a forward on rank 0 only), so no
collective can carry their look-ups. A thread per rank answers requests on a gloo group of its own. A request carries
the version of the tables it was made for and is answered once the owner's tables have reached it, or refused when they
have passed it or cannot reach it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_embrace.comm.breaking import break_group
from lightning_embrace.comm.control import Control
from lightning_embrace.comm.torch_backend import raise_cause
from lightning_embrace.comm.traffic import Traffic

# message tags on the group: a request's fixed part, its ids, the rows that answer it
_REQUEST, _IDS, _ROWS = 1, 2, 3
# the server's receive is open for as long as the training lasts
_FOREVER = timedelta(days=365)
_FAREWELL = timedelta(seconds=1)
_STOP = -1
_LEAVE = -2
_GONE = -3
# a rank that has much else to do answers a farewell late
_PATIENCE_SECONDS = 10.0
# what an answer begins with: rows follow, or nothing of use
_GIVEN, _PASSED, _NEVER = range(3)
_VERDICT_BYTES = 8
_REFUSALS = {
    _PASSED: (
        "had changed the table already. Look up where no rank changes it: in `training_step`, in `on_train_batch_end`,"
        " or between two `trainer.strategy.barrier()`."
    ),
    _NEVER: (
        "was in its next training step with an older version of the table. Step optimizers and call `load_state_dict`"
        " on every rank, not on some."
    ),
}
# a broken connection is seen before the reason for it has travelled
_REASON_SECONDS = 3.0


class _Request(NamedTuple):
    source: int
    table: int
    version: int
    ids_U: Tensor


class RowService:
    """Serves this rank's columns and asks the others for theirs.

    Args:
        rank: This process' rank.
        world_size: Number of ranks, at least two.
        read: ``read(table, ids_U)`` returns this rank's columns of those rows, [U, d], on the CPU.
        control: The channel on which ranks report failures.
        traffic: Counts what is served under ``"served"``.
        timeout: How long an answer may take.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        read: Callable[[int, Tensor], Tensor],
        control: Control,
        traffic: Traffic,
        timeout: timedelta,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._read = read
        self._control = control
        self._traffic = traffic
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._version = 0
        self._changing = False
        self._in_rounds = False
        self._waiting: list[_Request] = []
        self._lock = threading.Lock()  # guards the four above
        #: another rank's process has ended in good order, and its connections with it
        self._left = False
        #: this process is about to do so
        self._leaving = False
        #: ranks whose thread has ended: they say nothing any more
        self._gone: set[int] = set()
        self._asking = threading.Lock()  # one question at a time: answers carry no number
        self._thread = threading.Thread(target=self._serve, name="embrace-rows", daemon=True)
        self._thread.start()
        # point-to-point messages cannot be waited for in slices: the first slice to end would break the group
        control.when_failed(self.abandon)

    def change(self) -> None:
        """The tables are about to change, which ends with :meth:`advance`."""
        with self._lock:
            self._changing = True

    def advance(self) -> None:
        """The tables have changed: answers the requests that waited for it. Every rank advances alike."""
        with self._lock:
            self._version += 1
            self._changing = False
        self._answer_waiting()

    def in_rounds(self, begun: bool) -> None:
        """Tells whether the main thread waits for all ranks to look up in a training step.

        It cannot reach a later version then, and the rank that asks for one does not come.
        """
        with self._lock:
            self._in_rounds = begun
        self._answer_waiting()

    def fetch(
        self, table: int, name: str, ids_U: Tensor, widths: Sequence[int], dtype: torch.dtype
    ) -> dict[int, Tensor]:
        """Asks every rank that owns columns of ``table`` for rows.

        Args:
            table: The table's index.
            name: Its name, for errors.
            ids_U: int64 ids on the CPU, valid.
            widths: Number of columns of each rank.
            dtype: The table's dtype.

        Returns:
            By rank, the rows' columns [U, d], without this rank's own.

        Raises:
            RankFailedError: Another rank failed.
            RuntimeError: An owner's table has changed meanwhile, or cannot reach this rank's version.
        """
        owners = [r for r in range(self._world_size) if r != self._rank and widths[r] > 0]
        what = f"look-up in table {name!r} outside a training step"
        with self._asking:
            self._control.check()
            self._control.at(what)
            sizes = {r: ids_U.numel() * widths[r] * dtype.itemsize for r in owners}
            answers = {r: torch.empty(_VERDICT_BYTES + sizes[r], dtype=torch.uint8) for r in owners}
            if ids_U.numel() > 0:
                self._ask(owners, torch.tensor([table, ids_U.numel(), self._version]), ids_U, answers, what)
                for r, answer in answers.items():
                    verdict = int(answer[0])
                    if verdict != _GIVEN:
                        raise RuntimeError(f"During a {what}, rank {r} {_REFUSALS[verdict]}")
        return {r: a[_VERDICT_BYTES:].view(dtype).view(ids_U.numel(), widths[r]) for r, a in answers.items()}

    def _ask(self, owners: list[int], header: Tensor, ids_U: Tensor, answers: dict[int, Tensor], what: str) -> None:
        try:
            works = [dist.irecv(answers[r], group=self._group, group_src=r, tag=_ROWS) for r in owners]
            works += [dist.isend(header, group=self._group, group_dst=r, tag=_REQUEST) for r in owners]
            works += [dist.isend(ids_U, group=self._group, group_dst=r, tag=_IDS) for r in owners]
            for work in works:
                assert work is not None
                work.wait()
        except RuntimeError as error:
            raise_cause(error, self._control, what)
        bytes_out = (header.numel() + ids_U.numel()) * 8 * len(owners)
        self._traffic.add("served", bytes_out, sum(a.numel() for a in answers.values()))

    def stop(self) -> None:
        """Ends the thread. Call it after a barrier: nobody asks any more."""
        neighbour = (self._rank + 1) % self._world_size
        self._say(_STOP, neighbour, _FOREVER)
        self._thread.join(timeout=10.0)
        dist.destroy_process_group(self._group)

    def leave(self) -> None:
        """This process ends in good order, whenever the others do: connections that break with it are no failure.

        The thread ends here: what reaches one that waits inside of torch while the interpreter goes down, another
        rank's farewell, aborts the process.
        """
        self._leaving = True
        if self._tell(_LEAVE):  # else nobody is left who could wake it, by intent or by mischance
            self._thread.join(timeout=_PATIENCE_SECONDS)
        self._tell(_GONE)

    def _tell(self, word: int) -> int:
        """Says something to all who are there; returns how many have been told."""
        told = 0
        for rank in set(range(self._world_size)) - {self._rank} - self._gone:
            with contextlib.suppress(RuntimeError):  # it has ended without a word
                self._say(word, rank)
                told += 1
        return told

    def _say(self, word: int, rank: int, patience: timedelta = _FAREWELL) -> None:
        work = dist.isend(torch.tensor([word, 0, 0]), group=self._group, group_dst=rank, tag=_REQUEST)
        assert work is not None
        work.wait(patience)

    def abandon(self) -> None:
        """Ends after a failure: look-ups that wait raise, and no more are answered."""
        break_group(self._group)

    def _serve(self) -> None:
        try:
            while True:
                header = torch.zeros(3, dtype=torch.int64)
                work = self._group.recv_anysource([header], _REQUEST)
                work.wait(_FOREVER)
                table, count, version = header.tolist()
                if table == _STOP:
                    return
                source = work._source_rank()
                if table in (_LEAVE, _GONE):
                    self._part_from(source, table)
                    if self._leaving:
                        return
                    continue
                ids_U = torch.empty(count, dtype=torch.int64)
                dist.recv(ids_U, group=self._group, group_src=source, tag=_IDS)
                self._answer(_Request(source, table, version, ids_U))
        except BaseException as error:
            if self._left:
                return
            if isinstance(error, RuntimeError) and self._control.wait_for_failure(_REASON_SECONDS) is not None:
                return  # the group broke with that rank; main threads raise at their next exchange
            self._control.report(error)
            raise

    def _part_from(self, rank: int, word: int) -> None:
        self._left = True
        if word == _GONE:
            self._gone.add(rank)
            return
        with contextlib.suppress(RuntimeError):  # it has gone, and needs no word
            self._say(_STOP, rank)

    def _answer_waiting(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        try:
            for request in waiting:
                self._answer(request)
        except RuntimeError as error:
            raise_cause(error, self._control, "answer to a look-up outside a training step")

    def _answer(self, request: _Request) -> None:
        with self._lock:  # the tables do not begin to change while they are read
            early = request.version > self._version
            if early and not self._in_rounds:
                self._waiting.append(request)
                return
            passed = request.version < self._version or self._changing
            verdict = _NEVER if early else _PASSED if passed else _GIVEN
            rows = self._read(request.table, request.ids_U).contiguous().view(-1).view(torch.uint8)
        message = torch.cat([torch.tensor([verdict]).view(torch.uint8), rows])
        dist.send(message, group=self._group, group_dst=request.source, tag=_ROWS)
        self._traffic.add("served", message.numel(), 0)
