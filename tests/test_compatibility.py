"""``docs/compatibility.md`` says of all that Lightning has what tests prove."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from lightning.pytorch import Trainer, callbacks

ROOT = Path(__file__).parents[1]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compatibility", ROOT / "docs" / "compatibility.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DECLARED = _load()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def what_is_missing(test: str) -> str | None:
    """What of ``file::function[case]`` does not exist; a case's name stands in its file as a string."""
    found = re.fullmatch(r"(?P<file>[^:]+)::(?P<function>\w+)(\[(?P<case>.+)\])?", test)
    if found is None:
        return "not a test's name"
    path = ROOT / found["file"]
    if not path.exists():
        return f"no file {path}"
    functions = [node.name for node in _tree(path).body if isinstance(node, ast.FunctionDef)]
    if found["function"] not in functions:
        return f"no function {found['function']}"
    strings = {node.value for node in ast.walk(_tree(path)) if isinstance(node, ast.Constant)}
    if found["case"] is not None and found["case"] not in strings:
        return f"no case {found['case']}"
    return None


def test_every_argument_of_the_trainer_is_declared() -> None:
    """A new release of Lightning may have more, or fewer."""
    assert sorted(DECLARED.TRAINER) == sorted(set(inspect.signature(Trainer.__init__).parameters) - {"self"})


def test_every_callback_is_declared() -> None:
    """All that Lightning exports, but for the base class."""
    assert sorted(DECLARED.CALLBACKS) == sorted(set(callbacks.__all__) - {"Callback"})


@pytest.mark.parametrize("table", ["TRAINER", "CALLBACKS"])
def test_every_cell_is_proven_by_tests_that_are_there(table: str) -> None:
    """A test that is renamed or removed takes its cell along."""
    for name, cell in getattr(DECLARED, table).items():
        assert cell.tests and cell.says, name
        missing = {test: what for test in cell.tests if (what := what_is_missing(test)) is not None}
        assert not missing, f"{name}: {missing}"


def test_a_missing_test_is_found() -> None:
    """Of each sort."""
    here = "tests/test_compatibility.py"
    assert what_is_missing(f"{here}::test_a_missing_test_is_found") is None
    assert what_is_missing(f"{here}::test_every_cell_is_proven_by_tests_that_are_there[TRAINER]") is None
    assert what_is_missing("tests/test_nothing.py::test_it") is not None
    assert what_is_missing(f"{here}::test_it") == "no function test_it"
    assert "no case" in str(what_is_missing(f"{here}::test_a_missing_test_is_found[{len(here)}]"))
    assert what_is_missing("prose") == "not a test's name"


def test_the_file_is_in_step() -> None:
    """`python docs/compatibility.py` writes it anew."""
    assert DECLARED.TARGET.read_text(encoding="utf-8") == DECLARED.render()
