"""Which tasks follow from a config."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_embrace.fleet.specs import SpecError, specs_of

COMMON = {"model": {"class_path": "m.A", "init_args": {"dim": 4, "lr": 1}}, "trainer": {"max_epochs": 2}}


def test_common_parts() -> None:
    """A task's own arguments go before common ones; those of another class are not mixed in."""
    own = [
        {"name": "a", "model": {"init_args": {"lr": 3}}, "trainer": {"max_steps": 5}},
        {"model": {"class_path": "m.B", "init_args": {"size": 1}}, "data": {"class_path": "d.D"}},
        {"name": "c", "model": {"class_path": "m.A"}},
    ]
    found = specs_of(COMMON, own, {})
    assert found == {
        "a": {
            "model": {"class_path": "m.A", "init_args": {"dim": 4, "lr": 3}},
            "trainer": {"max_epochs": 2, "max_steps": 5},
        },
        "task-1": {
            "model": {"class_path": "m.B", "init_args": {"size": 1}},
            "trainer": {"max_epochs": 2},
            "data": {"class_path": "d.D"},
        },
        "c": COMMON,
    }


def test_grid() -> None:
    """Each task once for each combination, with names that say which; what they share is not one object."""
    grid = {"model.init_args.lr": [1, 2], "strategy.blocks": [["a.*"]]}
    found = specs_of(COMMON, [], grid)
    assert list(found) == ["lr=1,blocks=__a.*__".replace("*", "_"), "lr=2,blocks=__a.___"]
    first, second = found.values()
    assert second["model"]["init_args"] == {"dim": 4, "lr": 2} and second["strategy"] == {"blocks": ["a.*"]}
    assert first["model"]["init_args"]["lr"] == 1 and COMMON["model"]["init_args"]["lr"] == 1  # type: ignore[index]
    assert list(specs_of(COMMON, [{"name": "a"}, {}], {"trainer.max_epochs": [1, 2]})) == [
        "a,max_epochs=1",
        "a,max_epochs=2",
        "task-1,max_epochs=1",
        "task-1,max_epochs=2",
    ]
    alike = specs_of(COMMON, [], {"model.init_args.seed": [1], "data.init_args.seed": [2]})
    assert list(alike) == ["model.init_args.seed=1,data.init_args.seed=2"]
    assert list(specs_of(COMMON, [], {})) == ["task-0"]


@pytest.mark.parametrize(
    ("tasks", "grid", "said"),
    [
        ([{"modle": {}}], {}, r"tasks\[0\] is \{'modle': \{\}\}. Write a mapping; allowed are name, model"),
        (["a"], {}, r"tasks\[0\] is 'a'"),
        ([{"name": "a"}, {"name": "a"}], {}, "two are named 'a'"),
        ([], {"lr": [1]}, "grid: 'lr' is no argument of a task"),
        ([], {"model.class_path.x": [1]}, "goes through 'class_path', which is 'm.A'"),
        ([], {"trainer.max_epochs": 3}, "trainer.max_epochs is 3. Write a list of values"),
        ([], {"trainer.max_epochs": []}, "Write a list of values"),
    ],
    ids=str,
)
def test_refused(tasks: list[Any], grid: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        specs_of(COMMON, tasks, grid)
