"""Builds Horovod for the torch that is installed, and installs it: ``python -m lightning_embrace.horovod_build``.

A wheel is kept in ``~/.cache``, by the versions of Python and torch: for another torch it could not be imported.
Variables that Horovod's build reads (``HOROVOD_WITH_MPI``, ``HOROVOD_GPU_OPERATIONS``, ...) choose a variant, which is
kept apart. The file imports nothing but the standard library, so it also runs as a script in an environment that has
torch and not this package.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HOROVOD = "0.28.1"
#: torch alone, and Gloo, which comes with Horovod
_USUAL = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
}
#: what the build needs besides torch: not installed, only lent. cmake 4 refuses the minimum version that Horovod names
_TOOLS = ["cmake<4", "setuptools", "wheel", "numpy", "packaging", "psutil", "cloudpickle", "pyyaml", "cffi"]
#: what Horovod needs when it runs
_NEEDS = ["packaging", "psutil", "cloudpickle", "pyyaml", "cffi"]
# Horovod asks for C++14 and torch needs C++17 or more; the compiler honours the last one that it is told
_COMPILER = '#!/bin/sh\nexec {compiler} "$@" -std=c++17\n'


def choices(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of Horovod's build: the usual ones, where the user has not said otherwise.

    Args:
        environment: What is set. ``HOROVOD_WITH_X`` takes the place of ``HOROVOD_WITHOUT_X`` and the other way round.
    """
    said = {n: v for n, v in environment.items() if n.startswith(("HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_CPU_OP"))}
    said |= {n: v for n, v in environment.items() if n.startswith(("HOROVOD_NCCL", "HOROVOD_CUDA", "HOROVOD_BUILD"))}
    usual = {name: value for name, value in _USUAL.items() if _opposite(name) not in said}
    return {**usual, **said}


def _opposite(name: str) -> str:
    if name.startswith("HOROVOD_WITHOUT_"):
        return name.replace("HOROVOD_WITHOUT_", "HOROVOD_WITH_")
    return name.replace("HOROVOD_WITH_", "HOROVOD_WITHOUT_")


def folder_of(chosen: Mapping[str, str], torch: str, environment: Mapping[str, str]) -> Path:
    """Where a wheel is kept.

    Args:
        chosen: The variables of the build.
        torch: Its version.
        environment: Says where caches are.
    """
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_embrace"
    name = f"horovod-{HOROVOD}-cp{sys.version_info[0]}{sys.version_info[1]}-torch{torch.partition('+')[0]}"
    special = sorted(f"{n.removeprefix('HOROVOD_')}={v}" for n, v in chosen.items() if _USUAL.get(n) != v)
    return cache / "-".join([name, *(s.replace("/", "_") for s in special)])


def find_wheel(folder: Path) -> Path | None:
    """The wheel in a folder, if there is one."""
    return next(iter(sorted(folder.glob("horovod-*.whl"))), None)


def build(folder: Path, chosen: Mapping[str, str]) -> Path:
    """Builds a wheel; its output goes to stderr. Takes about six minutes on two cores.

    Args:
        folder: Where it is kept.
        chosen: The variables of the build.

    Returns:
        The wheel.
    """
    compiler = os.environ.get("CXX", "g++")
    missing = [tool for tool in (compiler.split()[0], "make") if shutil.which(tool) is None]
    if missing:
        sys.exit(f"Building Horovod needs {' and '.join(missing)}: install a C++ compiler and make.")
    with tempfile.TemporaryDirectory() as work:
        tools, wheels, wrapper = Path(work, "tools"), Path(work, "wheels"), Path(work, "cxx")
        _pip("install", "--target", str(tools), *_TOOLS)
        wrapper.write_text(_COMPILER.format(compiler=compiler))
        wrapper.chmod(0o755)
        path = os.pathsep.join([str(tools / "bin"), os.environ.get("PATH", os.defpath)])
        environment = {"MAKEFLAGS": f"-j{os.cpu_count() or 1}", "LDFLAGS": "-s", **os.environ, **chosen}
        environment |= {"PATH": path, "PYTHONPATH": str(tools), "CXX": str(wrapper)}
        wheel = ["wheel", "--no-cache-dir", "--no-deps", "--no-build-isolation", "-w", str(wheels)]
        _pip(*wheel, f"horovod=={HOROVOD}", environment=environment)
        built = find_wheel(wheels)
        assert built is not None
        folder.mkdir(parents=True, exist_ok=True)
        # a second build at the same time must not find half a file
        half = folder / f".{os.getpid()}-{built.name}"
        shutil.move(built, half)
        return half.replace(folder / built.name)


def install(wheel: Path) -> None:
    """Installs a wheel and what it needs, and checks that it can be imported."""
    constraints = os.environ.get("CONSTRAINTS")
    _pip("install", *(["-c", constraints] if constraints else []), *_NEEDS)
    _pip("install", "--no-deps", "--force-reinstall", str(wheel))
    # in another process: this one may hold the modules of the one before
    if subprocess.run([sys.executable, "-c", "import horovod.torch"]).returncode != 0:
        sys.exit(f"{wheel} cannot be imported beside this torch. Build it anew: give --force.")
    print(f"Horovod {HOROVOD} is installed in {sys.prefix}.")


def _pip(*arguments: str, environment: Mapping[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    ended = subprocess.run(command, env=environment, stdout=sys.stderr)
    if ended.returncode != 0:
        sys.exit(f"This failed, with exit status {ended.returncode}: {shlex.join(command)}")


def main(arguments: list[str] | None = None) -> None:
    """Takes the kept wheel or builds one, and installs it."""
    parser = argparse.ArgumentParser(prog="python -m lightning_embrace.horovod_build", description=__doc__)
    parser.add_argument("--force", action="store_true", help="build, even if a wheel for this torch is kept")
    parser.add_argument("--wheel", action="store_true", help="print the wheel's path instead of installing it")
    options = parser.parse_args(arguments)
    try:
        torch = version("torch")
    except PackageNotFoundError:
        sys.exit(f"Install torch first: Horovod is built for the one that is in {sys.prefix}.")
    chosen = choices(os.environ)
    folder = folder_of(chosen, torch, os.environ)
    wheel = None if options.force else find_wheel(folder)
    if wheel is None:
        print(f"Building Horovod {HOROVOD} for torch {torch}, to be kept in {folder}", file=sys.stderr)
        wheel = build(folder, chosen)
    if options.wheel:
        print(wheel)
    else:
        install(wheel)


if __name__ == "__main__":
    main()
