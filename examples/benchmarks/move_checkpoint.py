"""One large table, built in ``configure_model``, moves between numbers of ranks in sharded checkpoints.

``python examples/benchmarks/move_checkpoint.py`` saves on four ranks, goes on on two, saves, and goes on on three. Of
every rank it notes what it held at most while it saved and loaded, beyond what it held before; every column is
compared, bit by bit.
``docs/benchmarks.md`` holds its table.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.benchmarks.own_ranks import TRAINER, heading, results_of  # noqa: E402


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One rank: builds its columns, loads if there is something to load, takes a step and saves."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch import nn
    from torch.utils.data import DataLoader

    from examples.benchmarks.checkpoints import measure_calls, measured
    from lightning_embrace import EmbRaceStrategy

    into: dict[str, Any] = {}

    class Model(LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "table"):
                self.table = nn.Embedding(arguments.rows, arguments.columns, sparse=True)

        def training_step(self, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.table(ids).pow(2).mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def columns(module: Any) -> list[int]:
        return [zlib.crc32(c.contiguous().numpy().tobytes()) for c in module.table.weight.detach().T]

    class Look(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            into["shard"] = module.table.weight.nbytes
            into["loaded"] = columns(module)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            into["saved"] = columns(module)
            with measured(into, "save"):
                trainer.save_checkpoint(arguments.to)

    torch.manual_seed(0)
    trainer = Trainer(
        **TRAINER,
        num_nodes=arguments.ranks,
        strategy=EmbRaceStrategy(state_dict_type="sharded"),
        max_epochs=arguments.epochs,
        callbacks=[Look()],
    )
    measure_calls(trainer._checkpoint_connector, "_restore_modules_and_callbacks", into)
    batches = DataLoader([torch.randint(arguments.rows, (512,))], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Model(), batches, ckpt_path=arguments.source or None)
    return into


def move(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Runs one number of ranks after the other."""
    found: list[dict[str, Any]] = []
    source = ""
    for epochs, ranks in enumerate(arguments.sizes, start=1):
        target = folder / f"{ranks}.ckpt"
        own = ["--ranks", ranks, "--epochs", epochs, "--to", target, "--source", source]
        own += ["--rows", arguments.rows, "--columns", arguments.columns]
        results = results_of(__file__, own, ranks, arguments.timeout, folder)
        columns = {name: [c for r in results for c in r[name]] for name in ("loaded", "saved")}
        if found and columns["loaded"] != found[-1]["columns"]:
            raise SystemExit(f"On {ranks} ranks other columns were loaded than {found[-1]['ranks']} had saved.")
        found.append({"ranks": ranks, "columns": columns["saved"], "results": results})
        source = str(target)
    return found


def markdown(found: list[dict[str, Any]]) -> str:
    """The results as a table, in MB."""
    lines = ["| N | columns of a rank, MB | peak while loading, MB | peak while saving, MB |", "|---|---|---|---|"]
    for number, f in enumerate(found):
        cells = [
            ", ".join(f"{r[name] / 1e6:,.0f}" for r in f["results"]) if number or name != "load peak" else "—"
            for name in ("shard", "load peak", "save peak")
        ]
        lines.append(f"| {f['ranks']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Moves the table, or is one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[4, 2, 3], help="numbers of ranks")
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--columns", type=int, default=128)
    parser.add_argument("--timeout", type=float, default=1200.0)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: a temporary one)")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    for name in ("--ranks", "--epochs"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    for name in ("--source", "--to"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.result:
        arguments.result.write_text(json.dumps(run(arguments)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = move(arguments, Path(folder))
    print(heading(arguments.rows, arguments.columns, "SGD"))
    print(markdown(found))


if __name__ == "__main__":
    main()
