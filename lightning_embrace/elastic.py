"""Under torchrun: where ranks that were started anew meet."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]


def attempt(environment: Mapping[str, str]) -> str | None:
    """What distinguishes this start of all ranks from the one before, where they meet in the same store.

    torchrun keeps its store from start to start, and torch.distributed writes under the same keys: a rank may read the
    address of one that is dead, and be refused. Agents on several machines count their restarts each for itself, so
    that their ranks would not meet under a number: there it stays as torch has it.

    Args:
        environment: The process' environment.

    Returns:
        A prefix for the keys, None: none is needed, or there is none.
    """
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    kept = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    alone = environment.get("GROUP_WORLD_SIZE", "1") == "1"
    return f"restart {restarts}" if kept and alone and restarts != "0" else None


def store_of(name: str, address: str, port: int, world_size: int, timeout: timedelta) -> Store:
    """The agent's store, with keys of one attempt."""
    return PrefixStore(name, TCPStore(address, port, world_size, is_master=False, timeout=timeout))
