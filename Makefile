# make help lists the targets.
#
# Everything installs into $(VENV) on first use, and again when pyproject.toml changes. Where an environment has all
# the packages already (a GPU machine without a registry, say), give it and switch the installation off:
#
#     make test-gpu PYTHON=python3 VENV=

SHELL := /bin/bash
VENV ?= .venv
RANKS ?= 2
DEMO_ARGS ?=
BENCH_ARGS ?=
PYTEST_ARGS ?=
# Test processes side by side: one a core. Each keeps rank processes of its own, so many cost more than they save.
# Empty: one after another in one process, which needs no pytest-xdist.
PYTEST_WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 8 ? cores : 8)))

# Any Python 3.10 or newer that can make an environment; `python3` first, so that the user's choice wins.
ifndef PYTHON
PYTHON := $(shell for python in python3 python python3.13 python3.12 python3.11 python3.10 python3.14; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 \
	&& { echo $$python; break; }; done)
endif

ifeq ($(strip $(VENV)),)
RUN := $(PYTHON)
INSTALLED :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
endif

# One BLAS thread a rank: the ranks share the cores. The CPU suites run under Triton's interpreter on any machine.
export OMP_NUM_THREADS ?= 1
CPU_ONLY := CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1
PYTEST_SPREAD = $(if $(strip $(PYTEST_WORKERS)),-n $(PYTEST_WORKERS) --dist worksteal)

.DEFAULT_GOAL := help
.PHONY: help install demo demo-moe test test-all test-gpu lint format bench bench-ep bench-smoke clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

install: $(INSTALLED) ## make the environment and install the library with all extras for development

$(VENV)/.installed: pyproject.toml
	@if [ -z "$(PYTHON)" ]; then echo 'error: no Python 3.10 or newer found; name one with PYTHON=...' >&2; exit 1; fi
	@echo 'Installing into $(VENV) with $(PYTHON); only the first time, it takes a minute or more.'
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --disable-pip-version-check -q -e '.[bench,demo,test]'
	@touch $@

demo: $(INSTALLED) ## train a small packed language model on RANKS ranks (2) and compare it with one plain process
	@$(RUN) examples/train_packed_lm.py --ranks $(RANKS) $(DEMO_ARGS)

demo-moe: $(INSTALLED) ## train a small mixture-of-experts model, its experts on RANKS ranks (2), and compare likewise
	@$(RUN) examples/train_moe_lm.py --ranks $(RANKS) $(DEMO_ARGS)

test: lint ## lint, type check and the CPU test suite
	$(CPU_ONLY) $(RUN) -m pytest -m 'not gpu and not long' $(PYTEST_SPREAD) $(PYTEST_ARGS)

test-all: lint ## everything: the long matrices and campaigns too, and the GPU tests where there are GPUs
	$(CPU_ONLY) $(RUN) -m pytest -m 'not gpu' --long $(PYTEST_SPREAD) $(PYTEST_ARGS)
	$(RUN) -m pytest -m gpu --long $(PYTEST_ARGS)

test-gpu: $(INSTALLED) ## the GPU tests alone
	$(RUN) -m pytest -m gpu $(PYTEST_ARGS)

lint: $(INSTALLED) ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(INSTALLED) ## let ruff rewrite what it can
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(INSTALLED) ## tensor-parallel benchmark on two GPUs; figures go to benchmarks/results
	$(RUN) -m triton_overlap.bench tp $(BENCH_ARGS)

bench-ep: $(INSTALLED) ## expert-parallel benchmark on RANKS GPUs (2); figures go to benchmarks/results
	$(RUN) -m triton_overlap.bench ep --ranks $(RANKS) $(BENCH_ARGS)

bench-smoke: $(INSTALLED) ## the benchmark's code on two CPU ranks and tiny problems; its times mean nothing
	$(CPU_ONLY) $(RUN) -m triton_overlap.bench tp --smoke $(BENCH_ARGS)

clean: ## remove caches and outputs, not the environment
	rm -rf build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find triton_overlap tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
