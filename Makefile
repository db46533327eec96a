# `make demo` and `make serve` are all a newcomer needs; every verb does its own set-up.
SHELL := bash
.DEFAULT_GOAL := help
PY := .venv/bin/python
CONFIG ?= configs/cpu.yaml
CONSOLE_SERVER ?= http://127.0.0.1:8000
PYTEST_ARGS ?= -n 2 --dist loadfile

.PHONY: help setup demo serve console test oracle aot check format bench docs

help:  ## this list
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-14s%s\n", $$1, $$2}'

setup: .venv/.installed  ## find Python >= 3.12, make .venv, install from the constraints file

.venv/.installed: pyproject.toml .ci/constraints.txt .ci/setup .ci/find-python
	@.ci/setup

demo: setup  ## serve the embedded model, send real requests, print the text and the figures
	@$(PY) -m benchmarks.demo

serve: setup  ## OpenAI endpoint on 127.0.0.1:8000 (CONFIG=FILE for another configuration)
	@$(PY) -m control_plane --config $(CONFIG)

console: setup  ## operator console on http://127.0.0.1:8080 (CONSOLE_SERVER=URL for another server)
	@$(PY) -m ui --server "$(CONSOLE_SERVER)"

test: setup  ## the whole suite, in a browser too
	@.ci/browser
	@$(PY) -m pytest $(PYTEST_ARGS)

oracle: setup  ## rebuild the fixtures with transformers in an environment of its own, compare more random models
	@.ci/oracle

aot:  ## compile every Hopper kernel and whole models without a GPU, with both jax versions (2 GB under .cache)
	@for version in 0.11.2 0.12.0.1; do \
	    echo "jax $$version"; \
	    AOT_JAX=$$version .ci/aot && AOT_JAX=$$version .ci/aot --cases benchmarks.gpu.aot_small || exit 1; \
	done

check: setup  ## lint, formatting, types, import contracts
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m pyright
	@.venv/bin/lint-imports --no-logo

format: setup  ## format and fix what can be fixed
	@$(PY) -m ruff check --fix-only --exit-zero .
	@$(PY) -m ruff format .

bench: setup  ## a short offline benchmark with a table
	@$(PY) -m runtime.bench offline --concurrency 1,8 --input 128 --output 32 --prefill 512x1 --repeats 2

docs: setup  ## rewrite what is generated: docs/config.md, the tree in README.md
	@$(PY) -m benchmarks.config_docs
	@$(PY) -m benchmarks.readme_tree
