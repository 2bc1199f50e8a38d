"""What one benchmark run is: everything that a rank must know, as JSON on its command line."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One peer training one model on N ranks.

    Attributes:
        peer: Name of an adapter in ``examples.benchmarks.peers``.
        model: ``"lm"``, ``"gnmt"``, ``"transformer"`` or ``"bert"``.
        size: ``"small"``, or ``"paper"``.
        ranks: N.
        optimizer: ``"sgd"``, ``"adam"`` or ``"adagrad"``.
        vocabulary: Rows of each table; 0: the size's default.
        dim: Columns of each table; 0: the size's default.
        batch: Sequences per rank and step; 0: the size's default.
        length: Tokens per sequence; 0: the size's default.
        negatives: Draws of the sampled softmax, where the model has one; 0: the size's default.
        warmup: Steps that are not measured.
        steps: Measured steps.
        seed: Of weights and batches, the same for every peer.
        exponent: Of the Zipf distribution of ids; 0: real text.
        text: File with text, empty: the default text. Used where ``exponent`` is 0.
        compute: ``"real"`` or ``"emulated"``.
        compute_ms: Emulated time of a step's forward and backward, in ms.
        wire_dtype: ``""``, ``"bf16"`` or ``"fp16"``; only ``embrace`` has it.
        trace: File for a trace of the run, empty: none. Only ``embrace`` has it, and its times are not compared.
        profile: File for a profile of rank 0's measured steps, empty: none. Only Lightning peers have it.
    """

    peer: str
    model: str
    size: str = "small"
    ranks: int = 2
    optimizer: str = "sgd"
    vocabulary: int = 0
    dim: int = 0
    batch: int = 0
    length: int = 0
    negatives: int = 0
    warmup: int = 4
    steps: int = 5
    seed: int = 1
    exponent: float = 1.1
    text: str = ""
    compute: str = "real"
    compute_ms: float = 0.0
    wire_dtype: str = ""
    trace: str = ""
    profile: str = ""

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of :meth:`to_json`."""
        return cls(**json.loads(text))

    @property
    def work(self) -> Job:
        """What is trained, without who trains it, for how long, and what is watched meanwhile."""
        return dataclasses.replace(self, peer="", wire_dtype="", warmup=0, steps=0, trace="", profile="")

    def same_work_as(self, other: Job) -> bool:
        """Whether two jobs must produce the same losses, for as many steps as both take."""
        return self.work == other.work
