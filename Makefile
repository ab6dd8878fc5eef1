# Everything here runs from the project's root, with the commands of its own .venv.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
# Processes that do tests side by side.
WORKERS ?= 3
# Where the tests are that are marked `fast` (tests/conftest.py): the others need not be collected.
FAST := tests/test_*.py tests/access tests/archive tests/behaviour tests/filter tests/resources
# Files with tests that are marked `alone`: collecting all others takes ten seconds.
ALONE := tests/behaviour/test_blocked_groups.py tests/broker/work/test_transactions.py \
	tests/chaos/test_pipeline_kills.py tests/conformance/test_restarts.py tests/store/test_commit_log.py
# Classes of Spark that the JVMs of the tests map: each starts in half the processor time.
SPARK_CLASSES := .venv/spark.jsa
# The environment with the lowest versions of what pyproject.toml names.
LOWEST ?= /tmp/rmq-lowest
# Tests in which each of those packages does its work; the fast ones are run, too.
REAL := tests/cli/test_reload.py tests/cli/test_sql.py tests/cli/test_topics.py tests/lake tests/metrics \
	tests/orchestration/test_python_consumer.py tests/orchestration/test_sink_compaction.py \
	tests/rocketmq tests/spark/test_connect.py tests/spark/test_source_read.py tests/spark/test_window.py \
	tests/store/test_frame.py tests/store/test_postgres_store.py tests/store/test_query_analysis.py \
	tests/tracing/test_runs.py tests/tracing/test_spans.py tests/web/test_pages.py tests/web/test_server.py

# Spark asks the network for this machine's address unless it is told one.
export SPARK_LOCAL_IP := 127.0.0.1
export DAGSTER_DISABLE_TELEMETRY := 1
# Thousands of homes are begun and synced: in memory that costs half of what a busy disk takes.
check test: export TMPDIR := $(or $(TMPDIR),$(shell scripts/temporary_folder),/tmp)
# A run starts hundreds of processes: without bytecode files each compiles the library again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo up check test lowest lint verbs sql docs bench bench-peers chaos help

setup: .venv/.installed ## make .venv with the rmq command in it, and look for a JDK
	@scripts/find_jdk

.venv/.installed: pyproject.toml scripts/install
	@scripts/install
	@touch $@

demo: setup ## run the NYC flights through broker, Dagster and Spark, and verify (ARGS="--days 365")
	@$(BIN)/rmq demo $(ARGS)

up: setup ## start the broker, Dagster and the web page; Ctrl-C stops all
	@$(BIN)/rmq up $(ARGS)

check: setup lint ## before each commit: format, lint, types, import contracts and the fast tests
	$(BIN)/pytest -n 2 -m fast $(FAST) $(ARGS)

$(SPARK_CLASSES): .venv/.installed scripts/share_spark_classes.py
	@$(BIN)/python -m scripts.share_spark_classes $@ >/dev/null 2>&1 || true # the tests go without

# Both at once: the JVM that writes the classes has one thread.
test: setup ## all that CI runs: lint, Dagster definitions and every test but the long ones
	@$(MAKE) --no-print-directory --jobs=2 lint $(SPARK_CLASSES)
	$(BIN)/dagster definitions validate --log-level warning
	$(BIN)/pytest -n $(WORKERS) -m "not long and not alone" $(ARGS)
	$(BIN)/pytest -m "alone and not long" $(or $(ARGS),$(ALONE)) || [ $$? -eq 5 ] # 5: none is among these

lowest: setup ## the fast tests and some of each library, with the lowest versions that pyproject.toml allows
	@scripts/lowest $(LOWEST)
	$(LOWEST)/bin/pytest -n 2 -m fast $(FAST)
	$(LOWEST)/bin/pytest -n 2 $(REAL)

lint:
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

verbs: setup ## write rmq_pipeline/verbs.py and docs/verbs.md from the broker's declared verbs
	@$(BIN)/python -m scripts.generate_verbs

sql: setup ## write rmq_pipeline/store/sql/delivery_views.sql from its template
	@$(BIN)/python -m scripts.generate_sql

# mkdocs-material prints an advertisement for its successor unless it is told not to.
docs: export NO_MKDOCS_2_WARNING := 1
docs: setup ## write the site of docs/ to site/; a warning is a failure
	@$(BIN)/mkdocs build --quiet

bench: setup ## measure engine, upkeep, archive, replay, pipeline, memory and start-up
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.grpc
	$(BIN)/python -m benchmarks.upkeep
	$(BIN)/python -m benchmarks.log
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.idle --quick
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.structure

bench-peers: setup ## measure the broker beside PostgreSQL, Redis, NATS and others (ARGS="--quick": a smoke test)
	$(BIN)/python -m benchmarks.peers $(ARGS)

# Random attacks begin elsewhere each time; a failure says RMQ_SEED=<number> to begin there again.
chaos: export RMQ_SEED ?= random
chaos: setup ## kill the broker 600 times, processes of a pipeline 220 times, cut the power 60 times; 550 random histories
	$(BIN)/pytest -m long
	RMQ_CHAOS_KILLS=500 $(BIN)/pytest tests/chaos/test_kills.py --timeout 3600
	RMQ_CHAOS_LEADER_KILLS=100 RMQ_CHAOS_LEADER_STOPS=30 RMQ_CHAOS_LEASE_MS=2000 \
		$(BIN)/pytest -m "long or not long" tests/chaos/test_leader_kills.py --timeout 3600
	RMQ_CHAOS_RUN_KILLS=30 RMQ_CHAOS_REDRIVE_KILLS=30 $(BIN)/pytest --timeout 3600 \
		tests/chaos/test_pipeline_kills.py tests/chaos/test_redrive_kills.py
	RMQ_FUZZ_SECONDS=3600 $(BIN)/pytest tests/conformance/test_fuzz.py
	RMQ_MUTATION_SECONDS=3600 $(BIN)/pytest tests/chaos/test_table_mutations.py
	RMQ_CHAOS_SINK_KILLS=100 RMQ_CHAOS_SINK_MESSAGES=200000 $(BIN)/pytest -m "long or not long" \
		tests/chaos/test_sink_kills.py --timeout 3600
	RMQ_AS_OF_HISTORIES=50 $(BIN)/pytest tests/behaviour/test_as_of.py --timeout 3600
	RMQ_HISTORIES=20 $(BIN)/pytest --timeout 3600 tests/behaviour/test_growing_histories.py \
		tests/behaviour/test_lite_histories.py tests/store/test_fold.py tests/store/test_redrives.py
	RMQ_SIMULATION_HISTORIES=500 $(BIN)/pytest tests/simulation --timeout 3600

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
