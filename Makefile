# Warmfleet: every target does the set-up it misses. `make` alone lists the targets.
# Variables: PYTHON (3.11 or newer), NAME (bench), ARGS (passed on to the command of run, test and bench);
# of the bench `trace`: TRACE, POLICY, REPLICAS, FLEET, SEEDS (make puts them into its environment).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
UV := .venv-uv/bin/uv
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
ARGS ?=
BENCHES = $(patsubst tests/bench/bench_%.py,%,$(wildcard tests/bench/bench_*.py))

SOURCES := app worker_plugin loadtest tests
PROJECTS := pyproject.toml worker_plugin/pyproject.toml
OS_PACKAGES := redis-server haproxy lua-check openssl

RUN_STAMP := $(VENV)/.run-ready
DEV_STAMP := $(VENV)/.dev-ready
CHECKOV_STAMP := .venv-checkov/.ready

.PHONY: help run test check format lock bench loadtest deps vllm clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(RUN_STAMP) ## start a store, four simulated engines and two routers behind one address
	@$(VENV)/bin/warmfleet up $(ARGS)

test: $(DEV_STAMP) $(CHECKOV_STAMP) vllm ## run every test (needs `make deps` once)
	@$(PY) -m pytest $(ARGS)

check: $(DEV_STAMP) ## format, lint, types, import rules, Lua
	@$(VENV)/bin/ruff format --check $(SOURCES)
	@$(VENV)/bin/ruff check $(SOURCES)
	@$(VENV)/bin/mypy $(SOURCES)
	@$(VENV)/bin/lint-imports
	@command -v luacheck > /dev/null || { echo "luacheck is missing: run 'make deps' once" >&2; exit 1; }
	@luacheck --quiet --std lua51 --read-globals redis KEYS ARGV cjson cmsgpack struct bit include --max-line-length 120 -- lua

format: $(DEV_STAMP) ## let ruff format the code and fix what it can
	@$(VENV)/bin/ruff format $(SOURCES)
	@$(VENV)/bin/ruff check --fix $(SOURCES)

bench: $(DEV_STAMP) ## make -s bench NAME=decide (or apply, sync, identity ...): one JSON object as the last line
	@test -f "tests/bench/bench_$(NAME).py" || { echo "usage: make -s bench NAME=<name>, one of:" $(BENCHES) >&2; exit 2; }
	@PYTHONPATH=app:worker_plugin:loadtest $(PY) -m tests.bench.bench_$(NAME) $(ARGS)

loadtest: $(DEV_STAMP) ## drive the local stack through haproxy with Locust, leave an HTML report
	@$(PY) -m warmfleet_loadtest.locust_run $(ARGS)

vllm: ## build an environment with real vLLM on the CPU, and two tiny models
	@$(PYTHON) tests/vllm/setup.py

deps: ## install the OS packages that tests and checks need (apt-get; sudo unless root)
	$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get -qq update
	$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $(OS_PACKAGES)

# ---------------------------------------------------------------- environments

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): app/requirements.lock $(PROJECTS) | $(VENV)/bin/python
	@echo "installing what 'make run' needs (about half a minute) ..."
	@$(PY) -m pip install -qq --no-compile --require-hashes -r app/requirements.lock
	@$(PY) -m pip install -qq --no-deps --no-build-isolation -e ./worker_plugin -e .
	@touch $@

$(DEV_STAMP): tests/requirements.lock $(RUN_STAMP)
	@echo "installing what tests and checks need ..."
	@$(PY) -m pip install -qq --require-hashes -r tests/requirements.lock
	@touch $@

# checkov pins old versions of what we use newer
$(CHECKOV_STAMP): tests/k8s/requirements.lock
	@echo "installing checkov, the manifest checker ..."
	@$(PYTHON) -m venv .venv-checkov
	@.venv-checkov/bin/python -m pip install -qq --require-hashes -r tests/k8s/requirements.lock
	@touch $@

$(UV):
	@$(PYTHON) -m venv .venv-uv
	@.venv-uv/bin/python -m pip install -qq uv

COMPILE = $(UV) pip compile --quiet --universal --generate-hashes --no-header --no-annotate --no-emit-index-url \
	--no-emit-package warmfleet-worker

lock: $(UV) ## write the hashed locks anew (ARGS=--upgrade takes the newest versions)
	$(COMPILE) $(ARGS) pyproject.toml --extra demo --group build -o app/requirements.lock
	$(COMPILE) $(ARGS) pyproject.toml --all-extras --group build --group dev -c app/requirements.lock -o tests/requirements.lock
	$(COMPILE) $(ARGS) --group checkov -o tests/k8s/requirements.lock
	$(UV) pip compile --quiet --no-deps --generate-hashes --no-header --no-annotate --no-emit-index-url \
	  --python-version 3.11 $(ARGS) tests/vllm/requirements.in -o tests/vllm/requirements.lock
	@! grep -n '://' app/requirements.lock tests/requirements.lock tests/*/requirements.lock

clean: ## remove what make built
	rm -rf .venv .venv-uv .venv-checkov .venv-vllm models build dist out *.egg-info worker_plugin/*.egg-info
	rm -rf .cache/peers .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
