"""What Lightning saves and loads of a spilled model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from lightning_embrace.checkpoint.agreement import CheckpointError, write_together
from lightning_embrace.checkpoint.atomic import local_path
from lightning_embrace.checkpoint.io import AtomicFilesMixin, plain_ios
from lightning_embrace.checkpoint.mapped import MappedFile
from lightning_embrace.checkpoint.readers import reader_at, readers_above
from lightning_embrace.checkpoint.reading import read_file
from lightning_embrace.checkpoint.span import span
from lightning_embrace.hydra.loading import copied_from
from lightning_embrace.hydra.session import Session
from lightning_embrace.hydra.stepper import Stepper
from lightning_embrace.hydra.writing import StreamedSave
from lightning_embrace.memory import available_bytes, check_room
from lightning_embrace.namespaces import Namespace

if TYPE_CHECKING:
    from lightning.pytorch.strategies import SingleDeviceStrategy as _Base
else:
    _Base = object


class SavingMixin(AtomicFilesMixin, _Base):
    """State dicts and checkpoint files of a strategy."""

    namespace: ClassVar[Namespace]
    _session: Session | None
    _stepper: Stepper | None
    #: some parameters have made a step that others have not, and training is over
    _torn: bool
    #: files that were written and not removed, the last one at the end
    _checkpoints: list[str]
    #: a file that is being made
    _save: StreamedSave | None = None
    _said: frozenset[str] = frozenset()
    #: what is being loaded, if it is mapped
    _read_from: MappedFile | None = None

    def connect(self, model: Any) -> None:
        """Lightning is about to begin: from here on a save is known from its beginning to its end."""
        super().connect(model)
        if model._trainer is not None:
            span(model.trainer, self._saves)

    # ---- saving ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _saves(self, path: Any, weights_only: bool | None = None, storage_options: Any = None) -> Iterator[None]:
        """The Trainer saves a checkpoint inside."""
        self._check_whole(path)
        session = self._session
        if session is None:
            yield
            return
        session.settle()
        reader = "storage_options" if storage_options is not None else self._reader(session, path)
        if reader is not None:
            self._check_memory(session, reader)
            yield
            return
        self._save = StreamedSave(session)
        session.state_dicts.leave = self._save.leave_parameter
        try:
            yield
        finally:
            self._save = session.state_dicts.leave = None

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What Lightning saves of an optimizer: true numbers, or holes while it saves a file."""
        if self._stepper is None:
            return super().optimizer_state(optimizer)
        return self._stepper.state_dict(None if self._save is None else self._save.leave)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes the file.

        Raises:
            CheckpointError: It could not be written, or some parameters have made a step that others have not.
        """
        self._check_whole(filepath)
        self._write(checkpoint, filepath, storage_options)
        self._checkpoints.append(str(filepath))

    def _write(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        if self._save is not None and self._save.hollow:
            write = partial(self._save.write, checkpoint, str(local_path(filepath)))
        else:
            write = partial(super().save_checkpoint, checkpoint, filepath, storage_options=storage_options)
        write_together(alone, str(filepath), write, self._last)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a file."""
        super().remove_checkpoint(filepath)
        self._forget_checkpoint(filepath)

    def _forget_checkpoint(self, filepath: Any) -> None:
        self._checkpoints = [path for path in self._checkpoints if path != str(filepath)]

    @property
    def _last(self) -> str | None:
        return self._checkpoints[-1] if self._checkpoints else None

    def _check_whole(self, path: Any) -> None:
        if self._torn or (self._stepper is not None and self._stepper.torn):
            raise CheckpointError(
                f"HydraStrategy: {path} is not written. An optimizer step was interrupted after some blocks and before"
                " others, and a file with such parameters would look like any other."
                f" {f'Go on from the last whole one: {self._last}.' if self._last else 'No other was written before.'}"
            )

    def _reader(self, session: Session, path: Any) -> str | None:
        """Who is given all values of a checkpoint at once before it is written to this path.

        A hook that is given the checkpoint (``on_save_checkpoint``) may read holes, one by one.
        """
        assert self.lightning_module is not None
        return self._reader_of_file(path) or _reader_of_state(session, self.lightning_module)

    def _check_reader(self, session: Session, trainer: Any) -> None:
        """Refuses, before training, checkpoints for which there is no room in memory."""
        if trainer.checkpoint_callbacks:
            reader = self._reader(session, trainer.default_root_dir)
            if reader is not None:
                self._check_memory(session, reader)

    def _reader_of_file(self, path: Any) -> str | None:
        return reader_at(self.checkpoint_io, path, plain_ios(self.namespace))

    def _check_memory(self, session: Session, reader: str) -> None:
        """Refuses to put together what has no room, and says once that it is put together."""
        need = sum(u.weights.nbytes + u.states.nbytes for u in session.units if u.place != "device")
        if not need:
            return
        check_room(
            need,
            available_bytes(),
            f"HydraStrategy: to put a checkpoint together in memory, since {reader} is given its values,",
            "Save without it: files are streamed then.",
        )
        if reader not in self._said:
            self._said |= {reader}
            self.namespace.get("utilities.rank_zero.rank_zero_info")(
                f"HydraStrategy: checkpoints are put together in memory, since {reader} is given their values."
            )

    # ---- loading ---------------------------------------------------------------------------------------------------

    def load_checkpoint(  # type: ignore[override]  # `weights_only` came later than what we support
        self, checkpoint_path: Any, **options: Any
    ) -> dict[str, Any]:
        """Reads a checkpoint; what may be larger than memory stays in the file until it is copied from there.

        Raises:
            CheckpointError: It is damaged, or no checkpoint.
        """
        path = str(checkpoint_path)
        plain = type(self.checkpoint_io) in plain_ios(self.namespace)
        load = partial(super().load_checkpoint, checkpoint_path, **options)
        try:
            read = read_file(path, plain, lambda _: True, options.get("weights_only"), load)
        except CheckpointError as error:
            raise CheckpointError(f"The checkpoint {path} cannot be read: {error}") from error
        self._read_from = read.file
        return read.content

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads weights. Pages of the file that were copied leave memory."""
        assert self.lightning_module is not None
        with copied_from(self._read_from, self.lightning_module, checkpoint["state_dict"]):
            super().load_model_state_dict(checkpoint, strict=strict)
        if self.lightning_module.trainer.state.fn != "fit":
            self._read_from = None

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizer's state, and moves it to where its parameters are."""
        file, self._read_from = self._read_from, None
        if self._stepper is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        to_device = self.namespace.get_fabric("utilities.optimizer._optimizer_to_device")
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            self._stepper.load_state_dict(state, None if file is None else file.let_go)
            to_device(optimizer, self.root_device)


def _reader_of_state(session: Session, model: nn.Module) -> str | None:
    """Who is given numbers of the store while the model's state dict is made."""
    holders = [
        (name, module)
        for name, module in model.named_modules()
        if any(p is not None and session.find(p) is not None for p in module._parameters.values())
    ]
    for name, module in holders:
        if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:
            return f"`_save_to_state_dict` of {name} ({type(module).__name__})"
    return next(readers_above(model, [name for name, _ in holders], _reads_nothing(session)), None)


def _reads_nothing(session: Session) -> Any:
    # torch's own, such as that of spectral_norm, add versions to the metadata
    return lambda hook: session.state_dicts.is_own(hook) or type(hook).__module__.startswith("torch.nn.")


def alone(words: list[int | str], what: str) -> list[list[Any]]:
    """There are no other ranks to be told."""
    return [words]
