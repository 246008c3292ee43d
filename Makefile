# What a person runs, what pre-commit runs and what .ci/run runs. `make help` lists it.
#
# Set-up is done in steps, each with a stamp, so that a second `make test` starts at once:
#   virtual environment -> pinned dependencies -> Horovod wheel (built once per user) -> this package, editable
# and beside it, in a folder that only tests read, the public models that they train.

SHELL      := /bin/bash
VENV       := .venv
MODELS     := .peers/models
PY         := $(VENV)/bin/python
PYTHON     ?= $(shell command -v python3.11 || command -v python3)
# Tests that start processes mostly wait for them: two at a time for each core (nproc prints OMP_NUM_THREADS, if it is set).
PYTEST     := $(PY) -m pytest --dist worksteal --maxprocesses 16
PER_CORE   := -n $(shell echo $$((2 * $$(env -u OMP_NUM_THREADS nproc))))
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Compiled modules are cached, also where the environment forbids it: compiling the tests again for each run and the
# package for each of their processes takes a sixth of the time of `make test-fast`.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-all test-fast test-gpu check docs pictures bench bench-smoke clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.ready $(MODELS)/.ready  ## virtual environment, dependencies, Horovod, this package (first time: about 8 minutes)

demo: setup  ## 3 workers on the synthetic log: a straggler, two switches of mode, two kills, a lost host (3 minutes)
	$(PY) examples/demo.py

test: setup  ## the tests, also those that start real processes
	$(PYTEST) $(PER_CORE) -m "not variant"

test-all: setup  ## the same, and slow variants of them
	$(PYTEST) $(PER_CORE)

test-fast: setup  ## the tests that start no processes and are not slow
	$(PYTEST) -n logical -m "not processes and not slow and not variant"

test-gpu: setup  ## the tests of what a GPU does; the tables' memory is in /dev/shm, which a GPU's driver takes
	$(PYTEST) -m gpu --basetemp=$$(mktemp -d /dev/shm/gba-hvd-test-XXXXXX)/tests

check: setup  ## formatting, lint, types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy gba_hvd recovery tools examples

docs: setup  ## documentation with the API reference, to build/docs; fails on a warning or a broken link
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict

pictures: setup  ## the pictures of README.md, to docs/img; runs the demo (4 minutes)
	$(PY) docs/pictures.py

bench: setup  ## ours against plain Horovod and TorchRec, to runs/bench/allreduce.json
	rm -f runs/bench/allreduce.json
	$(VENV)/bin/gba-hvd bench allreduce --batch 2048 8192 --out runs/bench/allreduce.json

bench-smoke: setup  ## is a ratio to a peer worse than the one in docs/bench.json? (5 minutes, a quiet machine)
	$(VENV)/bin/gba-hvd bench smoke

clean:  ## remove what runs and builds left; the environment and the cached Horovod wheel stay
	rm -rf runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
	rm -f $(VENV)/.ready  # the compiled kernels were in a __pycache__

# --- set-up ---------------------------------------------------------------------------------------------------------

$(VENV)/.venv:
	@test -n "$(PYTHON)" || { echo "no python3 found; Python 3.11 is needed: apt-get install -y python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo "Python 3.11 is needed (the pinned versions are chosen for it), $(PYTHON) is $$($(PYTHON) -V 2>&1);"; \
	  echo "install it, or name one: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: apt-get install -y python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first: it is the largest, and what Horovod is built against.
$(VENV)/.dependencies: requirements.txt requirements-dev.txt constraints.txt $(VENV)/.venv
	$(PY) -m pip install "$$(grep '^torch==' requirements.txt)" -c constraints.txt
	@echo "installing the other dependencies (a minute or two)"
	$(PY) -m pip install --quiet -r requirements.txt -r requirements-dev.txt -c constraints.txt
	@touch $@

$(VENV)/.horovod: tools/build_horovod.py $(wildcard tools/horovod/patches/*/*.patch) $(VENV)/.dependencies
	$(PY) -m tools.build_horovod --install
	@touch $@

$(VENV)/.package: setup.cfg pyproject.toml $(VENV)/.horovod
	$(PY) -m pip install --quiet --no-build-isolation --editable '.[all]' -c constraints.txt
	@touch $@

# The row kernels are compiled before their first call and cached on disk, modules are too, if Python may write there; here,
# so that no worker waits for it later.
$(VENV)/.ready: gba_hvd/kernels.py gba_hvd/compression/kernels.py $(VENV)/.package
	$(PY) -c "from gba_hvd import kernels; from gba_hvd.compression import kernels as others; kernels.load(); others.load()"
	$(PY) -m compileall -q gba_hvd recovery tools
	@touch $@

$(MODELS)/.ready: requirements-models.txt $(VENV)/.dependencies
	rm -rf $(MODELS)
	$(PY) -m pip install --quiet --no-deps --target $(MODELS) -r requirements-models.txt
	@touch $@
