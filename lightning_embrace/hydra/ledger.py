"""Exact accounts of what each tier holds, with a limit that is never crossed."""

from __future__ import annotations

from collections import defaultdict

from lightning_embrace.hydra.sizes import human


class BudgetError(RuntimeError):
    """More would be held than the budget allows: the plan was wrong, or what runs is not what was planned."""


class Ledger:
    """What one tier holds, by purpose.

    Args:
        tier: ``"device"``, ``"host"`` or ``"disk"``.
        limit: Bytes, or None: no limit.
    """

    def __init__(self, tier: str, limit: int | None) -> None:
        self.tier = tier
        self.limit = limit
        self.held: defaultdict[str, int] = defaultdict(int)
        #: the most that was ever held
        self.peak = 0

    @property
    def total(self) -> int:
        """Bytes that are held now."""
        return sum(self.held.values())

    def fits(self, nbytes: int) -> bool:
        """Whether so many more would keep the limit."""
        return self.limit is None or self.total + nbytes <= self.limit

    def take(self, purpose: str, nbytes: int) -> None:
        """Enters bytes, before they are allocated.

        Args:
            purpose: What for.
            nbytes: How many; the same number is given back later.

        Raises:
            BudgetError: They would cross the limit.
        """
        total = self.total + nbytes
        if self.limit is not None and total > self.limit:
            held = ", ".join(f"{name} {human(count)}" for name, count in sorted(self.held.items()) if count)
            raise BudgetError(
                f"{purpose}: {human(nbytes)} more on the {self.tier} would make {human(total)}, and its budget is"
                f" {human(self.limit)} (held: {held or 'nothing'}). Give {self.tier}_memory more."
            )
        self.held[purpose] += nbytes
        self.peak = max(self.peak, total)

    def give(self, purpose: str, nbytes: int) -> None:
        """Takes bytes off the account, after they are freed."""
        assert self.held[purpose] >= nbytes, f"{purpose}: more given back than taken"
        self.held[purpose] -= nbytes
