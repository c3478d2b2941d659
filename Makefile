# `make` lists the targets. Everything is installed into .venv, nothing outside this folder is touched.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# Several times quicker than pip; both check every package against the hashes of requirements.lock.
UV := $(shell command -v uv 2>/dev/null)
# pip says nothing for minutes, or thousands of lines: its lines are counted.
LOCKED = $(shell grep -c '^[a-z0-9].*==' requirements.lock)

# Tools that `make audit` and `make sbom` fetch.
PIP_AUDIT = 2.10.1
CYCLONEDX = 7.5.0

# Tests wait for processes and disks: three at a time keep two cores busy, and four of the slow ones.
WORKERS = -n 3 --dist loadfile
test-slow test-exhaustive: WORKERS = -n 4 --dist loadfile

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup run test test-slow test-exhaustive lint bench ui clean lock picture docs audit sbom

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile
	@echo 'Variables: PYTHON=python3.13 for a new .venv, ARGS="..." for the command behind run, test, bench, ui.'

setup: $(INSTALLED)  ## Create .venv and install requirements.lock into it (all other targets do that if needed)

run: $(INSTALLED)  ## Train, evaluate and register a model: ARGS="mnist --set train.epochs=2", default the digits run
	@$(BIN)/stratagem run $(ARGS)

test: $(INSTALLED)  ## Run the tests that need neither clusters nor whole runs
	@$(BIN)/python -m pytest $(WORKERS) -m "not slow" $(ARGS)

# pytest ends with 5 where nothing is selected, which is no failure.
test-slow: $(INSTALLED)  ## Run the tests that start clusters, servers or whole runs
	@$(BIN)/python -m pytest $(WORKERS) -m "slow and not exhaustive" $(ARGS) || test $$? -eq 5

test-exhaustive: $(INSTALLED)  ## Run further slow tests (weekly, and before a release)
	@$(BIN)/python -m pytest $(WORKERS) -m exhaustive $(ARGS) || test $$? -eq 5

lint: $(INSTALLED)  ## Check style (ruff), types (mypy, strict) and layers (import-linter)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(INSTALLED)  ## Measure this pipeline and the plain recipe side by side
	@$(BIN)/python -m benchmarks $(ARGS)

picture: $(INSTALLED)  ## Redraw the packages and their imports in docs/architecture.md
	@$(BIN)/python -m tests.layers

docs: $(INSTALLED)  ## Write the generated pages of docs/ again, and build the site: build/docs/site/index.html
	@$(BIN)/python -m tests.reference
	@$(BIN)/python -m tests.website

# Each in an environment of its own: what they need is no part of the lock. CVE-2025-69872 is of diskcache, which DVC needs and
# which unpickles what lies in its folder: that is one that only this user can write to (tasks/runs/dvc.py).
audit: $(if $(UV),,$(INSTALLED))  ## Ask PyPI for known weaknesses of the locked packages (pip-audit; needs the network)
	@$(or $(UV),$(BIN)/uv) tool run --from 'pip-audit==$(PIP_AUDIT)' pip-audit --requirement requirements.lock --require-hashes \
	  --disable-pip --strict --progress-spinner off --ignore-vuln CVE-2025-69872 $(ARGS)

sbom: $(INSTALLED)  ## Write build/sbom.json: the installed packages with their licences, as CycloneDX
	@mkdir -p build
	@$(or $(UV),$(BIN)/uv) tool run --from 'cyclonedx-bom==$(CYCLONEDX)' cyclonedx-py environment $(BIN)/python \
	  --pyproject pyproject.toml --mc-type application --output-reproducible --of JSON -o build/sbom.json $(ARGS)

ui: $(INSTALLED)  ## Open the MLflow and Prefect pages of this project
	@$(BIN)/stratagem ui $(ARGS)

clean:  ## Remove runs and data: mlruns, metrics, data/*/raw and prepared, all caches (keeps .venv)
	@# The lock of mlruns/up is held as long as `stratagem up` keeps its servers there.
	@test ! -e mlruns/up/lock || $(PYTHON) -c 'import fcntl; fcntl.flock(open("mlruns/up/lock"), fcntl.LOCK_SH | fcntl.LOCK_NB)' 2>/dev/null \
	  || { echo "stratagem up runs here, and its folder would go: end it first, with $(BIN)/stratagem down" >&2; exit 1; }
	@mkdir -p mlruns
	@find mlruns -mindepth 1 -maxdepth 1 ! -name .gitkeep -exec rm -rf {} +
	@rm -rf metrics build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@rm -rf data/*/raw data/*/prepared .dvc/cache .dvc/tmp
	@find . -path ./.venv -prune -o -path ./.git -prune -o -type d \( -name __pycache__ -o -name .dvc_site \) -exec rm -rf {} +

lock: $(INSTALLED)  ## Resolve pyproject.toml into requirements.lock: ARGS=--upgrade for newer versions
	@$(BIN)/uv pip compile --quiet --generate-hashes --no-emit-index-url --universal --python-version 3.11 \
	  --custom-compile-command "make lock" --all-extras -o requirements.lock pyproject.toml $(ARGS)

# The stamp comes last: an install that was interrupted, or that is older than the lock, is done again.
# --no-deps: the lock is complete, and pip 23 refuses it when it looks for `sqlalchemy[asyncio]` by itself.
$(INSTALLED): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not there: install Python 3.11, 3.12 or 3.13, or name one, such as make PYTHON=python3.13" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = tuple(sys.version_info[:2]); sys.exit(None if (3, 11) <= v <= (3, 13) else "$(PYTHON) is Python %d.%d, and TensorFlow needs 3.11, 3.12 or 3.13: name one, such as make PYTHON=python3.13" % v)'
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.argv[1] != sys.version)' "$$($(PYTHON) -c 'import sys; print(sys.version)')" 2>/dev/null \
	  || $(PYTHON) -m venv --clear .venv
	@echo "Installing the packages of requirements.lock into .venv (about 3 GB on disk)"
ifdef UV
	@$(UV) pip install --python $(BIN)/python --compile-bytecode --no-deps --require-hashes -r requirements.lock
	@$(UV) pip install --python $(BIN)/python --quiet --no-deps --no-build-isolation -e .
else
	@{ $(BIN)/python -u -m pip install --progress-bar off --no-deps --require-hashes -r requirements.lock; \
	  echo "pip ended with $$?"; } | { n=0; while IFS= read -r line; do case "$$line" in \
	    Collecting*|Processing*) n=$$((n + 1)); test $$((n % 20)) -ne 0 || echo "  $$n of $(LOCKED) packages are here";; \
	    Installing*) echo "  all are here; unpacking them takes about as long again";; \
	    "pip ended with "*) exit "$${line##* }";; \
	  esac; done; }
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
endif
	@$(BIN)/python -c 'from tasks.runs import dvc; dvc.configure()'
	@touch $@
