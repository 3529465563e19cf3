# Both commands of the README live here: `make demo` and `make test`. Each does its own set-up from nothing.

VENV ?= .venv
# Passed on to pip, for an index or a cache of your own.
PIP_ARGS ?=
# 1: a test that is skipped is a failure.
STRICT ?=
# The first of these that is a Python 3.11 or 3.12 with venv.
PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
	$$python -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& echo $$python && break; done || true)

BIN := $(VENV)/bin
# pip, not uv: uv takes other wheels of torch than the ones that constraints.txt was tested with.
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test long test-gpu lint docs rivals clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/demo ## Install what the demo needs into .venv, and run it
	$(BIN)/feedmill demo

test: $(VENV)/test lint ## Install what the tests need, then lint, types, import contracts and all tests
	$(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder $(if $(STRICT),--strict-skips)

long: $(VENV)/test ## The runs that take minutes: past faults and kills; eight simulated hours; ten thousand messages, twice; hostile ones
	$(BIN)/python -m tests.soak_reddit
	$(BIN)/python -m tests.soak_hours
	$(BIN)/python -m tests.soak_counts
	$(BIN)/python -m tests.differential
	$(BIN)/python -m tests.fuzz
	$(BIN)/python -m tests.chaos --posts 50000 --workers 4 --row-ms 4 --kill-every 3 --redis-restarts 10 --cuts 100 \
		--poison 1% --seed 7
	$(BIN)/python -m tests.chaos --posts 20000 --workers 3 --row-ms 4 --rolling 3
	$(BIN)/python -m tests.chaos --posts 10000 --workers 4 --row-ms 4 --pauses 5 --delays 5 --memory 5 --oom 10 \
		--hangs 3 --launcher-kills 3 --clock-jumps 10 --poison 1%

coverage: $(VENV)/test ## The tests once more, with the branches counted that they take: at least 95% of each package's
	rm -rf build/coverage*
	@mkdir -p build
	$(BIN)/coverage run -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m tests.branches

dist: $(VENV)/test ## Build the wheel and the sdist, and try each in an environment of its own
	$(BIN)/python -m tests.package

test-gpu: $(VENV)/test ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(if $(STRICT),--strict-skips)

lint: $(VENV)/test ## Lint, formatting, types and import contracts alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/test ## Write what the documentation says of the code: tables, lists, trees, JSON Schema
	$(BIN)/python -m tests.generated

rivals: $(VENV)/rivals ## Install what benchmarks.throughput compares with

clean: ## Remove .venv and everything that was generated
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: an installation is done again when what it was made from has changed.
$(VENV)/base:
	@test -n "$(PYTHON)" || { echo "feedmill: Python 3.11 or 3.12 with venv is needed. Install it, or set PYTHON=/path/to/python3.11." >&2; exit 1; }
	@$(PYTHON) feedmill/prerequisites.py
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/demo: pyproject.toml constraints.txt | $(VENV)/base
	$(INSTALL) --editable '.[demo]'
	@touch $@

$(VENV)/test: pyproject.toml constraints.txt | $(VENV)/base $(VENV)/celery-batches
	$(INSTALL) --editable '.[demo,dev]'
	@touch $@ $(VENV)/demo

$(VENV)/rivals: pyproject.toml constraints.txt | $(VENV)/base $(VENV)/celery-batches
	$(INSTALL) --editable '.[demo,charts,rivals]'
	@touch $@ $(VENV)/demo

# celery-batches demands another Celery than Feedmill: both lie in a folder that goes before the environment's packages
# in its worker alone. What Celery needs besides is the environment's own.
$(VENV)/celery-batches: | $(VENV)/base
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) --no-deps --target $@.part \
		celery-batches==0.11 celery==5.6.3
	mv $@.part $@
