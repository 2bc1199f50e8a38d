"""One rank of one job: ``python -m examples.benchmarks.worker JOB_JSON RESULT_FILE``."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from examples.benchmarks.job import Job
from examples.benchmarks.peers import PEERS


def versions() -> dict[str, str]:
    """Versions of what can matter, as installed in this peer's environment."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for name in ("torch", "lightning", "lightning-embrace", "horovod", "torchrec", "fbgemm_gpu-cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def run(job: Job) -> dict[str, Any]:
    """Trains as the job says and returns what was measured."""
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    adapter = import_module(PEERS[job.peer].adapter)
    _tell_lightning_the_rank()
    result: dict[str, Any] = adapter.train(job)
    return {**result, "versions": versions()}


def _tell_lightning_the_rank() -> None:
    """Lightning takes it from the environment when it is imported, which may have been before this rank was forked."""
    from lightning_utilities.core.rank_zero import rank_zero_only

    rank_zero_only.rank = int(os.environ.get("RANK", 0))  # type: ignore[attr-defined]


def main() -> None:
    """Writes the result, or the error, so that the launcher can list it."""
    job, target = Job.from_json(sys.argv[1]), Path(sys.argv[2])
    try:
        result = run(job)
    except BaseException as error:
        result = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.rename(target)
    sys.stderr.flush()
    # a failed peer must not leave ranks waiting for its clean-up
    os._exit(1 if "error" in result else 0)


if __name__ == "__main__":
    main()
