"""What these tests leave as they found it, and what they run with: one thread, as the models are too small for more."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Plain runs and ours alike: the number of threads changes sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    """A run whose teardown raises, as some of these do, ends before Lightning gives its signal handlers back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
