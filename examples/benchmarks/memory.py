"""Memory of a rank under ``embrace`` beside ``ddp``: one large table with Adam, every rank a process of its own.

``python examples/benchmarks/memory.py`` prints a Markdown table; ``docs/memory.md`` holds one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

STAGES = ("model built", "training", "peak")
#: by what the table calls it: the strategy, and the method in which the model is built
WAYS = {
    "`ddp`": ("ddp", "__init__"),
    "`embrace`": ("embrace", "__init__"),
    "`embrace`, built in `configure_model`": ("embrace", "configure_model"),
}


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
                held["model built"] = resident()

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
                held["training"] = resident()

    torch.manual_seed(0)
    model = Model()
    batches = [torch.randint(rows, (512,)) for _ in range(steps)]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=ranks,
        strategy=strategy,
        max_epochs=1,
        callbacks=[Look()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    held["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return held


def measure(way: str, arguments: argparse.Namespace) -> list[dict[str, int]]:
    """Runs all ranks of one way; results by rank."""
    from examples.benchmarks.cluster import Cluster, check, run_ranks

    with Cluster(arguments.ranks, kind="loopback") as cluster, tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.json" for rank in range(arguments.ranks)]
        own = [sys.executable, __file__, "--way", way, "--rows", str(arguments.rows)]
        own += ["--columns", str(arguments.columns), "--ranks", str(arguments.ranks), "--steps", str(arguments.steps)]
        commands = [[*own, "--result", str(file)] for file in files]
        check(run_ranks(cluster, commands, [{"OMP_NUM_THREADS": "1"}] * arguments.ranks, arguments.timeout))
        return [json.loads(file.read_text()) for file in files]


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
