"""Numbered rounds: how the look-ups of a training step reach the shards when nobody knew them beforehand.

Every rank issues the same rounds in the same order, whatever it looks up: a round starts with a fixed-size header from
every rank, in which a rank asks for rows of some table, or says that it has left its forward pass (END). A rank with
nothing to ask answers the others, and one that is at END goes on answering until all are. Before another collective
inside the step (a logged value is reduced, say) every rank comes to MEET likewise: one that waited in that collective
could not answer those whose look-ups come before it. Of a collective that goes straight to torch.distributed nobody
knows here; so that ranks with equal look-ups have equal rounds before it, one whose rows are all there joins with NONE.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_embrace.comm.base import Communicator, Handle
from lightning_embrace.tables.headers import (
    ASKING,
    BAD,
    END,
    MEET,
    NONE,
    POOL,
    ROWS,
    Header,
    check_versions,
    read_headers,
    send_header,
)
from lightning_embrace.tables.request import PooledRequest
from lightning_embrace.tables.table import ShardedTable


class LookupRounds:
    """Fetches rows during a training step.

    Args:
        comm: Carries the exchanges.
        tables: All sharded tables, by index.
    """

    def __init__(self, comm: Communicator, tables: list[ShardedTable]) -> None:
        self._comm = comm
        self._tables = tables
        self._round = 0
        self._step = self._version = 0
        self._quiet = False
        self._last = Header()
        self._said: tuple[Handle, str] | None = None
        #: the ranks look up and answer; closed when all have left their forward pass
        self.open = False

    def begin_step(self, step: int, version: int) -> None:
        """Numbers start at 0 in every step.

        Args:
            step: Number of the step, for errors.
            version: How often the tables have changed.
        """
        self._step, self._version = step, version
        self._round = 0
        self.open = True

    def fetch_rows(self, table: ShardedTable, ids_U: Tensor) -> Tensor:
        """Asks for rows. Collective.

        Args:
            table: The table.
            ids_U: Unique, valid int64 ids, at least one.

        Returns:
            The rows in full width, [U, D], in the table's dtype.
        """
        self._check_open(table)
        table.asked[self._comm.rank].append(ids_U)
        header = Header(ROWS, table.index, ids_U.numel(), version=self._version)
        answer = self._run(header, ids_U.to(table.id_dtype).view(torch.uint8))
        assert answer is not None
        return answer

    def fetch_pooled(self, table: ShardedTable, request: PooledRequest) -> Tensor:
        """Asks for the sums or means of bags. Collective.

        Returns:
            One row per bag in full width, [B, D], in the table's dtype.
        """
        self._check_open(table)
        table.asked_pooled[self._comm.rank].append(request)
        header = Header(
            POOL,
            table.index,
            request.ids_L.numel(),
            request.sizes_B.numel(),
            int(request.mean) + 2 * (request.weights_L is not None),
            version=self._version,
        )
        parts = [request.ids_L.to(table.id_dtype), request.sizes_B.to(torch.int32)]
        if request.weights_L is not None:
            parts.append(request.weights_L.detach())
        answer = self._run(header, torch.cat([p.contiguous().view(torch.uint8) for p in parts]))
        assert answer is not None
        return answer

    def join(self) -> None:
        """Takes part in a round with nothing to ask. Collective."""
        self._run(Header(NONE, version=self._version), None)

    def refuse(self, table: ShardedTable, bad_id: int) -> None:
        """Tells every rank of an id out of range. Collective; raises IndexError on every rank."""
        self._run(Header(BAD, table.index, bad_id=bad_id, version=self._version), None)

    def _check_open(self, table: ShardedTable) -> None:
        if not self.open:
            raise RuntimeError(
                f"A look-up in table {table.name!r} during backward needs rows that the forward pass has not looked up,"
                " and the other ranks answer no more. Activation checkpointing must look up the same ids again; make"
                " other look-ups in `training_step`."
            )

    @staticmethod
    def raise_bad_id(rank: int, table: ShardedTable, bad_id: int) -> NoReturn:
        """Raises the IndexError that names rank, table, id and range."""
        raise IndexError(
            f"Rank {rank} looked up id {bad_id} in table {table.name!r}, whose ids range from 0 to {table.rows - 1}."
            " Ids outside that range must be mapped to a valid row (an unknown-word row, or `padding_idx`) before the"
            " look-up."
        )

    def leave(self, plan: int) -> None:
        """Tells the others that this rank has left its forward pass; :meth:`finish` must follow.

        Args:
            plan: Fingerprint of what this rank will AllReduce next; must be equal on all ranks.
        """
        self.open = False
        self._last = Header(version=self._version, plan=plan)
        self._said = self._say(self._last)

    def finish(self) -> None:
        """Answers the others until every rank has left its forward pass. Collective."""
        assert self._said is not None
        self._quiet = False
        while not self._quiet:
            self._answer(self._last, None, *(self._said or self._say(self._last)))
            self._said = None

    def meet(self) -> None:
        """Answers the others until every rank is about to enter the same other collective. Collective."""
        if self._tables:
            self._answer_until_quiet(Header(MEET, version=self._version))

    def _answer_until_quiet(self, mine: Header) -> None:
        self._quiet = False
        while not self._quiet:
            self._run(mine, None)

    def _run(self, mine: Header, payload: Tensor | None) -> Tensor | None:
        return self._answer(mine, payload, *self._say(mine))

    def _say(self, mine: Header) -> tuple[Handle, str]:
        what = f"round {self._round} of step {self._step}"
        self._round += 1
        return send_header(self._comm, mine, what), what

    def _answer(self, mine: Header, payload: Tensor | None, said: Handle, what: str) -> Tensor | None:
        headers = read_headers(said.wait())
        self._check(headers)
        self._quiet = all(h.op in (END, MEET) for h in headers)
        if not any(h.op in ASKING for h in headers):
            return None
        self._exchange_requests(headers, payload, what)
        return self._exchange_answers(headers, what)

    def _check(self, headers: list[Header]) -> None:
        for rank, header in enumerate(headers):
            if header.op == BAD:
                self.raise_bad_id(rank, self._tables[header.table], header.bad_id)
        check_versions(headers)
        if {h.op for h in headers} == {END, MEET}:
            inside, outside = ([r for r, h in enumerate(headers) if h.op == op] for op in (MEET, END))
            raise RuntimeError(
                f"Inside training_step, rank(s) {inside} called a collective (self.log(..., sync_dist=True),"
                f" self.all_gather, a barrier) and rank(s) {outside} did not. Call it on every rank, as with ddp."
            )
        if all(h.op == END for h in headers) and len({h.plan for h in headers}) > 1:
            raise RuntimeError(
                "The ranks are about to synchronise different sets of parameters: `requires_grad` differs between"
                " ranks. Freeze and unfreeze parameters alike on every rank."
            )

    def _exchange_requests(self, headers: list[Header], payload: Tensor | None, what: str) -> None:
        """Ids (and bag sizes and weights) travel once, to the ranks that own columns of the table."""
        me, comm = self._comm.rank, self._comm
        sizes = [self._request_bytes(h) for h in headers]
        wanted = [s if self._owns(h, me) and r != me else 0 for r, (h, s) in enumerate(zip(headers, sizes))]
        targets = [r for r in range(comm.world_size) if payload is not None and r != me and self._owns(headers[me], r)]
        sends = [sizes[me] if r in targets else 0 for r in range(comm.world_size)]
        send = payload.repeat(len(targets)) if payload is not None and targets else self._no_bytes()
        received = comm.all_to_all(send, sends, wanted, "ids", f"ids of {what}").wait()
        for rank, piece in enumerate(received.split(wanted)):
            if wanted[rank]:
                self._note_request(rank, headers[rank], piece)

    def _exchange_answers(self, headers: list[Header], what: str) -> Tensor | None:
        me, comm = self._comm.rank, self._comm
        pieces = [self._rows_for(r, h) if self._owns(h, me) else self._no_bytes() for r, h in enumerate(headers)]
        mine = headers[me]
        wanted = [0] * comm.world_size
        if mine.op in ASKING:
            table = self._tables[mine.table]
            count = mine.ids if mine.op == ROWS else mine.bags
            wanted = [count * width * table.row_dtype.itemsize for width in table.widths]
        received = comm.all_to_all(
            torch.cat(pieces), [p.numel() for p in pieces], wanted, "rows", f"rows of {what}"
        ).wait()
        if mine.op not in ASKING:
            return None
        blocks = [
            piece.view(table.row_dtype).view(count, width)
            for piece, width in zip(received.split(wanted), table.widths)
            if width > 0
        ]
        return torch.cat(blocks, dim=1).to(table.parameter.dtype)

    def _owns(self, header: Header, rank: int) -> bool:
        return header.op in ASKING and self._tables[header.table].widths[rank] > 0

    def _request_bytes(self, header: Header) -> int:
        if header.op not in ASKING:
            return 0
        table = self._tables[header.table]
        size = header.ids * table.id_dtype.itemsize
        if header.op == POOL:
            size += header.bags * 4
            if header.mode & 2:
                size += header.ids * table.parameter.dtype.itemsize
        return size

    def _note_request(self, rank: int, header: Header, piece: Tensor) -> None:
        table = self._tables[header.table]
        n_ids = header.ids * table.id_dtype.itemsize
        # a slice of received bytes may start anywhere, a view of wider elements may not: clone aligns it
        ids = piece[:n_ids].clone().view(table.id_dtype).long()
        if header.op == ROWS:
            table.asked[rank].append(ids)
            return
        sizes = piece[n_ids : n_ids + 4 * header.bags].clone().view(torch.int32).long()
        weights = None
        if header.mode & 2:
            weights = piece[n_ids + 4 * header.bags :].clone().view(table.parameter.dtype)
        table.asked_pooled[rank].append(PooledRequest(ids, sizes, weights, bool(header.mode & 1)))

    def _rows_for(self, rank: int, header: Header) -> Tensor:
        table = self._tables[header.table]
        if header.op == ROWS:
            answer = table.read(table.asked[rank][-1])
        else:
            request = table.asked_pooled[rank][-1]
            answer = F.embedding_bag(
                request.ids_L,
                table.shard_Vd,
                request.offsets_B(),
                mode="mean" if request.mean else "sum",
                per_sample_weights=request.weights_L,
            )
        return answer.to(table.row_dtype).contiguous().view(-1).view(torch.uint8)

    def _no_bytes(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._comm.device)
