# `make train` and `make test` do everything on a fresh clone: environment, installation, run.
# `make test` runs a sample of all cases, `make test-all` every test. ARGS go to pytest: make test ARGS="-k router"
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
export PYTHONDONTWRITEBYTECODE :=  # compiled once: tests start hundreds of interpreters, and rewrite their own asserts

.PHONY: train test test-all lint types check check-all page clean

train: $(VENV)/.moefold
	$(BIN)/moefold train starter $(ARGS)

test: lint types check

test-all: lint types check-all

lint: $(VENV)/.dev
	$(BIN)/ruff check moefold tests examples
	$(BIN)/ruff format --check moefold tests examples

types: $(VENV)/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python

check: SAMPLE := and not extended
check check-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not alone $(SAMPLE)" $(ARGS) || [ $$? -eq 5 ]  # 5: none of those asked for
	$(BIN)/python -m pytest -m "alone $(SAMPLE)" $(ARGS) || [ $$? -eq 5 ]  # 5: none of those asked for

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"moefold needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Run: make PYTHON=python3.12 train")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.moefold: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]'
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.moefold

page: $(VENV)/.dev  # the tests in a browser, which the others skip where there is none
	.ci/install-chromium
	$(BIN)/python -m tests.support.page_suite

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
