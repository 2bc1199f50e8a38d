"""Time, bytes and memory of checkpoints under ``embrace`` beside ``ddp``: one large table with Adam, saved and loaded.

``python examples/benchmarks/checkpoints.py`` prints a Markdown table; ``docs/benchmarks.md`` holds one. Files are read
from the page cache. ``embrace`` waits until they are on the disk, ``ddp`` does not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.benchmarks.own_ranks import TRAINER, heading, results_of, status  # noqa: E402

#: by what the table calls it: the strategy, its arguments, and whether a hook reads values, so that tables are gathered
WAYS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "`ddp`": ("ddp", {}, False),
    "`embrace`": ("embrace", {}, False),
    "`embrace`, `on_save_checkpoint` reads values": ("embrace", {}, True),
    '`embrace`, `state_dict_type="sharded"`': ("embrace", {"state_dict_type": "sharded"}, False),
}


def written() -> int:
    """Bytes that this process has written so far, to wherever."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


@contextmanager
def measured(into: dict[str, float], name: str) -> Iterator[None]:
    """Notes the seconds, what the process held at most beyond what it held before, and the bytes that it wrote."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, bytes_before, start = status("VmRSS"), written(), time.perf_counter()
    yield
    into[f"{name} s"] = into.get(f"{name} s", 0.0) + time.perf_counter() - start
    into[f"{name} peak"] = max(into.get(f"{name} peak", 0.0), status("VmHWM") - before)
    into[f"{name} wrote"] = into.get(f"{name} wrote", 0.0) + written() - bytes_before


def run(way: str, path: str, arguments: argparse.Namespace, load: bool) -> dict[str, float]:
    """One rank: fits a model of one table, and saves or goes on from what was saved."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch import nn
    from torch.utils.data import DataLoader

    from lightning_embrace import EmbRaceStrategy

    name, options, reads = WAYS[way]
    strategy: Any = EmbRaceStrategy(**options) if name == "embrace" else name
    into: dict[str, float] = {}

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(arguments.rows, arguments.columns)

        def training_step(self, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.table(ids).pow(2).mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    class Reading(Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["first"] = float(checkpoint["state_dict"]["table.weight"][0, 0])

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.strategy.barrier("before the save")
                with measured(into, "save"):
                    trainer.save_checkpoint(path)

    torch.manual_seed(0)
    batches = [torch.randint(arguments.rows, (512,)) for _ in range(4)]
    trainer = Trainer(
        **TRAINER,
        num_nodes=arguments.ranks,
        strategy=strategy,
        max_steps=3 if load else 2,
        callbacks=[] if load else [Save(), *([Reading()] if reads else [])],
    )
    if load:
        connector = trainer._checkpoint_connector
        for method in ("_restore_modules_and_callbacks", "restore_training_state"):
            measure_calls(connector, method, into)
    trainer.fit(Model(), DataLoader(batches, batch_size=None), ckpt_path=path if load else None)  # type: ignore[arg-type]
    assert trainer.global_step == (3 if load else 2)
    return into


def measure_calls(owner: Any, method: str, into: dict[str, float]) -> None:
    """Counts what an object's method takes as loading."""
    original = getattr(owner, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        with measured(into, "load"):
            return original(*args, **kwargs)

    setattr(owner, method, call)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size


def measure(way: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Saves and loads with one way, in processes of their own."""
    path = folder / "model.ckpt"
    found: dict[str, Any] = {}
    for load in (False, True):
        own = ["--way", way, "--path", path, *(["--load"] if load else [])]
        own += ["--rows", arguments.rows, "--columns", arguments.columns, "--ranks", arguments.ranks]
        ranks = results_of(__file__, own, arguments.ranks, arguments.timeout, folder)
        name = "load" if load else "save"
        found[f"{name} s"] = max(r[f"{name} s"] for r in ranks)
        found[f"{name} peak"] = [r[f"{name} peak"] for r in ranks]
        if not load:
            found["wrote"] = [r["save wrote"] for r in ranks]
            found["size"] = size_of(path)
    return found


def markdown(found: dict[str, dict[str, Any]]) -> str:
    """The results as a table, in MB and seconds."""
    columns = ["on disk, MB", "written by rank 0, MB", "save, s", "rank 0's peak over steady state, MB", "load, s"]
    lines = ["| strategy | " + " | ".join([*columns, "largest peak while loading, MB"]) + " |"]
    lines.append("|---|" + "---:|" * (len(columns) + 1))
    for way, f in found.items():
        megabytes = [v / 1e6 for v in (f["size"], f["wrote"][0], f["save peak"][0], max(f["load peak"]))]
        size, wrote, peak, loading = (f"{value:,.0f}" for value in megabytes)
        cells = [way, size, wrote, f"{f['save s']:.1f}", peak, f"{f['load s']:.1f}", loading]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures all ways, or is one rank of one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=1200.0)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: a temporary one)")
    parser.add_argument("--ways", type=int, nargs="*", default=list(range(len(WAYS))), help="by number, from 0")
    for name in ("--way", "--path"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        arguments.result.write_text(json.dumps(run(arguments.way, arguments.path, arguments, arguments.load)))
        return
    found = {}
    for way in [list(WAYS)[number] for number in arguments.ways]:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found[way] = measure(way, Path(folder), arguments)
    print(heading(arguments.rows, arguments.columns, f"N = {arguments.ranks}, Adam"))
    print(markdown(found))


if __name__ == "__main__":
    main()
