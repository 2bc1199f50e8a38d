"""The training loaders: they end together on all ranks, and say what the next batch will look up."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from lightning_embrace.config import EmbRaceConfig
from lightning_embrace.foresight import Known
from lightning_embrace.lookahead.ahead import Lookahead, Pair
from lightning_embrace.lookahead.ends import agree_length
from lightning_embrace.lookahead.loader import length_of
from lightning_embrace.lookahead.reasons import LoaderKind, fetches_itself, reason_off
from lightning_embrace.lookahead.source import Source, make_source
from lightning_embrace.mixin import Base
from lightning_embrace.namespaces import Namespace
from lightning_embrace.schedule.order import Schedule
from lightning_embrace.session import Session
from lightning_embrace.tables.headers import Act, act_together

#: loaders that have no length, in the ranks' headers
_NO_LENGTH = -1


class BatchesMixin(Base):
    """What a strategy has to do with batches before they are trained on."""

    namespace: ClassVar[Namespace]
    config: EmbRaceConfig
    _session: Session | None
    _loader_kind: LoaderKind
    _lookahead: Lookahead | None
    _source: Source
    _pair: Pair
    #: why the next batch's ids cannot be known
    _blind_because: str | None

    def _look_ahead(self, session: Session, trainer: Any) -> None:
        """Call when the session is there, before any training loader is."""
        self._lookahead, self._pair = None, Pair()
        self._blind_because = self._why_blind(trainer)
        blind = self._blind_because is not None
        names, rows = [t.name for t in session.tables], [t.rows for t in session.tables]
        self._source = make_source("off" if blind else self.config.lookahead, names, rows)
        if self.world_size == 1 or fetches_itself(trainer):
            return
        session.look_ahead(blind)
        self._lookahead = Lookahead(self._ask, self.namespace.warn, self.config.uneven_loaders)

    def _why_blind(self, trainer: Any) -> str | None:
        module = self.lightning_module
        assert module is not None
        if self.config.lookahead == "off":
            return "lookahead='off'"
        if not Schedule.of(self.config.schedule).ahead:
            return f"schedule={self.config.schedule!r} has no use for it"
        if not module.automatic_optimization:
            return "optimization is manual"
        return reason_off(trainer, learns=self.config.lookahead == "auto")

    def process_dataloader(self, dataloader: Any) -> Any:
        """Wraps training loaders. Collective for them."""
        dataloader = super().process_dataloader(dataloader)
        if self._lookahead is None or self.lightning_module is None:
            return dataloader
        trainer = self.lightning_module.trainer
        if not self._loader_kind.is_training(trainer):
            return dataloader
        length = length_of(dataloader)
        lengths = [n for [n] in self._tell([_NO_LENGTH if length is None else length])]
        allow_empty = self.lightning_module.allow_zero_length_dataloader_with_multiple_devices
        agreed = agree_length([None if n == _NO_LENGTH else n for n in lengths], allow_empty)
        if agreed.warning is not None:
            if self.config.uneven_loaders == "raise":
                raise ValueError(f"EmbRaceStrategy(uneven_loaders='raise'): {agreed.warning}")
            self.namespace.warn(agreed.warning)
        return self._lookahead.process(
            dataloader, agreed.length, trainer.limit_train_batches, ahead=self._blind_because is None
        )

    def barrier(self, name: str | None = None) -> None:
        """Lightning names its barriers by what it is about to do with loaders."""
        self._loader_kind.hear(name)
        super().barrier(name)  # type: ignore[safe-super]  # the strategy's own comes behind this part of it

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """The next batch is known by now."""
        super().on_train_batch_start(batch, batch_idx)
        if self._lookahead is not None:
            assert self.lightning_module is not None
            self._pair = self._lookahead.next_batch(self.lightning_module.trainer.train_dataloader)
            self._source.note(self._pair.current)

    def _known(self) -> Known | None:
        """What this rank tells the others when a step begins."""
        if self._lookahead is None or self._session is None:
            return None
        tables = self._session.tables
        ids: list[Tensor | None] = [None for _ in tables]
        if self._pair.known:
            foreseen = self._source.ids(self._pair.successor)
            ids = [None if (i := foreseen[t.index]) is None else i.to(t.parameter.device) for t in tables]
        self._session.record_lookups(self._source.learning)
        return Known(ids, self._lookahead.word())

    def _told(self) -> None:
        """A step has begun: all ranks know of each other's loaders."""
        if self._lookahead is not None and self._session is not None and self._session.foresight is not None:
            self._lookahead.hear(self._session.foresight.words)

    def _looked_up(self) -> None:
        """A forward pass is over: what it looked up is known."""
        if self._lookahead is None or self._session is None:
            return
        for index, foreseen in self._session.foreseen().items():
            self._source.checked(index, foreseen)
        if self._source.learning:
            self._source.observe(self._session.looked_up())

    def _let_loaders_go(self) -> None:
        if self._lookahead is not None:
            self._lookahead.reset()
        self._lookahead, self._pair = None, Pair()

    def _ask(self, exists: bool) -> list[bool]:
        return [bool(bit) for [bit] in self._tell([int(exists)])]

    def _tell(self, words: list[int]) -> list[list[int]]:
        assert self._session is not None
        return act_together(self._session.comm, Act.LOADER, words)
