"""Where ranks meet that torchrun has started anew."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_embrace.elastic import attempt, store_of

RESTARTED = {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        (RESTARTED, "restart 2"),
        ({**RESTARTED, "TORCHELASTIC_RESTART_COUNT": "0"}, None),
        ({**RESTARTED, "TORCHELASTIC_USE_AGENT_STORE": "False"}, None),  # rank 0 makes a store each time
        ({**RESTARTED, "GROUP_WORLD_SIZE": "2"}, None),  # agents count each for itself
        ({}, None),
    ],
)
def test_attempt(environment: dict[str, str], name: str | None) -> None:
    """Regression: a rank read the address of one that had been killed, and was refused, at each restart."""
    assert attempt(environment) == name


def test_what_an_earlier_start_left_is_not_found() -> None:
    """The store is the agent's, and lives on."""
    agent = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    agent.set("address of rank 1", "dead")
    store = store_of("restart 1", "127.0.0.1", agent.port, 2, timedelta(seconds=5))
    assert not store.check(["address of rank 1"])
    store.set("address of rank 1", "alive")
    assert agent.get("address of rank 1") == b"dead" and store.get("address of rank 1") == b"alive"
