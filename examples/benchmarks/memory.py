"""Memory of a rank under ``embrace`` beside ``ddp``: one large table with Adam, every rank a process of its own.

``python examples/benchmarks/memory.py`` prints a Markdown table; ``docs/memory.md`` holds one.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.benchmarks.own_ranks import TRAINER, results_of, status  # noqa: E402

STAGES = ("model built", "training", "peak")
#: by what the table calls it: the strategy, and the method in which the model is built
WAYS = {
    "`ddp`": ("ddp", "__init__"),
    "`embrace`": ("embrace", "__init__"),
    "`embrace`, built in `configure_model`": ("embrace", "configure_model"),
}


def train(way: str, ranks: int, rows: int, columns: int, steps: int) -> dict[str, int]:
    """One rank: fits a model of one table, and says what it held when.

    Returns:
        Resident bytes by stage, and the exact bytes of the table's tensors (weight and optimizer state) in training.
    """
    import resource

    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch import nn
    from torch.utils.data import DataLoader

    import lightning_embrace  # noqa: F401  (registers the strategies)

    strategy, method = WAYS[way]
    held: dict[str, int] = {}

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table: Any = None
            if method == "__init__":
                self.configure_model()

        def configure_model(self) -> None:
            if self.table is None:
                self.table = nn.Embedding(rows, columns)
                self.head = nn.Linear(columns, 1)
                held["model built"] = status("VmRSS")

        def training_step(self, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.head(self.table(ids)).pow(2).mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    class Look(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == steps - 1:
                weight = module.table._parameters["weight"]
                state = trainer.optimizers[0].state[weight]
                tensors = [weight, state["exp_avg"], state["exp_avg_sq"]]
                held["table"] = sum(t.numel() * t.element_size() for t in tensors)
                held["training"] = status("VmRSS")

    torch.manual_seed(0)
    model = Model()
    batches = [torch.randint(rows, (512,)) for _ in range(steps)]
    trainer = Trainer(
        **TRAINER,
        num_nodes=ranks,
        strategy=strategy,
        max_epochs=1,
        callbacks=[Look()],
    )
    trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    held["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return held


def measure(way: str, arguments: argparse.Namespace) -> list[dict[str, int]]:
    """Runs all ranks of one way; results by rank."""
    own = ["--way", way, "--rows", arguments.rows, "--columns", arguments.columns]
    own += ["--ranks", arguments.ranks, "--steps", arguments.steps]
    with tempfile.TemporaryDirectory() as folder:
        return results_of(__file__, own, arguments.ranks, arguments.timeout, Path(folder))


def markdown(measured: dict[str, list[dict[str, int]]]) -> str:
    """The results as a table: the rank that holds most, in MB."""
    lines = ["| strategy | table and Adam state, MB | " + " | ".join(f"resident, {s}, MB" for s in STAGES) + " |"]
    lines.append("|---|" + "---:|" * (len(STAGES) + 1))
    for way, ranks in measured.items():
        most = [max(r[key] for r in ranks) / 1e6 for key in ("table", *STAGES)]
        lines.append(f"| {way} | " + " | ".join(f"{value:,.0f}" for value in most) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures all ways, or is one rank of one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--way", default="", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        held = train(arguments.way, arguments.ranks, arguments.rows, arguments.columns, arguments.steps)
        arguments.result.write_text(json.dumps(held))
        return
    import torch

    measured = {way: measure(way, arguments) for way in WAYS}
    print(f"V = {arguments.rows:,}, D = {arguments.columns}, N = {arguments.ranks}, Adam; torch {torch.__version__},")
    print(f"Python {platform.python_version()}, {platform.platform()}\n")
    print(markdown(measured))


if __name__ == "__main__":
    main()
