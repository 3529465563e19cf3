# `make demo` and `make test` create their environment themselves; `make` lists all targets.

VENV ?= .venv
# Extra arguments for pip, such as an index or a cache.
PIP_ARGS ?=
# Folder in which `make matrix` keeps its Debian systems. Default: build/matrix.
ROOTS ?=
# Test processes. Tests that start workers wait most of the time: two cores suffice for six processes.
PROCESSES ?= 6
# Seed of the tests' order and of Hypothesis' examples: the same commit runs the same tests. `make long` draws others.
SEED ?= 1
# Server of `make test-redis`: system, valkey or embedded.
REDIS ?= embedded
# Set to 1 to count skipped tests as failures.
STRICT ?=
# Set to 1 to leave the demo and the SBOM out of `make release`.
QUICK ?=
# Default: the first of these that is Python 3.11 to 3.14 with venv.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null \
	&& echo $$python && break; done || true)
# Build of torch: cpu, cuda (from pip's index), or auto, which is cpu without an NVIDIA driver. On Linux, torch from pip's
# index includes gigabytes of CUDA libraries.
TORCH ?= auto
# Files that exist if an NVIDIA driver is loaded, on Linux and in the Windows Subsystem for Linux.
NVIDIA := $(wildcard /proc/driver/nvidia/version /dev/nvidiactl /usr/lib/wsl/lib/libcuda.so.1)
TORCH_BUILD = $(if $(filter auto,$(TORCH)),$(if $(NVIDIA),cuda,cpu),$(TORCH))
# Index with torch's CPU builds.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Tests start hundreds of Python processes: each would compile the code again without bytecode files.
export PYTHONDONTWRITEBYTECODE =
# Several test processes share the cores: threads that wait for others must not spin, which takes a fifth of a model's time.
export OMP_WAIT_POLICY ?= PASSIVE

BIN := $(VENV)/bin
SEEDS = --randomly-seed=$(SEED) --hypothesis-seed=$(SEED)
STAMP_TORCH = test $(VENV)/torch -nt constraints.txt || touch $(VENV)/torch
# pip, not uv: uv selects other torch wheels than those that constraints.txt was tested with.
# Quiet: pip's hundreds of lines would hide what comes after. PIP_ARGS=--verbose shows them.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
INSTALL = $(PIP_INSTALL) --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-redis long clusters containers matrix bounds coverage release test-gpu lint lint-fast docs rivals clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/demo ## Install the demo into .venv and run it
	$(BIN)/feedmill demo

# mypy uses one core for minutes if it has no cache: it runs beside the tests, and its output follows theirs.
test: $(VENV)/test lint-fast ## Install the test dependencies, run all checks and tests
	@mkdir -p build
	@$(BIN)/mypy >build/mypy.log 2>&1 & mypy=$$!; trap 'kill $$mypy 2>/dev/null' EXIT; trap 'exit 130' INT TERM; \
	PYTEST_REDIS=first $(BIN)/python -m pytest $(SEEDS) --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder $(if $(STRICT),--strict-skips); \
	tests=$$?; wait $$mypy; types=$$?; cat build/mypy.log; exit $$((tests || types))

test-redis: $(VENV)/test ## Run the tests marked each_redis on another redis-server: REDIS=valkey or embedded
	PYTEST_REDIS=$(REDIS) $(BIN)/python -m pytest $(SEEDS) --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder \
		-m "each_redis and not long$(if $(filter embedded,$(REDIS)), and not system_redis)" $(if $(STRICT),--strict-skips)

long: $(VENV)/test ## Run the long tests: all cases, faults, kills, eight simulated hours of each source, comparison with Celery, fuzzing, clusters, containers
	PYTEST_REDIS=first $(BIN)/python -m pytest -m long --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder \
		$(if $(STRICT),--strict-skips)
	for source in reddit arctic-shift bluesky hacker-news feeds; do $(BIN)/python -m tests.soak --source $$source || exit 1; done
	$(BIN)/python -m tests.study
	$(BIN)/python -m tests.differential
	ENDINGS_EVERYWHERE=1 $(BIN)/python -m pytest tests/e2e/test_endings.py
	$(BIN)/python -m tests.fuzz
	$(BIN)/python -m tests.chaos --posts 50000 --workers 4 --row-ms 4 --kill-every 3 --redis-restarts 10 --cuts 100 \
		--poison 1% --seed 7
	$(BIN)/python -m tests.chaos --posts 20000 --workers 3 --row-ms 4 --rolling 3
	$(BIN)/python -m tests.chaos --posts 10000 --workers 4 --row-ms 4 --pauses 5 --delays 5 --memory 5 --oom 10 \
		--hangs 3 --launcher-kills 3 --clock-jumps 10 --poison 1%
	$(MAKE) clusters
	$(MAKE) containers
	$(MAKE) matrix

clusters: build/clusters ## Run the programs of docs/clusters.md on local nodes of Ray, Daft, Dask and Spark (needs Java)
	build/clusters/bin/python -m tests.clusters

