# Everything is installed into .venv; nothing else on the machine changes.  `make` alone lists the targets.

PYTHON ?= python3
VENV ?= .venv

# Where an NVIDIA GPU is found, PyPI's PyTorch brings CUDA and the Triton that belongs to it.  Elsewhere on Linux
# a CPU build does; it has an index of its own, since PyPI's would bring gigabytes of CUDA, and Triton is the one
# that the tests were written against.  A machine whose pip is told where to look, by PIP_INDEX_URL or
# PIP_FIND_LINKS, is left to that.  All of it can be overridden:
#   make demo TORCH="torch==2.14.1"         another version
#   make demo TORCH_INDEX=URL               another index of PyTorch builds, such as one for ROCm
#   make demo TORCH_INDEX=                  whatever pip finds by itself
ifeq ($(shell uname -s)$(shell nvidia-smi -L 2>/dev/null),Linux)
TORCH ?= torch==2.13.0 triton==3.6.0
ifeq ($(PIP_INDEX_URL)$(PIP_FIND_LINKS),)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
endif
endif
TORCH ?= torch==2.13.0

# Tests run in as many processes as there are cores, but one by one where they share a GPU.
JOBS ?= $(if $(shell nvidia-smi -L 2>/dev/null),0,auto)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
BENCHMARKS := decode_attention prefill_attention rms_norm linear rope topk llama pass_speed

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench-smoke performance clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.package  ## run the main job: a small Llama, explained, compiled, compared with eager
	$(BIN)/python -m examples.demo

test: $(VENV)/.dev  ## run the tests
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

lint: $(VENV)/.dev  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev  ## format the code
	$(BIN)/ruff format .

bench-smoke: $(VENV)/.dev  ## run every benchmark at its smallest size: does all of it work?
	set -e; for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks $$name --tiny; done

performance: $(VENV)/.dev  ## write docs/performance.md from benchmarks/results
	$(BIN)/python -m benchmarks report

clean:  ## remove .venv and the caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis

# PyTorch comes first, so that nothing else can choose a build of it; it warns where NumPy is missing.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH) numpy
	touch $@

$(VENV)/.package: $(VENV)/.torch pyproject.toml setup.py
	$(PIP) install --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.package
	$(PIP) install --editable ".[dev]"
	touch $@
