# Everything a newcomer needs: `make train` and `make test`. Both set up .venv first when it is missing or out of date.
#
#   make test ARGS="-k gpipe"                 passes ARGS on
#   make train ARGS="trainer.devices=4"
#   make PYTHON=/usr/bin/python3.12 test      chooses the Python that .venv is made with

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help train test test-all test-extras test-versions test-field check format bench gpu docs pictures clean

ARGS ?=
PARTS ?=
# The first of these that is Python 3.11 to 3.13 and can make virtual environments.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python; do \
	"$$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1 \
	&& { echo "$$python"; break; }; done)
BIN := .venv/bin
# One thread per process: several processes share the cores, here as in training. And files of bytecode, also in an image
# that forbids them: without, each process of the tests compiles all that it imports, for ten seconds.
RUN := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python
EXTRAS := $(addprefix tests/recipes/test_,extras.py config.py docs.py) tests/trainer/test_service_loggers.py
# In the order of tests/conftest.py, which has long modules first: xdist's own, by number of tests, has them last.
PYTEST := $(RUN) -m pytest -n 2 --dist loadscope --no-loadscope-reorder

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: .venv/ready  ## train GPT-2 in two pipeline stages on two CPU processes (about two minutes)
	@$(RUN) -m recipes.train experiment=gpt2_wikitext2 $(ARGS)

test: .venv/ready  ## run the fast tests (about seven minutes on two cores)
	@$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-all: .venv/ready  ## run every test, the long sweeps too (hours on two cores)
	@$(PYTEST) $(ARGS)

test-extras: .venv-extras/ready  ## install loggers, sweepers and launchers beside .venv, and run the tests that need them
	@OMP_NUM_THREADS=1 .venv-extras/bin/python -m pytest -m "not slow and not gpu" $(EXTRAS) $(ARGS)

test-versions:  ## run the fast tests on the oldest and newest releases of Python, torch, Lightning (hours)
	@OMP_NUM_THREADS=1 $(PYTHON) tests/versions.py $(ARGS)

test-field: .venv-field/ready  ## train published modules on one device and on a pipeline, and write docs/field.md (an hour)
	@OMP_NUM_THREADS=1 .venv-field/bin/python -m tests.field $(ARGS)

check: .venv/ready  ## lint, formatting, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: .venv/ready  ## let ruff repair what it can
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

bench: .venv/ready  ## measure bubbles, speed and overheads on this machine
	@$(RUN) -m tests.benchmarks $(ARGS)

# On the torch, Lightning and pytest of $(PYTHON): nothing is installed.
gpu:  ## run what needs CUDA devices, in parts (PARTS="first" or names), and write results/gpu.json
	@$(PYTHON) -m tests.gpu $(PARTS)

docs: .venv/docs-ready  ## build the documentation into docs/_build/html, without network but for the first time
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

pictures: .venv/ready  ## draw the pictures of README and docs anew
	@$(BIN)/python -m docs.pictures

clean:  ## remove .venv, caches and the outputs of runs
	rm -rf .venv .venv-extras .venv-versions .venv-field build dist docs/_build outputs multirun .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/ready: pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "make: no Python 3.11 to 3.13 with its venv module was found." \
		"Install one, or name it: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up .venv with $$($(PYTHON) -V) and the versions in constraints.txt (once; a few minutes) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# What `logger=wandb`, `hparams_search=optuna` and the like need beyond that: their tests are skipped without. In an
# environment of its own, which has all of .venv beneath it: mlflow takes older releases of pandas and pyarrow.
.venv-extras/ready: .venv/ready
	@$(BIN)/python -m venv .venv-extras
	@$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> "$$(.venv-extras/bin/python -c 'import site; print(site.getsitepackages()[0])')/beneath.pth"
	@sed '/^pandas=/d; /^pyarrow=/d' constraints.txt > .venv-extras/constraints.txt
	@.venv-extras/bin/python -m pip install -qq --disable-pip-version-check --constraint .venv-extras/constraints.txt \
		--editable '.[extras]'
	@touch $@

# The packages whose modules are trained, in an environment of their own (six gigabytes): torchvision wants another torch.
.venv-field/ready: pyproject.toml tests/field/modules.toml
	@$(PYTHON) -m venv .venv-field
	@.venv-field/bin/python -m pip install -qq --disable-pip-version-check --editable . \
		$$($(PYTHON) -m tests.field.modules)
	@touch $@

# What the documentation needs beyond that: the tests do without.
.venv/docs-ready: .venv/ready
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@
