# Every target sets itself up: a virtual environment in .venv, made with $(PYTHON) and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8
SOAK_SECONDS ?= 3600
POSTGRES15 ?= /usr/lib/postgresql/15/bin

.PHONY: help demo test test-full test-postgres15 soak lint format check wheel-test bench clean

help: ## Show this help
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "jayrun needs Python 3.11 or newer; this is $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(VENV)/.ready ## Watch many processes share four GPUs, one of them killed on the way (under 30 s)
	$(BIN)/jayrun demo

test: $(VENV)/.ready ## Run the tests (minutes; brings its own PostgreSQL)
	$(PYTEST) -m "not slow and not wheel"

test-full: $(VENV)/.ready ## Run all tests, the slow ones too
	$(PYTEST)

soak: $(VENV)/.ready ## Run work of every kind under faults for an hour (SOAK_SECONDS=..., SEED=...)
	SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m pytest -s -o faulthandler_timeout=0 tests/runtime/test_soak.py

test-postgres15: $(VENV)/.ready ## Run the tests against another PostgreSQL: POSTGRES15=/path/to/its/bin
	@test -x $(POSTGRES15)/postgres || { echo "no PostgreSQL in $(POSTGRES15): apt-get install postgresql-15"; exit 1; }
	JAYRUN_PG_BINDIR=$(POSTGRES15) $(PYTEST) -m "not slow and not wheel"

lint: $(VENV)/.ready ## ruff and mypy (strict)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy

format: $(VENV)/.ready ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel-test: $(VENV)/.ready ## Build the wheel and the sdist, and use what is in them
	$(BIN)/python -m pytest -m wheel tests/house

check: lint test wheel-test ## Everything a change must pass

bench: $(VENV)/.ready ## Measure admission against what PostgreSQL itself can do (minutes; on a quiet machine)
	$(BIN)/python -m benchmarks.admission

clean: ## Remove the virtual environment and everything built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
