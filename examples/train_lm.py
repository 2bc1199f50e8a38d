"""Train a word-level LSTM language model on several processes.

    python examples/train_lm.py --text book.txt --devices 2 --max-epochs 5
    python examples/train_lm.py --strategy ddp          # the same model, the usual way
    python examples/train_lm.py --demo                  # about a minute, and what it saves on the wire

Lightning starts one process per device by running this script again, so nothing happens at import.
"""

import argparse
import sys
from pathlib import Path

# A script has its own folder on the path; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning.pytorch import Trainer, seed_everything

import lightning_embrace  # noqa: F401  (registers the strategies)
from examples.data import TextDataModule
from examples.demo import run_demo
from examples.models import LanguageModel


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="a UTF-8 text file; default: the help topics of the Python standard library")
    parser.add_argument("--strategy", default="embrace", help="any name that Lightning knows (default: %(default)s)")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--max-epochs", type=int, default=5)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--softmax", choices=["full", "sampled"], default="sampled")
    parser.add_argument("--negatives", type=int, default=512, help="draws per batch of the sampled softmax")
    parser.add_argument("--sparse", action="store_true", help="tables with sparse gradients")
    parser.add_argument("--optimizer", choices=["adam", "adagrad", "sgd"], help="default: adam; adagrad with --sparse")
    parser.add_argument("--dim", type=int, default=256, help="columns of both tables (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="width of the LSTM (default: %(default)s)")
    parser.add_argument("--sequence-length", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per process (default: %(default)s)")
    parser.add_argument("--min-count", type=int, default=1, help="rarer words are unknown (default: %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--lr", type=float, help="learning rate; default: one that suits the optimizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demo", action="store_true", help="two CPU processes, then the same model under ddp")
    return parser.parse_args()


def build(args: argparse.Namespace) -> tuple[LanguageModel, TextDataModule]:
    """Make the model and its data; equal arguments make equal weights on every rank."""
    seed_everything(args.seed, verbose=False)
    data = TextDataModule(
        args.text,
        sequence_length=args.sequence_length,
        batch_size=args.batch_size,
        negatives=args.negatives if args.softmax == "sampled" else 0,
        min_count=args.min_count,
        seed=args.seed,
    )
    model = LanguageModel(
        data.vocab_size,
        args.dim,
        args.hidden,
        dropout=args.dropout,
        softmax=args.softmax,
        sparse=args.sparse,
        optimizer=args.optimizer,
        lr=args.lr,
    )
    return model, data


def main() -> None:
    """Train as the command line says."""
    args = parse_arguments()
    if args.demo:
        run_demo(lambda: build(args), args.strategy, args.max_epochs)
        return
    model, data = build(args)
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=args.strategy,
        max_epochs=args.max_epochs,
        max_steps=args.max_steps,
        log_every_n_steps=10,
    )
    trainer.fit(model, datamodule=data)


if __name__ == "__main__":
    main()
