"""Search a GPT's learning rate with a fleet: models that each take more than a device has, on two of them.

    python examples/train_fleet.py                               # four learning rates, in about a minute
    python examples/train_fleet.py --halving                     # the best half goes on after each epoch
    python examples/train_fleet.py --folder search --resume      # goes on with what Ctrl-C has left there

A table shows who computes where; at the end another one has the results. ``fleet/gantt.png`` shows who had which device
when. Nothing happens at import.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

# A script has its own folder on the path; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from examples.data import TextDataModule
from examples.models import GPT
from lightning_embrace import HydraFleet, SuccessiveHalving, Task, TaskResult, grid
from lightning_embrace.fleet.results import render_results


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="a UTF-8 text file; default: the help topics of the Python standard library")
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-3, 1e-3, 3e-4, 1e-4], help="learning rates of AdamW")
    parser.add_argument("--devices", type=int, default=2, help="how many (default: %(default)s)")
    parser.add_argument("--memory", default="24MiB", help="of each device (default: %(default)s)")
    parser.add_argument("--policy", default="lrtf", help="whose turn it is (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of each task; default: the cores divided by the devices")
    parser.add_argument("--halving", action="store_true", help="after each epoch the better half goes on")
    parser.add_argument("--folder", default="fleet", help="for logs, checkpoints and the chart (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
    parser.add_argument("--max-epochs", type=int, default=1)
    parser.add_argument("--dim", type=int, default=128, help="width (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="blocks (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences (default: %(default)s)")
    parser.add_argument("--max-vocab", type=int, default=2000, help="words (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def make_task(args: argparse.Namespace, lr: float) -> Task:
    """A model and its data, both built in the task's own process."""
    factory = partial(GPT, args.max_vocab, args.sequence_length, args.dim, args.layers, args.heads, lr=lr)
    data = partial(
        TextDataModule,
        args.text,
        sequence_length=args.sequence_length,
        batch_size=args.batch_size,
        max_vocab=args.max_vocab,
        seed=args.seed,
    )
    return Task(factory, data, {"max_epochs": args.max_epochs, "enable_model_summary": False})


def train(args: argparse.Namespace) -> list[TaskResult]:
    """Train all of them."""
    fleet = HydraFleet(
        grid(partial(make_task, args), lr=args.lr),
        devices=args.devices,
        memory=args.memory,
        policy=args.policy,
        threads=args.threads,
        halving=SuccessiveHalving("val_loss", every=1) if args.halving else None,
        folder=args.folder,
        seed=args.seed,
    )
    return fleet.fit(resume=args.resume)


def main() -> None:
    """Train as the command line says, and print what has come of it."""
    Console().print(render_results(train(parse_arguments())))


if __name__ == "__main__":
    main()
