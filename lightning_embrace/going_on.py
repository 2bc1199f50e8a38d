"""Runs that go on exactly where they were: random numbers and loaders' positions are saved, and read again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from lightning_embrace.checkpoint.progress import (
    begin_next_epoch,
    epoch_of,
    is_after_last_batch,
    is_after_validation,
    iterates_again,
    loader_states,
    put_loader_states,
    rewind,
)
from lightning_embrace.checkpoint.random_states import random_states, set_random_states
from lightning_embrace.checkpoint.ranks import KEY, RankState, part_of
from lightning_embrace.lookahead.reasons import LoaderKind
from lightning_embrace.namespaces import Namespace

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as _Base
else:
    _Base = object

#: files that Lightning's tuners write and read again within one run, which is not another run that goes on
_TUNERS = (".lr_find_", ".scale_batch_size_")


@dataclass
class _Window:
    """Batches whose gradients are accumulated for one step of the optimizer.

    Attributes:
        start: What this rank had before the first of them.
        buffers: The model's buffers before it.
        batches: How many have begun.
        closes: The last of them has begun.
    """

    start: RankState
    buffers: dict[str, Tensor]
    batches: int = 0
    closes: bool = False


class GoingOnMixin(_Base):
    """What a strategy of the Trainer saves and reads beside the model and its optimizer."""

    namespace: ClassVar[Namespace]
    #: hears which loaders are processed
    _loader_kind: LoaderKind
    #: training goes on from a checkpoint, and has not begun yet
    _goes_on: bool = False
    _own_part: RankState | None = None
    #: what the training loaders go on from
    _loaded: list[Any] | None = None
    #: None: none has begun, or every batch ends in a step
    _window: _Window | None = None
    #: the loaders' states after the last batch of the window before
    _loaders_before: list[Any] | None = None

    # ---- saving ----------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Adds what each rank has for itself. Collective."""
        if "optimizer_states" in checkpoint and not _is_tuners(filepath):
            checkpoint[KEY] = self._gather_parts(self._part_to_save(checkpoint))
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _part_to_save(self, checkpoint: dict[str, Any]) -> RankState:
        window = self._window
        if window is None or window.closes:
            return {"random": random_states(self.root_device), "loaders": loader_states(checkpoint)}
        # gradients that wait for more are in no checkpoint: it says that their batches are still to come
        rewind(checkpoint, window.batches)
        put_loader_states(checkpoint, window.start["loaders"])
        # where averages stand in the weights' place, the weights stand beside them
        state_dict = checkpoint.get("current_model_state", checkpoint["state_dict"])
        state_dict.update({name: value for name, value in window.buffers.items() if name in state_dict})
        return window.start

    def _gather_parts(self, part: RankState) -> list[RankState] | None:
        """Every rank's part, on the rank that writes them."""
        return [part]

    def _own_place(self) -> tuple[int, int]:
        """This rank, and how many there are."""
        return 0, 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """While gradients are accumulated, remembers what was before the first batch that they are of."""
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.accumulate_grad_batches == 1:
            self._window = None
            return
        if self._window is None or self._window.closes:
            start = RankState(random=random_states(self.root_device), loaders=self._loaders_before)
            buffers = {name: buffer.clone() for name, buffer in self.lightning_module.named_buffers()}
            self._window = _Window(start, buffers)
        self._window.batches += 1
        self._window.closes = not trainer.fit_loop._should_accumulate()
        if self._window.closes:
            last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            self._loaders_before = None if last else trainer.fit_loop.on_save_checkpoint().get("combined_loader")

    # ---- going on --------------------------------------------------------------------------------------------------

    def load_checkpoint(  # type: ignore[override]  # `weights_only` came later than what we support
        self, checkpoint_path: Any, **options: Any
    ) -> dict[str, Any]:
        """Finds this rank's own part in a checkpoint with which training goes on."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, **options)
        assert self.lightning_module is not None
        trains = self.lightning_module.trainer.state.fn == "fit" and "optimizer_states" in checkpoint
        if trains and not _is_tuners(checkpoint_path):
            self._goes_on = True
            self._own_part, reason = part_of(checkpoint, *self._own_place())
            if self._own_part is not None:
                put_loader_states(checkpoint, self._own_part["loaders"])
            else:
                self.namespace.get("utilities.rank_zero.rank_zero_info")(
                    f"The checkpoint at {checkpoint_path} has no random states for these ranks: {reason}. Each rank"
                    " draws on with the generators that it has."
                )
            begin_next_epoch(checkpoint)
            self._loaded = loader_states(checkpoint)
        return checkpoint

    def process_dataloader(self, dataloader: Any) -> Any:
        """Training loaders of a run that goes on begin in its epoch, with its random numbers."""
        dataloader = super().process_dataloader(dataloader)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self._goes_on and self._loader_kind.is_training(trainer):
            self._set_epoch(dataloader, epoch_of(trainer.fit_loop))
            self._draw_on()
        return dataloader

    def on_train_start(self) -> None:
        """Training begins: batches and random numbers are those of the run that goes on."""
        super().on_train_start()
        assert self.lightning_module is not None
        loaded = self._go_on(self.lightning_module.trainer.fit_loop) if self._goes_on else None
        self._forget()
        self._loaders_before = loaded

    def _go_on(self, fit_loop: Any) -> list[Any] | None:
        """Puts right what Lightning's iterators are not, which it has made by now; what the loaders go on from."""
        if is_after_last_batch(fit_loop):
            return None  # they are the next epoch's
        if fit_loop.restarting and fit_loop._combined_loader_states_to_load:
            # set up for `trainer.estimated_stepping_batches`, before it was known what they go on from
            for dataloader in fit_loop._combined_loader.flattened:
                self._set_epoch(dataloader, fit_loop.epoch_progress.current.processed)
            fit_loop._load_combined_loader_states()
            iter(fit_loop._data_fetcher)
        if iterates_again(fit_loop):
            self._draw_on()
        if self._loaded and is_after_validation(fit_loop) and fit_loop._data_fetcher.length is None:
            # of a stream Lightning has fetched a batch already, and will not train on it
            fit_loop._combined_loader._load_state_dicts(self._loaded)
        return self._loaded if fit_loop.restarting else None

    def _set_epoch(self, dataloader: Any, epoch: int) -> None:
        # Lightning does it after it has made the iterator, and stateful loaders order their samples there
        self.namespace.get_fabric("utilities.data._set_sampler_epoch")(dataloader, epoch)

    def teardown(self) -> None:
        """The run is over."""
        self._forget()
        super().teardown()

    def _draw_on(self) -> None:
        if self._own_part is not None:
            set_random_states(self._own_part["random"], self.root_device)

    def _forget(self) -> None:
        self._goes_on, self._own_part, self._window = False, None, None
        self._loaded = self._loaders_before = None


def _is_tuners(path: Any) -> bool:
    return Path(str(path)).name.startswith(_TUNERS)
