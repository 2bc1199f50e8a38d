"""A training session: everything that lives while a model's tables are sharded. Knows no Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_embrace.checkpoint import gather_optimizer_state, restore_optimizer
from lightning_embrace.comm.base import Communicator
from lightning_embrace.comm.serve import RowService
from lightning_embrace.schedule.buffers import BufferSync, broadcast_tensors
from lightning_embrace.schedule.dense import DenseSync
from lightning_embrace.schedule.guard import GradientGuard
from lightning_embrace.tables.find import TableSpec
from lightning_embrace.tables.gradients import GradientExchange
from lightning_embrace.tables.headers import Act, act_together
from lightning_embrace.tables.lookup import TableHandle
from lightning_embrace.tables.modules import give_back, take_over
from lightning_embrace.tables.replicated import ReplicatedSync, ReplicatedTable
from lightning_embrace.tables.request import PooledRequest
from lightning_embrace.tables.rounds import LookupRounds
from lightning_embrace.tables.shard import gather_columns, scatter_columns
from lightning_embrace.tables.state import shard_as_dtensor
from lightning_embrace.tables.table import ShardedTable
from lightning_embrace.tables.usage import Usage, usage_of


class Session:
    """Shards a model's tables and synchronises its training steps.

    One step: look-ups run as rounds; before backward the rounds are closed; during backward the dense blocks are
    AllReduced; after it a closing header tells what each rank has, gradient rows go to their owners, and the
    optimizer steps on shards.

    Args:
        model: The model, whole and equal in structure on every rank; its weights count on rank 0 only.
        specs: Its tables, see :func:`~lightning_embrace.tables.find.find_tables`.
        comm: Carries the exchanges.
        wire_dtype: dtype of rows and gradients on the wire, None: the table's.
    """

    def __init__(
        self, model: nn.Module, specs: list[TableSpec], comm: Communicator, wire_dtype: torch.dtype | None = None
    ) -> None:
        self.comm = comm
        self.model = model
        self.specs = specs
        self.step = 0
        #: counts the changes of the tables: optimizer steps and loaded weights, the same on every rank
        self.version = 0
        self._update_pending = False
        #: this rank wants all to stop; one rank is enough, and after the next synchronised backward all know
        self.wants_stop = self.stop_agreed = False
        #: inside a step function of any kind: a sharded weight must not be read
        self.in_step = False
        #: look-ups run as rounds and collect gradients
        self.in_training_step = False
        #: look-ups are those of activation checkpointing, whose rows are here
        self.in_backward = False
        self._inside_training_step = False
        self._accumulating = False
        self.released = False
        self._shown: dict[int, Tensor] = {}
        self._originals: list[Tensor] = []
        self._service: RowService | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        sharded = [s for s in specs if s.place == "sharded"]
        self.tables = [self._shard(index, spec, wire_dtype) for index, spec in enumerate(sharded)]
        whole = [s for s in specs if s.place in ("replicated", "frozen")]
        apart = {id(s.parameter) for s in [*sharded, *whole]}
        dense = {name: p for name, p in model.named_parameters() if id(p) not in apart}
        broadcast_tensors(comm, [*dense.values(), *(s.parameter for s in whole), *model.buffers()], "setup")
        self._rounds = LookupRounds(comm, self.tables)
        self._dense = DenseSync(comm, dense)
        self._gradients = GradientExchange(comm, self.tables)
        self._replicated = ReplicatedSync(comm, [ReplicatedTable(s.name, s.parameter, s.sparse) for s in whole])
        self._guard = GradientGuard({**dense, **{s.name: s.parameter for s in whole}})
        self._buffers = BufferSync(comm, model)
        self._buffers_may_differ = True
        self._replicated_headers: list[list[int]] = []

    def reader(self) -> Callable[[int, Tensor], Tensor]:
        """What another thread reads this rank's columns with; on CUDA it keeps the order of this thread's work."""
        device = self.comm.device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def read(table: int, ids_U: Tensor) -> Tensor:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                return self.tables[table].read(ids_U.to(device)).cpu()

        return read

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Gives the model back as it was when something inside raises: an optimizer that is refused, say. Only once."""
        try:
            yield
        except BaseException:
            for table, original in zip(self.tables, self._originals):
                table.parameter.data = original
            self._give_back()
            raise
        finally:
            self._originals = []

    def serve_with(self, service: RowService) -> None:
        """Gives the session what answers look-ups outside training steps; needed with more than one rank."""
        self._service = service

    # ---- one training step -------------------------------------------------------------------------------------

    def begin_training_step(self) -> None:
        """Call before the user's training step."""
        self.comm.at_step(self.step)
        self.sync_buffers()
        if not self._accumulating:
            # whatever changed the weights since the last step: rows fetched before it are not trusted
            for table in self.tables:
                table.forget()
        self._guard.watch()
        self._update_pending = False
        self._open_rounds()
        self.in_step = self.in_training_step = self._inside_training_step = True

    def end_training_step(self, backward_follows: bool) -> None:
        """Call after the user's training step.

        Args:
            backward_follows: Automatic optimization: backward will close the rounds. Else they are closed here.
        """
        if not backward_follows:
            self._close_rounds()
        self.in_step = self._inside_training_step = False
        self._buffers_may_differ = backward_follows

    def before_backward(self, synchronise: bool) -> None:
        """Call before a backward pass: answers the other ranks until all have left their forward pass.

        Args:
            synchronise: False while gradients are accumulated over several batches.
        """
        self._close_rounds()
        self.in_training_step = self.in_backward = True
        self._guard.expect()
        if synchronise:
            self._dense.begin()

    def after_backward(self, synchronise: bool) -> None:
        """Call after a backward pass: exchanges what it produced and puts averaged gradients into ``grad``.

        Args:
            synchronise: As in :meth:`before_backward`.
        """
        self._accumulating = not synchronise
        self.in_backward = False
        self._guard.arrived(synchronise)
        if synchronise:
            self._dense.send_rest()
            parts = (self._gradients, self._replicated)
            header = [value for part in parts for value in part.header()] + [int(self.wants_stop)]
            rows = self.comm.gather(torch.tensor(header), f"closing header of step {self.step}").tolist()
            self.stop_agreed = any([row.pop() for row in rows])
            size = self._gradients.header_size
            self._gradients.run([row[:size] for row in rows])
            self._replicated.run([row[size:] for row in rows])
            self._replicated_headers = [row[size:] for row in rows]
            self._dense.finish()
        else:
            self._buffers_may_differ = False
        self.in_training_step = self._inside_training_step
        if self.in_training_step:  # manual optimization: more look-ups may follow
            self._open_rounds()
        else:
            self._update_pending = synchronise

    def sync_buffers(self, act: Act = Act.STEP) -> None:
        """Gives every rank rank 0's buffers, where DDP would.

        That is not while gradients are accumulated, and not in manual optimization. Collective.
        """
        if self._buffers_may_differ:
            self._buffers_may_differ = False
            self._buffers.sync(act)

    def begin_validation(self) -> None:
        """Call before a validation run inside training. Collective."""
        self.sync_buffers(Act.VALIDATION)

    def leave_training_step(self) -> None:
        """Call when the user's training step found that there are no more batches. Collective."""
        act_together(self.comm, Act.DATA_END)
        self._rounds_are_closed()
        self.in_step = self._inside_training_step = False

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
            self.step += 1
            self.comm.traffic.steps += 1
            for table in tables:
                table.forget()
            self._advance()

        self._hooks.append(optimizer.register_step_post_hook(after))

    def meet(self) -> None:
        """Call before any other collective: inside a training step the ranks' look-ups come first."""
        if self.in_training_step and not self.in_backward:
            self._rounds.meet()

    def _open_rounds(self) -> None:
        self._rounds.begin_step(self.step, self.version)
        if self._service is not None:
            self._service.in_rounds(True)

    def _close_rounds(self) -> None:
        if self.in_training_step:
            self._rounds.drain(self._dense.fingerprint())
            self._rounds_are_closed()

    def _rounds_are_closed(self) -> None:
        self._rounds.open = self.in_training_step = False
        if self._service is not None:
            self._service.in_rounds(False)

    def _advance(self) -> None:
        self.version += 1
        self._update_pending = False
        if self._service is not None:
            self._service.advance()

    def usage(self) -> dict[str, Usage]:
        """What was looked up in the last backward pass' step, by table. Known between that and the optimizer's step."""
        rows = self._replicated.mean_rows(self._replicated_headers)
        return {t.name: usage_of(t) for t in self.tables} | {name: Usage(u, u, 0.0) for name, u in rows.items()}

    # ---- where rows come from (tables.lookup.Source) -------------------------------------------------------------

    def fetch_rows(self, table: ShardedTable, ids_U: Tensor) -> Tensor:
        """Rows of unique valid ids in full width, [U, D]."""
        self.check_alive(table)
        if self.in_training_step:
            return self._rounds.fetch_rows(table, ids_U)
        own = table.read(ids_U)
        if self._service is None:
            return own
        if self._update_pending:
            raise RuntimeError(
                f"A look-up in table {table.name!r} was made between backward and the optimizer's step, where other"
                " ranks may have stepped already. Make it in `training_step` or in `on_train_batch_end`."
            )
        blocks = self._service.fetch(table.index, table.name, ids_U.cpu(), table.widths, table.parameter.dtype)
        blocks[self.comm.rank] = own
        return torch.cat([blocks[r].to(own.device) for r in table.owners()], dim=1)

    def fetch_nothing(self) -> None:
        """Answers the others, where a look-up needs nothing of them."""
        self._rounds.join()

    def check_alive(self, table: ShardedTable) -> None:
        """Raises when training has ended with an exception and left the table sharded."""
        if self.released:
            raise RuntimeError(
                f"Table {table.name!r} is still sharded: the last fit ended with an exception and nothing was gathered"
                " after it. Build the model anew and load its last checkpoint."
            )

    def fetch_pooled(self, table: ShardedTable, request: PooledRequest) -> Tensor:
        """Sums or means of bags in full width, [B, D]."""
        return self._rounds.fetch_pooled(table, request)

    def refuse(self, table: ShardedTable, bad_id: int) -> None:
        """Raises IndexError; in a training step on every rank at once."""
        if self.in_training_step and not self.in_backward:
            self._rounds.refuse(table, bad_id)
        self._rounds.raise_bad_id(self.comm.rank, table, bad_id)

    @contextmanager
    def changing(self, table: ShardedTable) -> Iterator[None]:
        """A table's weights are loaded anew inside."""
        self.check_alive(table)
        if self._service is not None:
            self._service.change()
        yield
        table.forget()
        self._advance()

    # ---- state ---------------------------------------------------------------------------------------------------

    def full_state_dict(self, to_all: bool = False) -> dict[str, Tensor]:
        """The model's state dict with whole tables. Collective.

        Args:
            to_all: Every rank gets the whole tables; else rank 0 alone, and the others their own columns.

        Returns:
            The state dict.
        """
        act_together(self.comm, Act.STATE)
        shown: dict[int, Tensor] = {}
        for table in self.tables:
            full = gather_columns(self.comm, table, table.shard_Vd, to_all)
            # plain tensors everywhere: what callbacks do with a DTensor on some ranks only would be a collective
            shown[table.index] = table.shard_Vd if full is None else full
        self._shown = shown
        try:
            # the model's own `state_dict`, overridden or not, sees whole tables as in plain training
            return self.model.state_dict()
        finally:
            self._shown = {}

    def shown(self, table: ShardedTable) -> Tensor:
        """What a state dict holds for a table: the whole while it is gathered, else a DTensor of this rank's shard."""
        self.check_alive(table)
        shown = self._shown.get(table.index)
        return shard_as_dtensor(table) if shown is None else shown

    def full_optimizer_state(self, optimizer: Optimizer, to_all: bool = False) -> dict[str, object]:
        """An optimizer's state dict with whole tables, on rank 0 or on all ranks. Collective."""
        act_together(self.comm, Act.STATE)
        return gather_optimizer_state(self.comm, self.tables, optimizer, to_all)

    def unshard(self, optimizers: list[Optimizer]) -> None:
        """Puts whole tables and their optimizer state back, on every rank. Collective."""
        if self.released:  # the model was given back before
            return
        act_together(self.comm, Act.TEARDOWN)
        for optimizer in optimizers:
            restore_optimizer(self.comm, self.tables, optimizer)
        for table in self.tables:
            full = gather_columns(self.comm, table, table.shard_Vd, to_all=True)
            assert full is not None
            table.parameter.grad = None
            # on the CPU, where Lightning's teardown puts everything: one GPU may not hold the whole
            table.parameter.data = full
        self._give_back()

    def _give_back(self) -> None:
        self.release()
        for spec in self.specs:
            if spec.place == "sharded":
                for module in spec.lookups():
                    give_back(module)

    def release(self) -> None:
        """Removes the hooks; the tables stay as they are, and whatever reads them says so."""
        self.released = True
        self.in_step = self.in_training_step = self.in_backward = self._inside_training_step = False
        self._dense.remove_hooks()
        self._guard.remove_hooks()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _shard(self, index: int, spec: TableSpec, wire_dtype: torch.dtype | None) -> ShardedTable:
        """Turns a whole table into this rank's columns; Parameter and modules keep their identity."""
        comm, parameter = self.comm, spec.parameter
        parameter.grad = None
        _, columns = spec.shape
        table = ShardedTable(index, spec.name, parameter, spec.sparse, columns, comm.rank, comm.world_size, wire_dtype)
        self._originals.append(parameter.data)
        parameter.data = scatter_columns(comm, table, parameter.data)
        table.forget()
        handle = TableHandle(table, self)
        for module in spec.lookups():
            take_over(module, handle)
        self._hooks.append(parameter.register_post_accumulate_grad_hook(_refuse_gradient(spec.name)))
        return table


def _refuse_gradient(name: str) -> Callable[[Tensor], None]:
    def refuse(parameter: Tensor) -> None:
        raise RuntimeError(
            f"A gradient reached `{name}.weight` other than through the module's look-up (functional use, or a penalty"
            " over `parameters()`), but this rank holds only some columns of that table. Keep the table whole:"
            f" EmbRaceStrategy(tables=['*', '!{name}'])."
        )

    return refuse
