"""Whether Horovod can be used here, and what to do when it cannot."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType


class HorovodUnavailableError(ImportError):
    """``communication="horovod"`` was asked for, and Horovod is missing, or built for something else."""


def build_command() -> str:
    """What builds and installs Horovod for the torch of this interpreter."""
    return f"{sys.executable} -m lightning_embrace.horovod_build"


def load_horovod() -> ModuleType:
    """Imports ``horovod.torch``.

    Returns:
        The module.

    Raises:
        HorovodUnavailableError: It is missing, was built without torch or for another one, or knows neither Gloo nor
            MPI. The message has the command that helps.
    """
    cure = f"Build it for this torch, in about six minutes: {build_command()}"
    asked = 'communication="horovod" was asked for, but'
    if find_spec("horovod") is None:
        raise HorovodUnavailableError(f"{asked} Horovod is not installed. {cure}")
    try:
        horovod = import_module("horovod.torch")
    except Exception as error:  # a symbol of another torch, a library that is missing, or Horovod's own words
        reason = " ".join(str(error).split())[:300]
        raise HorovodUnavailableError(
            f"{asked} Horovod {_version()} cannot be imported beside torch {version('torch')}: {reason}. It was built"
            f" for another torch, or without torch. {cure}"
        ) from error
    if not (horovod.gloo_built() or horovod.mpi_built()):
        raise HorovodUnavailableError(f"{asked} Horovod {_version()} was built with neither Gloo nor MPI. {cure}")
    return horovod


def _version() -> str:
    try:
        return version("horovod")
    except PackageNotFoundError:
        return "(of an unknown version)"
