"""What of Lightning works under ``embrace``: ``python docs/compatibility.py`` writes ``docs/compatibility.md``.

Every argument of the Trainer and every built-in callback is declared here, with the tests that prove what is said of
it. ``tests/test_compatibility.py`` fails when a test is not there, when the file is out of step, and when Lightning has
something that is not declared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "compatibility.md"


class Cell(NamedTuple):
    """What is said of one argument or callback.

    Attributes:
        says: ``"as ddp"``: equal numbers, files and messages; or what is different, or refused.
        tests: What proves it: ``file::function``, or ``file::function[case]``.
    """

    says: str
    tests: Sequence[str]


_ARGUMENTS = "tests/test_trainer_arguments_distributed.py::test_equals_ddp"
_CALLBACKS = "tests/test_callbacks_distributed.py::test_equals_ddp"
_FINETUNING = "tests/test_callbacks_distributed.py::test_finetuning_equals_one_process"
_LAUNCH = "tests/test_launch_distributed.py"
_CLIPPING = "tests/test_clipping_distributed.py"
_AVERAGING = "tests/test_averaging_distributed.py"


def _as_ddp(name: str, *more: str) -> Cell:
    return Cell("as ddp", (f"{_ARGUMENTS}[{name}]", *more))


def _callback(*cases: str) -> Cell:
    return Cell("as ddp", [f"{_CALLBACKS}[{case}]" for case in cases])


TRAINER: Mapping[str, Cell] = {
    "accelerator": Cell(
        "`cpu` as ddp; `gpu` is written and has tests, which have not been run yet",
        [
            "tests/test_strategy_distributed.py::test_whole_life",
            "tests/test_cuda_distributed.py::test_one_rank_over_nccl",
        ],
    ),
    "strategy": Cell(
        "`embrace`, `embrace_spawn`, `embrace_fork`, `embrace_notebook`, `embrace_horovod`, or an `EmbRaceStrategy`",
        ["tests/test_registry.py::test_names", f"{_LAUNCH}::test_processes_of_multiprocessing"],
    ),
    "devices": Cell(
        "any number, also one; some ranks without columns",
        [
            "tests/exactness/test_matrix_distributed.py::test_equals_one_process",
            "tests/exactness/test_schedules_distributed.py::test_fewer_columns_than_ranks",
        ],
    ),
    "num_nodes": Cell("as ddp", [f"{_LAUNCH}::test_two_nodes", f"{_LAUNCH}::test_slurm_on_two_nodes"]),
    "precision": Cell(
        "`32-true`, `64-true`, `bf16-mixed`, `bf16-true`, `16-true`, `16-mixed` as ddp; a loss scaler that is not"
        " torch's is refused: give a `torch.amp.GradScaler`",
        [
            "tests/test_precision_distributed.py::test_equals_ddp",
            "tests/test_precision_distributed.py::test_one_rank_overflows",
            "tests/test_refusals.py::test_a_scaler_of_one_s_own",
        ],
    ),
    "logger": Cell("as ddp", ["tests/test_logging_distributed.py::test_equals_ddp"]),
    "callbacks": Cell("see the table below", [_CALLBACKS]),
    "fast_dev_run": _as_ddp("fast_dev_run"),
    "max_epochs": _as_ddp("max_epochs"),
    "min_epochs": _as_ddp("min_epochs"),
    "max_steps": _as_ddp("max_steps"),
    "min_steps": _as_ddp("min_steps"),
    "max_time": _as_ddp("max_time"),
    "limit_train_batches": _as_ddp("limit_train_batches"),
    "limit_val_batches": _as_ddp("limit_val_batches"),
    "limit_test_batches": _as_ddp("limit_test_batches"),
    "limit_predict_batches": _as_ddp("limit_predict_batches"),
    "overfit_batches": _as_ddp("overfit_batches"),
    "val_check_interval": _as_ddp(
        "val_check_interval",
        "tests/exactness/test_schedules_distributed.py::test_validation_in_the_middle_of_an_epoch",
    ),
    "check_val_every_n_epoch": _as_ddp("check_val_every_n_epoch"),
    "num_sanity_val_steps": _as_ddp("num_sanity_val_steps"),
    "log_every_n_steps": Cell("as ddp", ["tests/test_logging_distributed.py::test_equals_ddp"]),
    "enable_checkpointing": _as_ddp("enable_checkpointing"),
    "enable_progress_bar": _as_ddp("enable_progress_bar", "tests/test_plan_distributed.py::test_beside_tqdm"),
    "enable_model_summary": _as_ddp("enable_model_summary"),
    "accumulate_grad_batches": Cell(
        "as ddp; exchanged once per optimizer step",
        ["tests/exactness/test_schedules_distributed.py::test_accumulation"],
    ),
    "gradient_clip_val": Cell("as ddp; the norm is that of all columns", [f"{_CLIPPING}::test_equals_ddp"]),
    "gradient_clip_algorithm": Cell(
        "as ddp; also of sparse gradients, which ddp refuses",
        [
            f"{_CLIPPING}::test_equals_ddp",
            f"{_CLIPPING}::test_sparse_gradients",
        ],
    ),
    "deterministic": _as_ddp("deterministic"),
    "benchmark": _as_ddp("benchmark"),
    "inference_mode": _as_ddp("inference_mode"),
    "use_distributed_sampler": Cell(
        "as ddp",
        [
            f"{_LAUNCH}::test_script_started_again_for_each_rank",
            "tests/test_strategy_distributed.py::test_no_partner_needed_outside_training_steps",
        ],
    ),
    "profiler": _as_ddp("profiler", f"{_ARGUMENTS}[profiler (advanced)]", f"{_ARGUMENTS}[profiler (torch)]"),
    "detect_anomaly": _as_ddp("detect_anomaly"),
    "barebones": _as_ddp("barebones"),
    "plugins": _as_ddp(
        "plugins",
        f"{_LAUNCH}::test_torchrun",
        f"{_CLIPPING}::test_a_plugins_own_clipping_is_left_alone",
    ),
    "sync_batchnorm": Cell(
        "in force during fit and undone after it; torch has it on CUDA only, where it has not been run yet",
        ["tests/test_distributed.py::test_layer_sync", "tests/test_cuda_distributed.py::test_sync_batchnorm"],
    ),
    "reload_dataloaders_every_n_epochs": Cell("as ddp", ["tests/test_loaders_distributed.py::test_equals_ddp[reload]"]),
    "default_root_dir": _as_ddp("default_root_dir"),
    "enable_autolog_hparams": _as_ddp("enable_autolog_hparams"),
    "model_registry": _as_ddp("model_registry"),
}

CALLBACKS: Mapping[str, Cell] = {
    "BackboneFinetuning": Cell(
        "as one process; ddp does not synchronise tables that are frozen when training begins",
        [f"{_FINETUNING}[BackboneFinetuning]"],
    ),
    "BaseFinetuning": Cell(
        "as one process; a table that is frozen when training begins stays whole on every rank",
        [f"{_FINETUNING}[BaseFinetuning that thaws]", f"{_FINETUNING}[BaseFinetuning that freezes]"],
    ),
    "BasePredictionWriter": Cell("as ddp", ["tests/test_callbacks_distributed.py::test_prediction_writer"]),
    "BatchSizeFinder": Cell(
        "refused, as by every distributed strategy: find the size in one process",
        ["tests/test_callbacks_distributed.py::test_refused_on_every_rank[finder]"],
    ),
    "Checkpoint": Cell(
        "as ddp; `ModelCheckpoint` is one", ["tests/test_callbacks_distributed.py::test_model_checkpoint"]
    ),
    "DeviceStatsMonitor": _callback("DeviceStatsMonitor"),
    "EMAWeightAveraging": Cell(
        "as ddp; the averages of a sharded table are sharded as it is",
        [
            f"{_AVERAGING}::test_equals_ddp[ema]",
            f"{_AVERAGING}::test_checkpoints_interchange_with_ddp[ema]",
            f"{_AVERAGING}::test_equals_ddp_at_three_ranks_under_other_schedules",
        ],
    ),
    "EarlyStopping": _callback("EarlyStopping"),
    "GradientAccumulationScheduler": _callback("GradientAccumulationScheduler"),
    "LambdaCallback": _callback("LambdaCallback"),
    "LearningRateFinder": _callback("LearningRateFinder", "LearningRateFinder that stops"),
    "LearningRateMonitor": _callback("LearningRateMonitor"),
    "ModelCheckpoint": Cell(
        "as ddp; whole tables in the layout that ddp writes",
        [
            "tests/test_callbacks_distributed.py::test_model_checkpoint",
            "tests/checkpoint/test_full_distributed.py::test_files_are_ddps",
        ],
    ),
    "ModelPruning": Cell(
        "as ddp for what is no sharded table; pruning one is refused: leave it out, or keep it whole",
        [f"{_CALLBACKS}[ModelPruning]", "tests/test_callbacks_distributed.py::test_refused_on_every_rank[pruning]"],
    ),
    "ModelSummary": Cell(
        "as ddp, and the parameters that this rank holds beside it",
        ["tests/test_model_summary_distributed.py::test_logical_sizes_with_the_shards_beside"],
    ),
    "OnExceptionCheckpoint": Cell(
        "with one rank, or after SIGTERM, as ddp; after an exception on one of several nothing is saved, and the"
        " message names the last whole checkpoint",
        [
            f"{_CALLBACKS}[OnExceptionCheckpoint]",
            "tests/test_interruption_distributed.py::test_sigterm",
            "tests/test_interruption_distributed.py::test_one_rank_fails",
        ],
    ),
    "ProgressBar": _callback("ProgressBar"),
    "RichModelSummary": Cell(
        "as ModelSummary", ["tests/test_model_summary_distributed.py::test_logical_sizes_with_the_shards_beside"]
    ),
    "RichProgressBar": Cell(
        "as ddp", [f"{_CALLBACKS}[RichProgressBar]", "tests/test_plan_distributed.py::test_beside_rich"]
    ),
    "SpikeDetection": Cell(
        "as ddp",
        [f"{_CALLBACKS}[SpikeDetection]", "tests/test_callbacks_distributed.py::test_spike_detection_stops_all_ranks"],
    ),
    "StochasticWeightAveraging": Cell(
        "as ddp; the averages of a sharded table are sharded as it is",
        [
            f"{_AVERAGING}::test_equals_ddp[swa]",
            f"{_AVERAGING}::test_equals_ddp[swa, batch statistics]",
            f"{_AVERAGING}::test_checkpoints_interchange_with_ddp[swa]",
        ],
    ),
    "TQDMProgressBar": Cell(
        "as ddp", [f"{_CALLBACKS}[TQDMProgressBar]", "tests/test_plan_distributed.py::test_beside_tqdm"]
    ),
    "ThroughputMonitor": _callback("ThroughputMonitor"),
    "Timer": _callback("Timer"),
    "WeightAveraging": Cell(
        "as ddp; the averages of a sharded table are sharded as it is",
        [
            f"{_AVERAGING}::test_equals_ddp[mean]",
            f"{_AVERAGING}::test_equals_ddp[every epoch]",
            f"{_AVERAGING}::test_a_rank_keeps_its_columns_of_the_averages",
        ],
    ),
}

_HEAD = """\
# Compatibility

Written by `python docs/compatibility.py` from its declarations; a test keeps it in step with them, with Lightning, and
with the tests that are named. "As ddp" means: the same numbers (fp64: 1e-10), files and steps as `strategy="ddp"` in
the test that is named.
"""


def render() -> str:
    """The file's text."""
    return "\n".join(
        [
            _HEAD,
            "## Arguments of the Trainer\n",
            *_table("argument", TRAINER),
            "\n## Built-in callbacks\n",
            *_table("callback", CALLBACKS),
            "",
        ]
    )


def _table(of: str, cells: Mapping[str, Cell]) -> list[str]:
    lines = [f"| {of} | under `embrace` | proven by |", "|---|---|---|"]
    for name, cell in cells.items():
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in cell.tests)
        lines.append(f"| `{name}` | {cell.says} | {tests} |")
    return lines


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
