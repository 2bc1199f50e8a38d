"""How long fleets take under each policy, in simulation: the lease book of real fleets on a clock that only counts.

    python examples/benchmarks/fleet_schedules.py --out fleet-schedules

prints a Markdown table and writes ``fleet-schedules.png``: makespan over the lower bound, which is the larger one of
all work divided by the devices and the longest model. Moving shards takes no time here, and nothing else does. Ten
draws take about five minutes.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lightning_embrace.fleet.simulate import simulate  # noqa: E402

#: by policy, what it is called beside the literature
POLICIES = {"lrtf": "Sharded-LRTF", "fifo": "round robin", "random": "random", "task": "whole models, longest first"}


class Setting(NamedTuple):
    """A fleet.

    Attributes:
        models: How many.
        devices: How many.
        mixed: Whether models have 64 to 256 shards, instead of 128 each.
    """

    models: int
    devices: int
    mixed: bool


SETTINGS = [
    Setting(models, devices, mixed)
    for devices in (8, 16, 32, 64)
    for mixed in (False, True)
    for models in (devices + 1, devices * 3 // 2, devices * 3)
]


def draw_models(setting: Setting, seed: int) -> list[list[float]]:
    """Shard times of each model, in seconds; those of one model are alike."""
    draw = random.Random(f"{setting} {seed}")
    if not setting.mixed:
        return [[1.0] * 128] * setting.models
    return [[draw.uniform(0.5, 1.5)] * draw.randint(64, 256) for _ in range(setting.models)]


def over_bound(models: Sequence[Sequence[float]], devices: int, policy: str, seed: int) -> float:
    """Makespan ÷ the lower bound."""
    lengths = [sum(shards) for shards in models]
    return simulate(models, devices, policy, seed=seed).makespan / max(sum(lengths) / devices, *lengths)


def measure(setting: Setting, draws: int) -> dict[str, float]:
    """By policy, the mean of makespan ÷ bound over some draws."""
    return {
        policy: mean(over_bound(draw_models(setting, n), setting.devices, policy, n) for n in range(draws))
        for policy in POLICIES
    }


def markdown(results: dict[Setting, dict[str, float]]) -> str:
    """The table."""
    lines = ["| models | devices | " + " | ".join(POLICIES.values()) + " |", "|---|---:|" + "---:|" * len(POLICIES)]
    for setting, found in results.items():
        kind = "mixed" if setting.mixed else "equal"
        values = " | ".join(f"{found[policy]:.3f}" for policy in POLICIES)
        lines.append(f"| {setting.models} {kind} | {setting.devices} | {values} |")
    return "\n".join(lines)


def draw_plot(results: dict[Setting, dict[str, float]], path: Path) -> None:
    """Bars by setting."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(POLICIES)
    for place, (policy, name) in enumerate(POLICIES.items()):
        left = [index + place * width for index in range(len(results))]
        axes.bar(left, [found[policy] for found in results.values()], width, label=name)
    names = [f"{s.models} {'mixed' if s.mixed else 'equal'}\non {s.devices}" for s in results]
    axes.set_xticks([index + 0.3 for index in range(len(results))], names, fontsize=6)
    axes.set_ylim(0.95)
    axes.set_ylabel("makespan ÷ lower bound")
    axes.legend()
    FigureCanvasAgg(figure).print_figure(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulates, prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20, help="of models, where they are mixed, and of seeds")
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="how many of the table's rows")
    parser.add_argument("--out", type=Path, default=Path("fleet-schedules"), help="the plot's name, without .png")
    chosen = parser.parse_args(arguments)
    results = {setting: measure(setting, chosen.draws) for setting in SETTINGS[: chosen.settings]}
    print(markdown(results))
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    draw_plot(results, chosen.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
