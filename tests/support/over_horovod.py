"""Any test of the suite with Horovod in the place of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.ranks import Ranks


def with_horovod(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs in a worker: every ``EmbRaceStrategy`` that does not say how it communicates does so over Horovod."""
    from lightning_embrace import EmbRaceStrategy

    defaults: dict[str, Any] = EmbRaceStrategy.__init__.__kwdefaults__
    assert defaults["communication"] == "torch"
    defaults["communication"] = "horovod"
    try:
        return function(*args, **kwargs)
    finally:
        defaults["communication"] = "torch"


class OverHorovod(Ranks):
    """Worker processes in which everything runs over Horovod."""

    def try_run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any
    ) -> list[tuple[bool, Any]]:
        """As there."""
        return super().try_run(with_horovod, function, *args, timeout=timeout, **kwargs)
