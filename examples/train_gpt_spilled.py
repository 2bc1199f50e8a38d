"""Train a GPT under a budget of memory that it does not fit, with the numbers of plain training.

    python examples/train_gpt_spilled.py                              # 8 blocks, in a fifth of their memory
    python examples/train_gpt_spilled.py --host-memory 20MiB --disk .   # most of it on the disk
    python examples/train_gpt_spilled.py --plain                      # the same losses, the usual way

The progress bar shows the MB that each step moves between the device and the tiers. Nothing happens at import.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# A script has its own folder on the path; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning.pytorch import Trainer, seed_everything

from examples.data import TextDataModule
from examples.models import GPT
from lightning_embrace import HydraStrategy, SpillMonitor


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="a UTF-8 text file; default: the help topics of the Python standard library")
    parser.add_argument("--device-memory", default="64MiB", help="what the model may take of the device (%(default)s)")
    parser.add_argument("--host-memory", help="what waits in host memory; default: half of it")
    parser.add_argument("--disk", help="a folder for what does not fit the host")
    parser.add_argument("--no-prefetch", action="store_true", help="load a shard only when it is needed")
    parser.add_argument("--plain", action="store_true", help="without HydraStrategy")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--max-epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--dim", type=int, default=256, help="width (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="blocks (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--sequence-length", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences (default: %(default)s)")
    parser.add_argument("--min-count", type=int, default=3, help="rarer words are unknown (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def build(args: argparse.Namespace) -> tuple[GPT, TextDataModule]:
    """Make the model and its data."""
    seed_everything(args.seed, verbose=False)
    data = TextDataModule(
        args.text,
        sequence_length=args.sequence_length,
        batch_size=args.batch_size,
        min_count=args.min_count,
        seed=args.seed,
    )
    model = GPT(
        data.vocab_size, args.sequence_length, args.dim, args.layers, args.heads, dropout=args.dropout, lr=args.lr
    )
    return model, data


def make_trainer(args: argparse.Namespace) -> Trainer:
    """A Trainer; all that differs between the two ways is in here."""
    arguments = {"max_epochs": args.max_epochs, "max_steps": args.max_steps, "log_every_n_steps": 10}
    if args.plain:
        return Trainer(accelerator=args.accelerator, devices=1, **arguments)
    strategy = HydraStrategy(
        device_memory=args.device_memory,
        host_memory=args.host_memory,
        disk=args.disk,
        prefetch=not args.no_prefetch,
    )
    monitor = SpillMonitor(prog_bar=True)
    return Trainer(accelerator=args.accelerator, devices=1, strategy=strategy, callbacks=[monitor], **arguments)


def main() -> None:
    """Train as the command line says."""
    args = parse_arguments()
    model, data = build(args)
    make_trainer(args).fit(model, datamodule=data)


if __name__ == "__main__":
    main()
