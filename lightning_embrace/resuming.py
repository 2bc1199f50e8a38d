"""Runs of several ranks that go on exactly where they were: what belongs to one rank is saved for each of them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_embrace.checkpoint.other_rows import explain_mismatch, refuse_other_rows
from lightning_embrace.checkpoint.ranks import RankState
from lightning_embrace.distributed import DistributedMixin
from lightning_embrace.going_on import GoingOnMixin


class ResumingMixin(GoingOnMixin, DistributedMixin):
    """What a strategy of the Trainer saves and reads beside tables and optimizer states."""

    def _gather_parts(self, part: RankState) -> list[RankState] | None:
        """Every rank's part on rank 0, which writes them."""
        if not dist.is_initialized():
            return [part]
        parts: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
        with self._naming("states of the ranks"):
            dist.gather_object(part, parts, dst=0)
        return parts

    def _own_place(self) -> tuple[int, int]:
        return self.global_rank, self.world_size

    # ---- tables of another size ------------------------------------------------------------------------------------

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Where a table has another number of rows, the error says what to do."""
        assert self.lightning_module is not None
        try:
            super().load_model_state_dict(checkpoint, strict=strict)
        except RuntimeError as error:
            explain_mismatch(self.lightning_module, checkpoint["state_dict"], error)
            raise

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """The same for states of tables."""
        assert self.lightning_module is not None
        refuse_other_rows(self.lightning_module, self.optimizers, checkpoint["optimizer_states"])
        super().load_optimizer_state_dict(checkpoint)
