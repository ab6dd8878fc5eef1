# Everything here runs from the project's root, with the commands of its own .venv.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
# Processes that do tests side by side.
WORKERS ?= 3

# Spark asks the network for this machine's address unless it is told one.
export SPARK_LOCAL_IP := 127.0.0.1
export DAGSTER_DISABLE_TELEMETRY := 1

.PHONY: setup demo up test check bench chaos help

setup: .venv/.installed ## make .venv with the rmq command in it, and look for a JDK
	@scripts/find_jdk

.venv/.installed: pyproject.toml scripts/install
	@scripts/install
	@touch $@

demo: setup ## run the NYC flights through broker, Dagster and Spark, and verify (ARGS="--days 365")
	@$(BIN)/rmq demo $(ARGS)

up: setup ## start the broker and the Dagster UI; Ctrl-C ends both
	@$(BIN)/rmq up $(ARGS)

test: setup ## format, lint, types, import contracts, Dagster definitions and every test
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/dagster definitions validate --log-level warning
	$(BIN)/pytest -n $(WORKERS) -m "not long and not alone" $(ARGS)
	$(BIN)/pytest -m "alone and not long" $(ARGS) || [ $$? -eq 5 ] # 5: none is among these

check: test ## the same as test

bench: setup ## measure engine, upkeep, archive, replay, pipeline, memory and start-up
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.grpc
	$(BIN)/python -m benchmarks.upkeep
	$(BIN)/python -m benchmarks.log
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.idle --quick
	$(BIN)/python -m benchmarks.memory

chaos: setup ## kill the broker 500 times, processes of a pipeline 220 times; 550 random histories
	$(BIN)/pytest -m long
	RMQ_CHAOS_KILLS=500 $(BIN)/pytest tests/chaos/test_kills.py --timeout 3600
	RMQ_CHAOS_RUN_KILLS=30 RMQ_CHAOS_REDRIVE_KILLS=30 $(BIN)/pytest --timeout 3600 \
		tests/chaos/test_pipeline_kills.py tests/chaos/test_redrive_kills.py
	RMQ_FUZZ_SECONDS=3600 $(BIN)/pytest tests/conformance/test_fuzz.py
	RMQ_CHAOS_SINK_KILLS=100 RMQ_CHAOS_SINK_MESSAGES=200000 $(BIN)/pytest tests/chaos/test_sink_kills.py --timeout 3600
	RMQ_AS_OF_HISTORIES=50 $(BIN)/pytest tests/behaviour/test_as_of.py --timeout 3600
	RMQ_HISTORIES=20 $(BIN)/pytest --timeout 3600 tests/behaviour/test_growing_histories.py \
		tests/behaviour/test_lite_histories.py tests/store/test_fold.py tests/store/test_redrives.py
	RMQ_SIMULATION_HISTORIES=500 $(BIN)/pytest tests/simulation --timeout 3600

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
