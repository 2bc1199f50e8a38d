"""A training session: everything that lives while a model's tables are sharded. Knows no Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, reduce
from itertools import repeat

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_embrace.comm.base import Communicator
from lightning_embrace.comm.queue import InlineQueue, LowPriorityQueue
from lightning_embrace.foresight import Caution, Foresight, Known, verdicts_on
from lightning_embrace.monitor.timeline import Profiled, Recorder
from lightning_embrace.optim.split import may_defer
from lightning_embrace.rows import RowSource
from lightning_embrace.schedule.blocks import tuned_chunk
from lightning_embrace.schedule.buffers import BufferSync, broadcast_tensors
from lightning_embrace.schedule.dense import DenseSync
from lightning_embrace.schedule.gate import ParameterGate
from lightning_embrace.schedule.guard import GradientGuard
from lightning_embrace.schedule.order import FIFO, Schedule
from lightning_embrace.schedule.pending import PendingUpdates
from lightning_embrace.shards import Shards
from lightning_embrace.tables.find import TableSpec
from lightning_embrace.tables.headers import Act, act_together
from lightning_embrace.tables.midway import TableGradients
from lightning_embrace.tables.replicated import ReplicatedSync, ReplicatedTable
from lightning_embrace.tables.table import ShardedTable
from lightning_embrace.tables.usage import Usage, usage_of

#: step hooks that a session sets on each optimizer
STEP_HOOKS = 1


class Session:
    """Shards a model's tables and synchronises its training steps.

    One step: the rows of a batch that was known beforehand come first, other look-ups run as rounds; backward begins
    when all ranks have left their forward pass; during it the dense blocks are AllReduced; after it a closing header
    tells what each rank has, gradient rows go to their owners, and the optimizer steps on shards. What may wait, does,
    and is applied before anything reads what it changes (`schedule.pending`).

    Args:
        model: The model, whole and equal in structure on every rank; its weights count on rank 0 only.
        specs: Its tables, see :func:`~lightning_embrace.tables.find.find_tables`.
        comm: Carries the exchanges.
        wire_dtype: dtype of rows and gradients on the wire, None: the table's.
        schedule: What travels when.
        chunk_bytes: How much of a dense block travels at once; None: tuned to the wire.
        recorder: Gets to know what runs when.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: list[TableSpec],
        comm: Communicator,
        wire_dtype: torch.dtype | None = None,
        schedule: Schedule = FIFO,
        chunk_bytes: int | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.comm = comm
        self.specs = specs
        self.schedule = schedule
        self.step = 0
        #: bits: what this rank has heard, and what any rank had when backward last was synchronised
        self.heard = self.all_heard = 0
        #: updates may be applied late: nothing reads gradients or weights where it would not be noticed
        self.relaxed = False
        #: a step may move rows that it has not looked up: none may be sent early
        self.disturbed = False
        self._inside_training_step = False
        self._synchronise = True
        self._accumulating = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._optimizers: list[Optimizer] = []
        self._arrivals: list[int] | None = None
        #: optimizers make states in their next step, not in those that follow
        self._states_are_new = True
        self._fixed_chunk = chunk_bytes
        self._chunk = chunk_bytes or tuned_chunk(0, comm.world_size)
        self._recorder = recorder or Profiled()
        self.pending = PendingUpdates(self._recorder)
        self.foresight: Foresight | None = None
        #: there is none, or it knows of no ids
        self._blind = True
        self.rows = RowSource(comm, lambda table: self._shards.shown(table))
        self.tables = self.rows.tables
        self._shards = Shards(model, specs, comm, self.rows, wire_dtype)
        self.tables.extend(self._shards.tables)
        whole = [s for s in specs if s.place in ("replicated", "frozen")]
        apart = {id(s.parameter) for s in [*(s for s in specs if s.place == "sharded"), *whole]}
        dense = {name: p for name, p in model.named_parameters() if id(p) not in apart}
        broadcast_tensors(comm, [*dense.values(), *(s.parameter for s in whole), *model.buffers()], "setup")
        self._queue = InlineQueue() if comm.world_size == 1 else LowPriorityQueue(comm, recorder=recorder)
        self._dense = DenseSync(comm, self._queue, dense, self._close_rounds)
        self._gradients = TableGradients(comm, self.tables, self._dense.remaining)
        self._replicated = ReplicatedSync(comm, [ReplicatedTable(s.name, s.parameter, s.sparse) for s in whole])
        self._guard = GradientGuard({**dense, **{s.name: s.parameter for s in whole}})
        self._buffers = BufferSync(comm, model)
        self._buffers_may_differ = True
        self._replicated_headers: list[list[int]] = []
        self._gate = ParameterGate(model, [*dense.values(), *(t.parameter for t in self.tables)], self._before_read)
        for table in self.tables:
            table.settle = partial(self.pending.settle, table.parameter)
            table.reached = self._close_rounds
            table.collected = partial(self._gradients.collected, table)
        self._table_of = {id(t.parameter): t for t in self.tables}
        self.rows.when_touched = self._touched

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Gives the model back as it was when something inside raises: an optimizer that is refused, say. Only once."""
        try:
            with self._shards.on_trial():
                yield
        except BaseException:
            self.release()
            raise

    def look_ahead(self, blind: bool = False) -> None:
        """From now on :meth:`begin_training_step` is told of the next batch. Call it on every rank, or on none.

        Args:
            blind: No more than whether there is one: the ranks only end together.
        """
        self.foresight = Foresight(self.comm, self.tables, self.schedule.vertical, self._recorder)
        self._blind = blind

    def record_lookups(self, wanted: bool) -> None:
        """Whether :meth:`looked_up` will be asked for after this step."""
        for table in self.tables:
            table.noted = [] if wanted else None

    def looked_up(self) -> dict[int, Tensor]:
        """By table, the unique ids of this step's look-ups on this rank."""
        noted = {t.index: t.noted for t in self.tables if t.noted}
        return {index: torch.unique(torch.cat(ids)) for index, ids in noted.items()}

    def foreseen(self) -> dict[int, bool]:
        """By table whose rows were brought beforehand, whether this rank's look-ups needed no others."""
        return {index: index not in self.rows.missed for index in self.rows.planned}

    # ---- one training step -------------------------------------------------------------------------------------

    def begin_training_step(self, known: Known | None = None) -> None:
        """Call before the user's training step.

        Args:
            known: With :meth:`look_ahead`, what this rank knows of the next batch.
        """
        self.comm.at_step(self.step)
        self.sync_buffers()
        if self._accumulating:
            # what was delayed is not in the window's first batch; this one may look it up
            self.pending.settle_all(counted=True)
        else:
            # whatever changed the weights since the last step: rows fetched before it are not trusted
            for table in self.tables:
                table.forget()
        self._guard.watch()
        self.rows.update_pending = False
        planned: list[int] = []
        if self.foresight is not None:
            self.rows.await_ranks()
            known = known or Known([None] * len(self.tables))
            caution = Caution(not self.relaxed, self.disturbed)
            self.foresight.begin(known, caution, self._optimizers, self.step, self.rows.version)
            planned = self.foresight.planned
        self.rows.open_rounds(self.step, planned)
        self.rows.in_step = self._inside_training_step = True

    def end_training_step(self, backward_follows: bool, steps_anyway: bool = False) -> None:
        """Call after the user's training step.

        Args:
            backward_follows: Automatic optimization: backward will close the rounds. Else they are closed here.
            steps_anyway: Automatic optimization without backward: the optimizer steps all the same.
        """
        self.pending.keep_gradients = False  # from here on `zero_grad` may have run: after forward, that is
        if not backward_follows:
            self._leave_forward()
            self._close_rounds()
        self.rows.in_step = self._inside_training_step = False
        self._buffers_may_differ = backward_follows or steps_anyway

    def before_backward(self, synchronise: bool) -> None:
        """Call before a backward pass: answers the other ranks until all have left their forward pass.

        Args:
            synchronise: False while gradients are accumulated over several batches.
        """
        self.pending.settle_all(counted=False)  # blocks that the forward pass did not read
        self._gradients.begin()
        self._synchronise = synchronise
        self._leave_forward()
        if not self.schedule.horizontal:
            self._close_rounds()
        self.rows.in_training_step = self.rows.in_backward = True
        self._guard.expect()
        if synchronise:
            self._dense.begin(self._arrivals, self._chunk)

    def after_backward(self, synchronise: bool) -> None:
        """Call after a backward pass: exchanges what it produced and puts averaged gradients into ``grad``.

        Args:
            synchronise: As in :meth:`before_backward`.
        """
        self._accumulating = not synchronise
        self._gradients.backward_is_over()
        self._close_rounds()
        if self.foresight is not None:
            self.foresight.plan_is_made()
        self.rows.in_backward = False
        self._guard.arrived(synchronise)
        if synchronise:
            self._exchange()
        else:
            self._buffers_may_differ = False
        self.rows.in_training_step = self._inside_training_step
        if self._inside_training_step:  # manual optimization: more look-ups may follow
            self.rows.open_rounds(self.step)
        else:
            self.rows.update_pending = synchronise

    def _exchange(self) -> None:
        self._dense.send_rest()
        self.pending.settle_all()
        parts = (self._gradients, self._replicated)
        arrivals = self._dense.arrivals() if self.schedule.horizontal else []
        own = [*arrivals, int(self._queue.rate), self.heard]
        header = [value for part in parts for value in part.header()] + own
        rows = self.comm.gather(torch.tensor(header), f"closing header of step {self.step}").wait().tolist()
        *arrived, rates, heard = zip(*(row[-len(own) :] for row in rows))
        rows = [row[: -len(own)] for row in rows]
        self.all_heard = reduce(int.__or__, heard)
        self._chunk = self._fixed_chunk or tuned_chunk(min(rates), self.comm.world_size)
        if self.schedule.horizontal:  # what is there when, in the next step
            self._arrivals = [max(of_block) for of_block in arrived]
        size = self._gradients.header_size
        next_rows = self.foresight.next_rows() if self.foresight is not None else {}
        closed = self._gradients.close([row[:size] for row in rows], next_rows)
        self._queue.append([exchange.slot for exchange in closed.late])
        for exchange in closed.late:
            self._queue.ready(exchange.slot)
            for part in exchange.parts:
                self.pending.add(part)
        for part in closed.at_once:
            self.pending.settle(part.table.parameter)
        if self.foresight is not None:
            self.foresight.closed(closed.late, closed.touched)
        self._replicated_headers = [row[size:] for row in rows]
        self._replicated.run(self._replicated_headers)
        self._take_dense()
        self.pending.keep_gradients = True

    def _take_dense(self) -> None:
        """Puts the averages into ``grad``, or leaves them for whoever reads their parameters next."""
        # whether this rank waits is its own affair: the AllReduces are on their way. Not in the first step: optimizers
        # make their states there, in the order in which state dicts have them
        defers = self.relaxed and self.schedule.horizontal and not self._states_are_new
        defers = defers and not any(map(may_defer, self._optimizers, repeat(STEP_HOOKS)))
        for block in self._dense.blocks:
            if defers and not block.is_done():
                for parameter in block.parameters:
                    parameter.grad = None  # the optimizer passes it over
                self.pending.add(block)
            else:
                block.unpack()

    def sync_buffers(self, act: Act = Act.STEP, anyway: bool = False) -> None:
        """Gives every rank rank 0's buffers, where DDP would. Collective.

        That is not while gradients are accumulated, and not in manual optimization, but ``anyway``.
        """
        if self._buffers_may_differ or anyway:
            self._buffers_may_differ = False
            self._buffers.sync(act)

    def begin_validation(self) -> None:
        """Call before a validation run inside training. Collective."""
        self.pending.settle_all()
        self.rows.step_is_skipped()  # if it was to come, it has come
        self.sync_buffers(Act.VALIDATION)

    def leave_training_step(self) -> None:
        """Call when the user's training step found that there are no more batches. Collective."""
        act_together(self.comm, Act.DATA_END)
        self.rows.drop_rounds()
        self.rows.in_step = self._inside_training_step = False

    def watch(self, optimizer: Optimizer) -> None:
        """Learns from now on when an optimizer has changed the tables."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        tables = [t for t in self.tables if id(t.parameter) in mine]

        def after(*_: object) -> None:
            # not before the step: its closure runs backward, and a window of accumulation may be open until then
            late = [*(t.name for t in tables if t.window.used), *self._guard.alone(optimizer)]
            if late:
                raise RuntimeError(
                    f"The optimizer has stepped, but the gradients of {', '.join(late)} have not been synchronised."
                    " Call `self.manual_backward(loss)` instead of `loss.backward()`."
                )
            self.pending.stepped(optimizer)
            self._states_are_new = False
            self.step += 1
            self.comm.traffic.steps += 1
            for table in tables:
                table.forget()
            self.rows.advance()

        self._optimizers.append(optimizer)
        self._hooks.append(optimizer.register_step_post_hook(after))
        self._hooks.append(optimizer.register_state_dict_pre_hook(self._before_optimizer_state))
        self._hooks.append(optimizer.register_load_state_dict_pre_hook(self._before_optimizer_loads))

    def _leave_forward(self) -> None:
        self.rows.leave_forward(self._dense.fingerprint())

    def _close_rounds(self) -> None:
        if self.rows.close_rounds() and self.foresight is not None:
            beside = self._synchronise and self.schedule.vertical and not self._inside_training_step
            then = partial(self._gradients.run, self.foresight.next_rows) if beside else None
            self.foresight.forward_is_over(self._synchronise, then)

    def _before_read(self, parameter: Tensor) -> None:
        """Somebody reads a parameter through its module."""
        self.pending.settle(parameter)
        if self.foresight is not None and id(parameter) in self._table_of:
            self._touched(self._table_of[id(parameter)])

    def _touched(self, _: ShardedTable) -> None:
        if self.foresight is not None:
            self.foresight.moved = True

    def _before_optimizer_state(self, *_: object) -> None:
        self.pending.settle_all()

    def _before_optimizer_loads(self, *_: object) -> None:
        # an update of before must not move what is loaded; and that may be empty, as the learning rate finder leaves it
        self.pending.settle_all()
        self._states_are_new = True

    def why_whole(self) -> dict[str, str | None]:
        """By table, why its gradient comes in one part; None where it comes in several. Empty where none could."""
        if not (self.schedule.vertical and self.relaxed and not self._blind):
            return {}
        return {t.name: v.whole for t, v in zip(self.tables, verdicts_on(self.tables, self._optimizers))}

    def usage(self) -> dict[str, Usage]:
        """What was looked up in the last backward pass' step, by table. Known between that and the optimizer's step."""
        rows = self._replicated.mean_rows(self._replicated_headers)
        return {t.name: usage_of(t) for t in self.tables} | {name: Usage(u, u, 0.0) for name, u in rows.items()}

    # ---- state ---------------------------------------------------------------------------------------------------

    def settled(self) -> Shards:
        """The tables, with all updates applied: what state dicts are made of."""
        self.pending.settle_all()
        return self._shards

    def drain(self) -> None:
        """The process ends: waits for what is under way, for others may need this rank's part of it."""
        self.pending.settle_all()
        if self.foresight is not None:
            self.foresight.drain()

    def unshard(self, optimizers: list[Optimizer]) -> None:
        """Puts whole tables and their optimizer state back, on every rank. Collective."""
        if self.rows.released:  # the model was given back before
            return
        self.pending.settle_all()
        self._shards.unshard(optimizers)
        self.release()

    def release(self) -> None:
        """Removes the hooks; the tables stay as they are, and whatever reads them says so."""
        self.rows.release()
        self._gradients.backward_is_over()
        self._inside_training_step = False
        self.pending.drop()
        self._queue.close()
        self._gate.remove()
        self._dense.remove_hooks()
        self._guard.remove_hooks()
        self._shards.remove_hooks()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
