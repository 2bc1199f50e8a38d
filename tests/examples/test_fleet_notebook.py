"""The notebook of a fleet runs in a real kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "fleet_notebook.ipynb"


def outputs(cell: Any, kind: str) -> list[str]:
    """What a cell shows, of one MIME type or of standard output."""
    found = [output["data"].get(kind) for output in cell.outputs if "data" in output]
    return [text for text in (*found, *(o["text"] for o in cell.outputs if o.get("name") == kind)) if text]


def test_notebook() -> None:
    """Models defined in a cell are trained, with one table that is replaced, and there is a picture."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(NOTEBOOK.parents[2])}}).execute()
    fit, results, picture = notebook.cells[4], notebook.cells[5], notebook.cells[7]
    (table,) = outputs(fit, "text/html")
    assert table.count("finished") == 3 and "lr=0.003" in table and "cpu:1" in table
    assert outputs(fit, "stdout") == [] and outputs(fit, "stderr") == []
    (printed,) = outputs(results, "stdout")
    assert printed.count("val_loss") == 3 and printed.count(" None\n") == 3 and "best: lr=" in printed
    assert outputs(picture, "image/png")
