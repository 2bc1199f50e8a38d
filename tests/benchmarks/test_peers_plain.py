"""What peers without a Trainer share, and the scripts that make their environments."""

import os
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from examples.benchmarks.peers import PEERS
from examples.benchmarks.peers.plain import optimizer_of, sgd_rate, without_trainer

ROOT = Path(__file__).resolve().parents[2]


class Logs(LightningModule):
    """Logs in its step."""

    def __init__(self, optimizers: object = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.optimizers_ = optimizers

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.linear(batch).sum()
        self.log("loss", loss, prog_bar=True, batch_size=len(batch))
        self.log_dict({"again": loss}, sync_dist=True)
        return loss

    def configure_optimizers(self) -> object:
        return self.optimizers_


def test_a_step_runs_without_a_trainer() -> None:
    """Nothing is logged, nothing warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert without_trainer(Logs()).training_step(torch.ones(3, 2), 0).requires_grad


def test_only_one_optimizer_will_do() -> None:
    """A loop that steps one of several would train something else."""
    one = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert optimizer_of(Logs(one)) is one
    with pytest.raises(TypeError, match="One optimizer is needed"):
        optimizer_of(Logs([one, one]))


def test_the_rate_of_plain_sgd_and_nothing_else() -> None:
    """A fused optimizer gets the rate alone: momentum would be lost in silence."""
    weights = [nn.Parameter(torch.ones(1))]
    assert sgd_rate(torch.optim.SGD(weights, lr=0.3)) == 0.3
    for other in (torch.optim.SGD(weights, lr=0.3, momentum=0.9), torch.optim.Adam(weights)):
        with pytest.raises(TypeError, match="Plain SGD is needed"):
            sgd_rate(other)


def script(name: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [str(ROOT / "examples" / "benchmarks" / name), *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_every_environment_of_a_peer_can_be_made() -> None:
    """The names in the table of peers are those that the script and ``make peers`` know."""
    refused = script("environment.sh", "nonsense")
    assert refused.returncode == 2
    makefile = (ROOT / "Makefile").read_text()
    for name in {peer.environment for peer in PEERS.values()} - {"main"}:
        assert name in refused.stderr
        assert f".venvs/{name}/.installed" in makefile
