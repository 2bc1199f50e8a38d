"""What is told to the process that forks a rank."""

import json
from pathlib import Path

import pytest

from examples.benchmarks.starting import Start


@pytest.mark.parametrize(("namespace", "cwd"), [("embrace-1-2-3-rank0", Path("/tmp/a b")), (None, None)])
def test_a_start_crosses_a_process_boundary(namespace: str | None, cwd: Path | None) -> None:
    """Also an environment whose bytes are no text."""
    start = Start(["python", "-m", "x", "é"], {"A": "1\n2", "B": "\udcff"}, Path("/o"), Path("/e"), namespace, cwd)
    assert Start.from_fields(json.loads(json.dumps(start.to_fields()).encode())) == start
