"""A process whose loop is over leaves nothing behind that could hurt it, or others, on its way out."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.exactness import story as s
from tests.fabric.loops import Tools, ids, launched, loader, make, make_strategy, plain, this_rank
from tests.support.ranks import Ranks

STEPS = 6


def threads(data: s.Steps, leaves: int) -> list[bool]:
    """Whether the thread that answers look-ups is there: after training, and when the rank has left that leaves."""
    strategy = make_strategy("embrace", lookahead=ids)
    fabric = launched(strategy, len(data[0]))
    batches = fabric.setup_dataloaders(loader(data), use_distributed_sampler=False)
    module = make()
    model, optimizer = fabric.setup(module, torch.optim.Adagrad(module.parameters(), lr=0.1))
    plain(Tools(fabric, model, optimizer, batches, []))
    thread = strategy._service._thread
    alive = [thread.is_alive()]
    if this_rank() == leaves:
        strategy._leave()
    return [*alive, thread.is_alive()]


def test_no_thread_waits_inside_of_torch(ranks: Callable[[int], Ranks]) -> None:
    """Regression: every second process of a loop that had just trained ended with SIGABRT, "terminate called without an
    active exception": the other rank's farewell woke that thread when the interpreter had gone."""
    seen = ranks(3).run(threads, s.drawn(STEPS, 3), 1)
    ranks(3).stop()  # the threads of the others have nobody to end them
    assert seen == [[True, True], [True, False], [True, True]]
