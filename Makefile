# The two commands: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-all kills lint types docs packages locked clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

$(READY): pyproject.toml lab/pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,docs]" -e "./lab[ray]"
	@touch $@

locked: ## set up .venv from requirements.lock instead: what was pinned, compared with its checksums
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e . -e ./lab
	@touch $(READY)

demo: $(READY) ## the theory's figures, a study of training runs, and a report of both
	$(BIN)/carryclip demo

# Each process has neighbouring tests, which share what a file sets up, and in the end helps the other.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

# Whatever the caller's setting, keep compiled files: tests start many processes, and each would compile the sources anew.
test test-all kills: export PYTHONDONTWRITEBYTECODE :=

test: $(READY) ## run the tests: every guarantee, the largest grids in part
	$(PYTEST)

test-all: $(READY) ## run all tests: every cell of the grids
	$(PYTEST) -m ""

kills: $(READY) ## kill workers and supervisors 50 times during a study, at random
	CARRYCLIP_KILLS=50 $(BIN)/python -m pytest tests/lab/test_engine.py -k kills_at_random

lint: $(READY) ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## check types
	$(BIN)/pyright

docs: $(READY) ## build the documentation into site/
	$(BIN)/mkdocs build --strict

packages: $(READY) ## build both distributions and try them in clean environments
	.ci/packages

clean: ## remove .venv and everything built
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis
