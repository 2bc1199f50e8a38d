#!/usr/bin/env bash
# Makes the environment of a peer, .venvs/NAME: versions that go together must not bend those of the project.
#   environment.sh NAME    NAME is horovod, torchrec or deepspeed
#   PYTHON       the interpreter that makes it
#   CONSTRAINTS  the file of exact versions; empty: the newest ones allowed
set -eu -o pipefail

cd "$(dirname "$0")/../.."
NAME=$1
CONSTRAINTS=${CONSTRAINTS-constraints.txt}
TORCH=torch==2.13.0 # what TorchRec 1.8 is built for
env=$PWD/.venvs/$NAME
pip() { "$env/bin/python" -m pip --disable-pip-version-check "$@"; }
install() { pip install ${CONSTRAINTS:+-c "$CONSTRAINTS"} "$@"; }

case $NAME in
horovod | torchrec | deepspeed) ;;
*) echo "There is no environment '$NAME'. Write horovod, torchrec or deepspeed." >&2 && exit 2 ;;
esac
"${PYTHON:-python3}" -m venv "$env"
# torch goes first and alone: its exact version decides which build pip takes.
install "$TORCH"
install lightning torchmetrics rich numpy
case $NAME in
torchrec)
    # Its requirements name the GPU build of fbgemm.
    pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0
    install tensordict==0.15.3 iopath==0.1.10 pyre-extensions==0.0.32 tqdm pandas==3.1.1
    ;;
deepspeed)
    # Its operations would be compiled for CUDA; torch's own optimizers do without them.
    install setuptools wheel ninja
    DS_BUILD_OPS=0 install --no-build-isolation deepspeed==0.19.8
    ;;
horovod)
    CONSTRAINTS=$CONSTRAINTS "$env/bin/python" -I lightning_embrace/horovod_build.py
    ;;
esac
touch "$env/.installed"
