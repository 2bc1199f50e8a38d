"""Fits that save and go on, run under ddp and under ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.lifecycle import assert_same, loader, make_model, make_strategy, make_trainer, results
from tests.support.ranks import Ranks

SHARDED = functools.partial(make_strategy, "embrace", state_dict_type="sharded")


def strategy_of(name: str) -> Any:
    """``"sharded"``, the same over ``"horovod"``, ``"embrace"`` (full checkpoints), or one of Lightning's."""
    if name == "horovod":
        return SHARDED(communication="horovod")
    return SHARDED() if name == "sharded" else make_strategy(name)


@functools.cache
def saved_by_both(
    save: Callable[..., Any], ours: str, get_ranks: Callable[[int], Ranks], parent: Path, arguments: tuple[Any, ...]
) -> tuple[Path, Path, Any]:
    """Folders with DDP's checkpoints and ours, and the results of these runs, which are equal.

    Args:
        save: Is given a strategy's name, the folder and the arguments, in a worker.
        ours: The name of our strategy.
        get_ranks: The fixture ``ranks``.
        parent: Where the folders are made.
        arguments: The last one is the number of ranks.
    """
    folders = parent / "ddp", parent / "embrace"
    run = get_ranks(arguments[-1]).run
    expected = run(save, "ddp", str(folders[0]), *arguments)
    assert_same(run(save, ours, str(folders[1]), *arguments), expected)
    return *folders, expected


def resume(strategy: str, path: str, columns: int, sparse: bool, optimizer: str, world_size: int) -> Any:
    """Goes on from a checkpoint with a model of other weights, to the end of the second epoch and one more."""
    model = make_model(columns, sparse, optimizer, seed=77)
    trainer = make_trainer(strategy_of(strategy), world_size, max_epochs=3)
    trainer.fit(model, loader(3, 0, world_size), loader(2, 5, world_size), ckpt_path=path, weights_only=True)
    return results(model, trainer), trainer.global_step, trainer.current_epoch
