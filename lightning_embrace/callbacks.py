"""Lightning's own callbacks that would meet shards where they expect whole tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, ClassVar

from torch import nn

from lightning_embrace.checkpoint.full import FullSave
from lightning_embrace.config import EmbRaceConfig
from lightning_embrace.copies import Copy, agree_on_copies
from lightning_embrace.mixin import Base
from lightning_embrace.model_summary import WholeSizes
from lightning_embrace.namespaces import Namespace
from lightning_embrace.overlay import Overlay
from lightning_embrace.refusals import check_callbacks_anywhere
from lightning_embrace.session import Session
from lightning_embrace.tables.headers import Act

#: by averaging callback, the hooks that exchange the model's weights for averaged ones, or back
_REWRITING = {
    "WeightAveraging": ("on_validation_epoch_start", "on_validation_epoch_end", "on_train_end"),
    "StochasticWeightAveraging": ("on_train_epoch_start", "on_train_end"),
}
#: those that read the model's weights and change none
_READING = {"WeightAveraging": ("on_train_batch_end", "on_train_epoch_end"), "StochasticWeightAveraging": ()}
#: and the one that hands out a state dict of the averages
_SAVING = {"WeightAveraging": "on_save_checkpoint", "StochasticWeightAveraging": "state_dict"}

Around = Callable[..., AbstractContextManager[Any]]


class CallbacksMixin(Base):
    """Lays what they need over the callbacks of a Trainer while tables are sharded."""

    namespace: ClassVar[Namespace]
    config: EmbRaceConfig
    _save: FullSave | None
    _overlay: Overlay | None = None
    _copies: Sequence[Copy] = ()

    def connect(self, model: Any) -> None:
        """Lightning is about to begin; no rank has met another yet."""
        super().connect(model)
        if model._trainer is not None:
            check_callbacks_anywhere(model.trainer.callbacks, self.namespace)

    def _take_callbacks(self, session: Session, trainer: Any) -> None:
        """Call when the model is sharded. Collective."""
        self._overlay = overlay = Overlay()
        averaging = [(name, c) for name in _REWRITING for c in trainer.callbacks if self._is_a(c, name)]
        kept = {id(c): _copies_in(c, trainer.lightning_module) for _, c in averaging}
        agree_on_copies(session.comm, sum(map(len, kept.values())))
        self._copies = []
        for name, callback in averaging:
            whose = type(callback).__name__
            copies = [Copy(model, session.specs, session.comm, whose) for model in kept[id(callback)]]
            self._copies.extend(copies)
            for hook in _REWRITING[name]:
                _lay(overlay, callback, hook, partial(_rewriting, session, hook))
            for hook in _READING[name]:
                if not self._overrides(callback, name, hook):
                    _lay(overlay, callback, hook, partial(_reading, session))
            if self.config.state_dict_type == "full":
                _lay(overlay, callback, _SAVING[name], partial(self._whole, copies))
        for callback in trainer.callbacks:
            if self._is_a(callback, "ModelPruning"):
                _lay(overlay, callback, "on_save_checkpoint", _with_gathered_state)
            if self._is_a(callback, "ModelSummary"):
                self._show_whole_sizes(overlay, callback, session)

    def _what_follows(self, synchronise: bool) -> tuple[bool, bool]:
        """Whether backward follows a training step, and whether the optimizer steps without it.

        No backward is there in manual optimization, nor in the pass with which StochasticWeightAveraging ends for batch
        statistics; there the optimizer steps on the last batch.

        Args:
            synchronise: No more batches are accumulated.
        """
        module = self.lightning_module
        assert module is not None
        automatic, skips = module.automatic_optimization, module.trainer.fit_loop._skip_backward
        return automatic and not skips, automatic and skips and synchronise

    @contextmanager
    def _whole(self, copies: Sequence[Copy], *_: object) -> Iterator[None]:
        """State dicts of copies have whole tables, or holes where those of the model have them."""
        leave = self._save.leave if self._save is not None else None
        with ExitStack() as stack:
            for copy in copies:
                stack.enter_context(copy.whole(leave=leave))
            yield

    def _is_a(self, callback: Any, name: str) -> bool:
        cls = getattr(self.namespace.get("callbacks"), name, None)  # older releases do not have all of them
        return cls is not None and isinstance(callback, cls)

    def _overrides(self, callback: Any, name: str, hook: str) -> bool:
        return getattr(type(callback), hook) is not getattr(self.namespace.get(f"callbacks.{name}"), hook)

    def _show_whole_sizes(self, overlay: Overlay, callback: Any, session: Session) -> None:
        readable = self.namespace.get("utilities.model_summary.model_summary.get_human_readable_count")
        summary_of = callback._summary

        def summary(trainer: Any, module: nn.Module) -> WholeSizes:
            return WholeSizes(summary_of(trainer, module), module, session.tables, readable)

        overlay.lay(callback, "_summary", summary)

    def _gather_copies(self) -> None:
        """At an orderly end: copies are whole again. Collective."""
        for copy in self._copies:
            copy.unshard()
        self._copies = ()

    def _give_callbacks_back(self) -> None:
        if self._overlay is not None:
            self._overlay.remove()
        for copy in self._copies:
            copy.release()
        self._overlay, self._copies = None, ()


def _lay(overlay: Overlay, owner: Any, name: str, around: Around) -> None:
    """Makes a method of one object run inside a context, which is given the method's arguments."""
    method = getattr(owner, name)

    @wraps(method)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with around(*args):
            return method(*args, **kwargs)

    overlay.lay(owner, name, inside)


@contextmanager
def _rewriting(session: Session, hook: str, *_: object) -> Iterator[None]:
    with session.rows.rewriting():
        yield
    if hook == "on_validation_epoch_start":
        # with rank 0's buffers, averaged or not, as under DDP
        session.sync_buffers(Act.VALIDATION, anyway=True)


@contextmanager
def _reading(session: Session, *_: object) -> Iterator[None]:
    """Whoever reads a weight may have changed it, so that rows that came early are fetched anew; this one has not."""
    foresight = session.foresight
    moved = foresight is not None and foresight.moved
    yield
    if foresight is not None:
        foresight.moved = moved


@contextmanager
def _with_gathered_state(trainer: Any, module: nn.Module, checkpoint: dict[str, Any]) -> Iterator[None]:
    """The model's state dict is the one in the checkpoint: whole."""
    overlay = Overlay()
    overlay.lay(module, "state_dict", lambda *_, **__: checkpoint["state_dict"].copy())
    try:
        yield
    finally:
        overlay.remove()


def _copies_in(callback: Any, model: nn.Module) -> list[nn.Module]:
    """Copies of a model that a callback keeps, wrapped (``AveragedModel``) or not."""
    kept = (value for value in vars(callback).values() if isinstance(value, nn.Module))
    return [part for value in kept for part in value.modules() if type(part) is type(model)]
