#!/usr/bin/env bash
# Builds Horovod with Gloo for the torch that an environment has, unless that was done before.
#   build_horovod.sh PYTHON    prints the path of the wheel
# The build takes about ten minutes on two cores and needs g++ and make. It is kept in ~/.cache, by the versions of Python and
# torch, since a wheel for another torch fails when it is imported.
set -eu -o pipefail

PYTHON=$1
HOROVOD=0.28.1
cache=${XDG_CACHE_HOME:-$HOME/.cache}/lightning_embrace

versions=$("$PYTHON" -c '
import sys
from importlib.metadata import version
print("cp%d%d-torch" % sys.version_info[:2] + version("torch").split("+")[0])
')
folder=$cache/horovod-$HOROVOD-$versions
find_wheel() { find "$folder" -name 'horovod-*.whl' -print -quit 2>/dev/null; }

if [ -z "$(find_wheel)" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    {
        # cmake 4 refuses the minimum version that Horovod names
        "$PYTHON" -m pip --disable-pip-version-check install \
            'cmake<4' setuptools wheel numpy packaging psutil cloudpickle pyyaml cffi
        # Horovod asks for C++14, torch needs C++17, and g++ honours the last one it is told.
        printf '#!/bin/sh\nexec g++ "$@" -std=c++17\n' >"$work/cxx"
        chmod +x "$work/cxx"
        PATH=$(dirname "$PYTHON"):$PATH MAKEFLAGS=-j2 CXX=$work/cxx LDFLAGS=-s \
            HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
            HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
            "$PYTHON" -m pip --disable-pip-version-check wheel --no-cache-dir --no-deps --no-build-isolation \
            -w "$work/wheels" "horovod==$HOROVOD"
        mkdir -p "$folder"
        mv "$work"/wheels/horovod-*.whl "$folder/"
    } >&2
fi
find_wheel