containers: $(VENV)/test ## Build the images and run them under faults, as root, with the Docker engine
	$(BIN)/python -m tests.containers

matrix: $(VENV)/test ## Run demo and tests on other Pythons, Redis versions and CPU instructions (as root)
	$(BIN)/python -m tests.matrix $(if $(ROOTS),--roots $(ROOTS))

bounds: $(VENV)/test ## Run the tests with the lowest versions that pyproject.toml admits, then with the newest
	$(BIN)/python -m tests.bounds lowest -- --numprocesses $(PROCESSES) --dist loadfile
	$(BIN)/python -m tests.bounds newest -- --numprocesses $(PROCESSES) --dist loadfile

coverage: $(VENV)/test ## Run the tests with branch coverage and require at least 95% of each package
	rm -rf build/coverage*
	@mkdir -p build
	$(BIN)/coverage run -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder
	$(BIN)/coverage combine
	for package in shared producers workers; do \
		$(BIN)/coverage report --include "$$package/*" --skip-covered --show-missing --fail-under 95 || exit 1; done

release: $(VENV)/release ## Build wheel, sdist, SBOM and SHA256SUMS into build/release, and test them in new environments
	$(BIN)/python -m tests.package $(if $(QUICK),--quick)

test-gpu: $(VENV)/test ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(if $(STRICT),--strict-skips)

lint: lint-fast ## Check lint, formatting, types and import contracts
	$(BIN)/mypy

lint-fast: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

docs: $(VENV)/test ## Generate the parts of the documentation that come from the code
	$(BIN)/python -m tests.generated

rivals: $(VENV)/rivals ## Install the alternatives that benchmarks.throughput compares

clean: ## Remove .venv, builds and caches
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamp files: an installation is repeated when pyproject.toml or constraints.txt has changed.
$(VENV)/base:
	@test "$$(uname)" = Linux || { echo "feedmill: Linux is required." >&2; exit 1; }
	@test -n "$(PYTHON)" || { echo "feedmill: no Python 3.11 to 3.14 with venv found. Install it, or set PYTHON=/path/to/python3.12." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# Installs only torch itself from TORCH_INDEX, in the version that constraints.txt pins. If it does not, the stamp file is
# left to the targets below, so that a rerun of an interrupted installation says again which torch it installs.
$(VENV)/torch: constraints.txt | $(VENV)/base
	@case "$(TORCH_BUILD)" in \
	cuda) echo "feedmill: torch comes from pip's index, with CUDA; TORCH=cpu selects the CPU build." >&2 ;; \
	cpu) echo "feedmill: installing torch's CPU build from $(TORCH_INDEX); TORCH=cuda selects pip's index." >&2; \
		$(PIP_INSTALL) --retries 1 --timeout 10 --no-deps --index-url "$(TORCH_INDEX)" \
			"$$(grep '^torch==' constraints.txt)" && touch $@ || { test "$(TORCH)" = auto && echo "feedmill: not found there:" \
			"torch comes from pip's index and may include gigabytes of CUDA libraries; TORCH_INDEX=ADDRESS selects another." >&2; } ;; \
	*) echo "feedmill: TORCH must be auto, cpu or cuda, not $(TORCH)." >&2; exit 1 ;; \
	esac

$(VENV)/demo: pyproject.toml constraints.txt $(VENV)/torch | $(VENV)/base
	@echo "Installing Feedmill, a model and their dependencies into $(VENV): a few minutes"
	@$(INSTALL) --editable '.[demo]'
	@$(STAMP_TORCH)
	@touch $@

$(VENV)/test: pyproject.toml constraints.txt $(VENV)/torch | $(VENV)/base
	$(INSTALL) --editable '.[demo,dev]'
	@$(STAMP_TORCH)
	@touch $@ $(VENV)/demo

$(VENV)/release: pyproject.toml constraints.txt $(VENV)/torch | $(VENV)/base
	$(INSTALL) --editable '.[release]'
	@$(STAMP_TORCH)
	@touch $@

# An environment above that of the tests, whose packages and editable installation it finds.
build/clusters: pyproject.toml $(VENV)/test
	$(BIN)/python -m venv $@
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		>"$$($@/bin/python -c 'import site; print(site.getsitepackages()[0])')/tests.pth"
	$@/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["clusters"])')
	@touch $@

$(VENV)/rivals: pyproject.toml constraints.txt $(VENV)/torch | $(VENV)/base $(VENV)/celery-batches
	$(INSTALL) --editable '.[demo,rivals]'
	@$(STAMP_TORCH)
	@touch $@ $(VENV)/demo

# celery-batches requires another Celery version than Feedmill. Both are installed into a folder that takes precedence in
# the worker of celery-batches only. Their dependencies come from the environment.
$(VENV)/celery-batches: | $(VENV)/base
	$(PIP_INSTALL) --no-deps --target $@.part \
		celery-batches==0.11 celery==5.6.3
	mv $@.part $@
