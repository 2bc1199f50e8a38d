"""What the sample of the matrix promises."""

import itertools

from tests.exactness.cases import COLUMNS, MATRIX, MODELS, SCHEDULES, TRAININGS, WORLD_SIZES, Case
from tests.exactness.sample import HOROVOD_SAMPLE, SAMPLE


def pairs(cases: list[Case]) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """Every two settings that occur together in some case."""
    return {pair for case in cases for pair in itertools.combinations(case._asdict().items(), 2)}


def test_the_sample_covers_every_pair_of_settings() -> None:
    """An optimizer that fails with one kind of table, or at one N or D, is seen without the full matrix."""
    assert pairs(SAMPLE) == pairs(MATRIX)


def test_the_sample_is_part_of_the_matrix_without_repetition() -> None:
    assert set(SAMPLE) <= set(MATRIX)
    assert len(set(SAMPLE)) == len(SAMPLE)


def test_the_matrix_is_the_full_product() -> None:
    size = len(TRAININGS) * len(MODELS) * len(WORLD_SIZES) * len(COLUMNS) * len(SCHEDULES)
    assert len(set(MATRIX)) == len(MATRIX) == size


def test_the_sample_over_horovod() -> None:
    """Every schedule with every kind of table, several ranks each."""
    assert {(c.schedule, c.model) for c in HOROVOD_SAMPLE} == set(itertools.product(SCHEDULES, MODELS))
    assert set(HOROVOD_SAMPLE) <= set(MATRIX)
    assert {c.world_size for c in HOROVOD_SAMPLE} == {2, 3} and {c.columns for c in HOROVOD_SAMPLE} == set(COLUMNS)
