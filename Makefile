# Everything runs from .venv, which any target makes when it is missing. Needed: python3 (with venv and pip), make, bash.
#   PYTHON       the interpreter that makes .venv
#   CONSTRAINTS  the file of exact versions (Python 3.11); `make CONSTRAINTS= ...` takes the newest ones allowed
#   TORCH        what pip is asked for as torch, by default the exact version in constraints.txt
#   ARGS         more arguments for pytest, as in `make test ARGS="-k plan"`
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
TORCH ?= $(shell grep '^torch==' constraints.txt)
ARGS ?=

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_DOCS := .venv/.installed-docs
INSTALLED_HOROVOD := .venv/.installed-horovod
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAIN := $(if $(CONSTRAINTS),-c $(CONSTRAINTS))

.PHONY: help
help:  ## Show the targets (default)
	@awk -F ':.*## ' '/^[.a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: .venv
.venv: $(INSTALLED)  ## Make the virtual environment, or bring it up to date

# torch goes first and alone: its exact version decides which build pip takes.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(PIP) install $(CONSTRAIN) $(TORCH)
	$(PIP) install $(CONSTRAIN) -e '.[test,examples]'
	touch $@

$(INSTALLED_DOCS): $(INSTALLED)
	$(PIP) install $(CONSTRAIN) -e '.[docs]'
	touch $@

# By path: the file needs nothing of the package, and must run where that cannot be imported.
$(INSTALLED_HOROVOD): $(INSTALLED) lightning_embrace/horovod_build.py
	CONSTRAINTS=$(CONSTRAINTS) $(BIN)/python -I lightning_embrace/horovod_build.py
	touch $@

.PHONY: horovod
horovod: $(INSTALLED_HOROVOD)  ## Install Horovod, built for the installed torch: six minutes, or a wheel that was kept

.PHONY: demo
demo: $(INSTALLED)  ## Train the example language model on two processes and print the bytes per step
	$(BIN)/python examples/train_lm.py --demo

.PHONY: peers
peers: .venvs/torchrec/.installed .venvs/horovod/.installed  ## Make the environments of TorchRec and Horovod for the benchmark

.venvs/%/.installed: examples/benchmarks/environment.sh lightning_embrace/horovod_build.py
	PYTHON=$(PYTHON) CONSTRAINTS=$(CONSTRAINTS) examples/benchmarks/environment.sh $*

.PHONY: test
test: $(INSTALLED)  ## Run the tests, with the fixed sample of the matrix
	@echo "Not in this run: matrix (make matrix), cuda (make cuda), network (make network), peers (make test-peers),"
	@echo "horovod (make test-horovod)"
	$(BIN)/python -m pytest $(ARGS)

.PHONY: matrix
matrix: $(INSTALLED)  ## Run the full matrix; its log is kept in docs/logs/matrix.log
	mkdir -p docs/logs
	$(BIN)/python -m pytest -m "matrix and not horovod" $(ARGS) 2>&1 | tee docs/logs/matrix.log

.PHONY: matrix-hydra
matrix-hydra: $(INSTALLED)  ## Run the full matrix of hydra alone; its log is kept in docs/logs/matrix-hydra.log
	mkdir -p docs/logs
	$(BIN)/python -m pytest -m matrix $(ARGS) tests/hydra 2>&1 | tee docs/logs/matrix-hydra.log

.PHONY: cuda
cuda: $(INSTALLED)  ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m cuda $(ARGS)

.PHONY: network
network: $(INSTALLED)  ## Run the tests that need root and network namespaces
	$(BIN)/python -m pytest -m "network and not peers" $(ARGS)

.PHONY: test-horovod
test-horovod: $(INSTALLED_HOROVOD)  ## Run the tests that exchange over Horovod
	$(BIN)/python -m pytest -m "horovod and not matrix" $(ARGS)

.PHONY: matrix-horovod
matrix-horovod: $(INSTALLED_HOROVOD)  ## Run the full matrix over Horovod; its log is kept in docs/logs/matrix-horovod.log
	mkdir -p docs/logs
	$(BIN)/python -m pytest -m "matrix and horovod" $(ARGS) 2>&1 | tee docs/logs/matrix-horovod.log

# Tests as they are, but that Horovod carries the exchanges of every worker process.
TRAINER_TESTS := $(addprefix tests/,test_averaging_distributed.py test_callbacks_distributed.py \
	test_clipping_distributed.py test_construction_distributed.py test_logging_distributed.py \
	test_model_summary_distributed.py test_monitoring_distributed.py test_optimizers_distributed.py \
	test_precision_distributed.py test_trainer_arguments_distributed.py test_utilities_distributed.py \
	tables/test_compile_distributed.py tables/test_recomputation_distributed.py)

.PHONY: trainer-horovod
trainer-horovod: $(INSTALLED_HOROVOD)  ## Run the Trainer's tests over Horovod; their log is kept in docs/logs/trainer-horovod.log
	mkdir -p docs/logs
	$(BIN)/python -m pytest --over-horovod $(ARGS) $(TRAINER_TESTS) 2>&1 | tee docs/logs/trainer-horovod.log

.PHONY: faults
faults: $(INSTALLED_HOROVOD)  ## Run each fault over Horovod twenty times; counts are kept in docs/logs/horovod-faults.log
	mkdir -p docs/logs
	REPEAT=20 $(BIN)/python -m pytest -v -m "horovod and not matrix" $(ARGS) tests/faults 2>&1 | awk '{ print > "/dev/stderr" } \
	    /^(platform|torch|=.* in )/ { print } \
	    match($$0, / (PASSED|FAILED|ERROR) /) { \
	      name = substr($$0, 1, RSTART - 1); sub(/[-[][0-9]+\]$$/, "", name); \
	      count[substr($$0, RSTART + 1, 6) "  " name (name ~ /\[/ ? "]" : "")]++ } \
	    END { for (test in count) print count[test], test | "sort -k 3" }' > docs/logs/horovod-faults.log

.PHONY: campaign
campaign: $(INSTALLED)  ## Kill ranks sixty times amid saving, loading and training; kept in docs/logs/checkpoint-faults.log
	mkdir -p docs/logs
	$(BIN)/python -m tests.faults.campaign --kills 60 $(ARGS) 2>&1 | tee docs/logs/checkpoint-faults.log

.PHONY: test-peers
test-peers: $(INSTALLED) peers  ## Run the tests of the benchmark's peers
	$(BIN)/python -m pytest -m peers $(ARGS)

.PHONY: bench
bench: $(INSTALLED)  ## Run the quick benchmark on an emulated cluster (needs root): about three minutes
	$(BIN)/python examples/benchmarks/run.py --quick $(ARGS)

.PHONY: lint
lint: $(INSTALLED)  ## Check style, formatting and types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

.PHONY: format
format: $(INSTALLED)  ## Format the code and apply the safe fixes
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

.PHONY: docs
docs: $(INSTALLED_DOCS)  ## Build the documentation site in site/
	$(BIN)/python -m mkdocs build --strict

.PHONY: clean
clean:  ## Remove caches and build products; .venv, logs and checkpoints stay
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage htmlcov
	find . -name ".venv*" -prune -o -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
