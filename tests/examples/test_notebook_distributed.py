"""The notebook runs in a real kernel, whose forks are the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "embrace_notebook.ipynb"


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.get("outputs", []) if output.get("name") == "stdout")


def test_notebook() -> None:
    """``embrace_notebook`` trains on two ranks, and the kernel's own model has the trained, whole tables afterwards."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    prepare = nbformat.v4.new_code_cell(  # what forks must survive: a kernel that has used its threads
        "import torch\ntorch.set_num_threads(2)\ntorch.rand(1 << 20).sum()"
    )
    notebook.cells.insert(1, prepare)
    check = nbformat.v4.new_code_cell(
        "print(type(model.users).__name__, tuple(model.users.weight.shape), 'loss' in trainer.callback_metrics)\n"
        "users, items, ratings = next(iter(model.train_dataloader()))\n"
        "print(float(F.mse_loss(model(users, items), ratings)))"
    )
    notebook.cells.append(check)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(NOTEBOOK.parents[2])}}).execute()
    losses = [
        float(line.split()[-1]) for cell in notebook.cells for line in printed(cell).splitlines() if " loss " in line
    ]
    kind, after = printed(notebook.cells[-1]).splitlines()
    assert kind == "Embedding (5000, 64) True"
    assert len(losses) > 3 and losses[-1] < 0.8 * losses[0]
    assert float(after) < 0.9 * losses[0]
