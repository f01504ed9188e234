# Each target makes the environment it needs in .venv. An interrupted install leaves no stamp, so it is redone.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help .venv train test test-all check bench docs clean

help:  ## list the targets
	@sed -n 's/^\([a-z.][a-z-]*\):.*##  *\(.*\)/  make \1\t\2/p' Makefile | expand -t 18

.venv: .venv/runtime.stamp  ## .venv/bin/trimaran and what the recipes need

train: .venv  ## train a GPT on two processes, on the standard library's source (minutes)
	$(BIN)/trimaran train recipes/gpt.py --procs 2

test: check  ## lint, types, contracts, and all tests but the slow ones
	$(BIN)/python -m pytest -m "not slow" --ignore tests/contracts

test-all: check  ## lint, types, contracts, and all tests
	$(BIN)/python -m pytest --ignore tests/contracts

check: .venv/dev.stamp  ## lint, types, contracts (under a minute)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/contracts

bench: .venv  ## run every benchmark
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

docs: .venv/docs.stamp  ## build the documentation into site/
	$(BIN)/mkdocs build --strict

clean:  ## remove .venv, caches and built files; runs/ stays
	rm -rf .venv site build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/runtime.stamp: pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "$(PYTHON) is not found. Trimaran needs Python 3.11 or newer:" \
		"install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version.split()[0]; sys.exit(0 if sys.version_info >= (3, 11) else \
		"$(PYTHON) is Python %s. Trimaran needs 3.11 or newer: name one, as in make PYTHON=python3.11" % v)'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear .venv
	$(INSTALL) -e '.[recipes]'
	@touch $@

.venv/dev.stamp: .venv/runtime.stamp
	$(INSTALL) -e '.[dev]'
	@touch $@

.venv/docs.stamp: .venv/runtime.stamp
	$(INSTALL) -e '.[docs]'
	@touch $@
