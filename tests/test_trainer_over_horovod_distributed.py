"""What the Trainer offers, over Horovod: a sample of the tests that run over torch.distributed, by their own checks.

``make trainer-horovod`` runs all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_embrace import EmbRaceStrategy
from tests import test_averaging_distributed as averaging
from tests import test_clipping_distributed as clipping
from tests import test_construction_distributed as construction
from tests import test_monitoring_distributed as monitoring
from tests import test_optimizers_distributed as optimizers
from tests import test_precision_distributed as precision
from tests.support.ranks import Ranks
from tests.tables import test_compile_distributed as compiled
from tests.tables import test_recomputation_distributed as recomputation

pytestmark = pytest.mark.horovod
Pools = Callable[[int], Ranks]


def communication() -> str:
    """Runs in a worker."""
    return EmbRaceStrategy().config.communication


def test_the_workers_use_horovod(ranks_over_horovod: Pools) -> None:
    """What follows would prove nothing otherwise."""
    assert ranks_over_horovod(2).run(communication) == ["horovod", "horovod"]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(ranks_over_horovod: Pools, algorithm: str) -> None:
    """The norm is that of all columns; dense and sparse gradients."""
    clipping.test_sparse_gradients(ranks_over_horovod, algorithm, "2d", 3, 2)
    clipping.test_equals_ddp(ranks_over_horovod, 2, algorithm)


def test_one_rank_overflows(ranks_over_horovod: Pools) -> None:
    """All skip the same step in 16-mixed, and have equal scales."""
    precision.test_one_rank_overflows(ranks_over_horovod, 3, "2d", True)


@pytest.mark.parametrize("of", ["64-true", "bf16-mixed", "16-true"])
def test_precision(ranks_over_horovod: Pools, of: str) -> None:
    """As ddp, in dtypes that Horovod knows and in those that it does not."""
    precision.check(ranks_over_horovod, of, True, "sgd", 2, 10, "2d")


@pytest.mark.parametrize(
    "name", ["two optimizers, toggled", "two backward passes, sparse", "accumulation by hand, sparse"]
)
def test_manual_optimization(ranks_over_horovod: Pools, name: str) -> None:
    """Exchanges between the steps of several optimizers."""
    optimizers.check(ranks_over_horovod, name, 2, "2d")


def test_recomputation(ranks_over_horovod: Pools) -> None:
    """Nothing is exchanged twice."""
    recomputation.compare(ranks_over_horovod, "nested", "2d", 2, "auto", 2, True)


def test_compiled_parts(ranks_over_horovod: Pools) -> None:
    """Look-ups between graphs."""
    compiled.test_a_compiled_part(ranks_over_horovod, "the_parts", True, "2d")


def test_tables_built_as_columns(ranks_over_horovod: Pools) -> None:
    """In `configure_model`, on ranks that own no column too."""
    arguments: dict[str, Any] = {"columns": 2, "sparse": True, "optimizer": "sparseadam"}
    construction.test_equals_ddp(ranks_over_horovod, 3, arguments)


def test_averages(ranks_over_horovod: Pools) -> None:
    """Of sharded tables, on three ranks."""
    averaging.test_equals_ddp_at_three_ranks_under_other_schedules(ranks_over_horovod, "fifo")


def test_the_monitor_counts(ranks_over_horovod: Pools, tmp_path: Path) -> None:
    """Unique, prior and early shares are those of the batches."""
    monitoring.test_shares_are_those_of_the_batches(ranks_over_horovod, tmp_path)
