"""Checks have a sensor of their own: they are red while a consumer is down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from dagster._core.events import DagsterEvent

from rmq_pipeline.clock import Clock, ManualClock, SystemClock
from rmq_pipeline.errors import BusyError, ForbiddenError, RocketMQError, StorageError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.orchestration.check_sensor import (
    AWAY_S,
    DOWN_INTERVAL_S,
    INTERVAL_S,
    REPEAT_S,
    check_sensor,
)
from rmq_pipeline.orchestration.checks import FAILING_MS, HISTORY_EVERY_S, Check, watched_upkeep
from rmq_pipeline.orchestration.consumer import Consumer, ConsumerConfig, python_consumer
from rmq_pipeline.orchestration.declarations import topic
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.orchestration.resources import BrokerResource, SinkResource
from rmq_pipeline.orchestration.upkeep_assets import WINDOW_TAG, asset_key
from tests.orchestration.conftest import Send
from tests.waiting import until

EVENTS = topic("events", type="fifo")
SINK = pa.schema([("born_at_ms", pa.int64())])
GREEN = dict.fromkeys(("no_loss", "oldest_unread", "dead_letters", "one_filter", "order"), True)
RED = dict.fromkeys(GREEN, False)


def _rows(messages: pa.Table, state: pa.Table) -> Outcome:  # noqa: ARG001
    return Outcome(rows=messages.select(["born_at_ms"]))


COUNTED: Consumer = python_consumer(
    topic=EVENTS, group="counted", order_by="message_group", sink="counted", sink_schema=SINK
)(_rows)
Shown = dict[str, bool]
PIPELINE = Pipeline("counting", topics=[EVENTS], consumers=[COUNTED])


@dg.job
def idle() -> None:
    """Stands for the next window; it has begun and not ended."""


class Watch:
    """Ticks the sensor as the daemon does, and says what Dagster shows after each."""

    def __init__(self, instance: dg.DagsterInstance, resource: BrokerResource) -> None:
        self.instance, self.resource = instance, resource
        self.at_s, self.cursor, self.reported = 1_000_000.0, "", 0
        self.sensor = check_sensor([COUNTED.watched], name="checks", now_s=lambda: self.at_s)

    def tick(self, broker: BrokerResource | None = None, *, after_s: float = INTERVAL_S) -> Shown:
        self.at_s += after_s
        resources = {"broker": broker or self.resource}
        with dg.build_sensor_context(
            instance=self.instance, cursor=self.cursor, resources=resources
        ) as context:
            result = self.sensor(context)
        assert isinstance(result, dg.SensorResult)
        self.cursor, self.reported = result.cursor or "", len(result.asset_events)
        for event in result.asset_events:
            self.instance.report_runless_asset_event(event)
        return {name: said.passed for name, said in self.said().items()}

    def said(self) -> dict[str, dg.AssetCheckEvaluation]:
        found = {}
        for name in GREEN:
            key = dg.AssetCheckKey(COUNTED.key, name)
            record = self.instance.get_latest_asset_check_evaluation_record(key)
            if record and record.evaluation:
                found[name] = record.evaluation
        return found


@pytest.fixture
def watch(instance: dg.DagsterInstance, resource: BrokerResource, client: Client) -> Watch:
    PIPELINE.ensure(client)
    return Watch(instance, resource)


Run = Callable[..., bool]


@pytest.fixture
def window(instance: dg.DagsterInstance, resource: BrokerResource, tmp_path: Path) -> Run:
    """Run the consumer's job; False when the run has failed."""

    def run(root: Path = tmp_path) -> bool:
        definitions = dg.Definitions(
            assets=[COUNTED.asset],
            asset_checks=COUNTED.checks,
            jobs=[COUNTED.job],
            resources={"broker": resource, "sinks": SinkResource(root=str(root))},
        )
        job = definitions.resolve_job_def("counted_window")
        result = job.execute_in_process(
            instance=instance,
            raise_on_error=False,
            run_config=dg.RunConfig(ops={"counted": ConsumerConfig(idle_seconds=0.1)}),
        )
        assert not result.get_asset_check_evaluations()
        return result.success

    return run


@pytest.fixture
def no_folder(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.touch()
    return file / "sinks"


class TestWithWindows:
    @pytest.fixture
    def clock(self) -> Clock:
        return SystemClock()

    def test_all_are_red_while_windows_fail_and_green_after_one_that_does_not(
        self, watch: Watch, window: Run, send: Send, no_folder: Path
    ) -> None:
        send("events", 2, message_group=["a", "b"])
        at_first = watch.tick()

        failed = not window(no_folder)
        red, again = watch.tick(), watch.tick()
        said, repeated = watch.said()["no_loss"], watch.reported
        mended = window()

        assert (at_first, failed, red, again, mended) == (GREEN, True, RED, RED, True)
        assert repeated == 0
        assert said.severity == dg.AssetCheckSeverity.ERROR
        assert (said.description or "").startswith("The last window failed: run ")
        assert watch.tick() == GREEN

    def test_they_are_reported_again_after_a_window(
        self, watch: Watch, window: Run, send: Send, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watch.tick()
        before = watch.said()
        send("events", 1, message_group=["a"])
        asked = asked_of(monkeypatch)

        assert window()
        shown, after = watch.tick(), watch.said()

        assert (shown, watch.reported) == (GREEN, len(GREEN))
        # Those that read a day of history are not due yet: their last result is reported again.
        assert not [query for query in asked if "OVER (PARTITION BY" in query]
        for name in ("no_loss", "order"):
            assert after[name].metadata == before[name].metadata
            assert after[name].description == before[name].description
        # Dagster's storage keeps whole seconds: within the same one they may be reported again.
        until(lambda: watch.tick() == GREEN and watch.reported == 0)

    def test_an_acknowledgement_after_the_failed_window_turns_them_green(
        self, watch: Watch, window: Run, client: Client, send: Send, no_folder: Path
    ) -> None:
        send("events", 2, message_group=["a", "b"])
        assert not window(no_folder)
        red = watch.tick()

        client.ack(client.receive("counted", "events", invisible_duration_ms=60_000))

        assert (red, watch.tick()) == (RED, GREEN)

    def test_a_window_that_works_is_green_though_the_failed_run_is_seen_after_it(
        self, watch: Watch, window: Run, client: Client, send: Send, no_folder: Path
    ) -> None:
        """As after a restart of Dagster: no tick comes between the failure and the next window."""
        instance = watch.instance
        send("events", 2, message_group=["a", "b"])
        before = watch.tick()
        assert not window(no_folder)
        run = instance.create_run_for_job(idle, tags={WINDOW_TAG: "counted"})
        started = DagsterEvent(dg.DagsterEventType.RUN_START.value, job_name=idle.name)
        instance.report_dagster_event(started, run.run_id)
        red = watch.tick()

        client.ack(client.receive("counted", "events", invisible_duration_ms=60_000))
        # The cursor is that of the tick before the failure.
        watch.cursor = ""

        assert (before, red, watch.tick()) == (GREEN, RED, GREEN)


def test_a_tick_looks_every_15_s_and_every_5_s_while_something_is_down(
    watch: Watch, client: Client, send: Send
) -> None:
    client.alter_group("counted", backoff_ms=(0,))
    send("events", 3, message_group=["a", "b", "c"])
    watch.tick()
    fail(client, reason="KeyError: 'carrier'")

    early = watch.tick(after_s=INTERVAL_S - 1.0)
    red = watch.tick(after_s=1.0)
    client.ack(client.receive("counted", "events", invisible_duration_ms=60_000))
    green = watch.tick(after_s=DOWN_INTERVAL_S)

    assert (early, red, green) == (GREEN, RED, GREEN)


def test_all_are_red_while_no_delivery_succeeds(watch: Watch, client: Client, send: Send) -> None:
    client.alter_group("counted", backoff_ms=(0,))
    send("events", 3, message_group=["a", "b", "c"])
    before = watch.tick()

    fail(client, reason="KeyError: 'carrier'")
    red, said = watch.tick(), watch.said()["order"]
    client.ack(client.receive("counted", "events", invisible_duration_ms=60_000))

    assert (before, red) == (GREEN, RED)
    assert "KeyError: 'carrier'" in (said.description or "")
    assert said.metadata["failures"].value == 3
    assert watch.tick() == GREEN


def test_a_group_made_again_begins_without_failures(
    watch: Watch, client: Client, send: Send, clock: ManualClock
) -> None:
    send("events", 3, message_group=["a", "b", "c"])
    fail(client, reason="no carrier")
    red = watch.tick()
    clock.advance(1)
    client.delete_group("counted")
    PIPELINE.ensure(client)

    assert (red, watch.tick()) == (RED, GREEN)


def test_a_group_whose_failures_are_hours_ago_is_up(
    watch: Watch, client: Client, send: Send, clock: ManualClock
) -> None:
    send("events", 2, message_group=["a", "b"])
    fail(client, reason="no carrier")
    red = watch.tick()
    clock.advance(FAILING_MS + 1)

    assert red == RED
    assert watch.tick() == {**GREEN, "oldest_unread": False}


def test_one_failure_among_acknowledgements_is_green(
    watch: Watch, client: Client, send: Send
) -> None:
    send("events", 3, message_group=["a", "b", "c"])
    received = client.receive("counted", "events", invisible_duration_ms=60_000)
    outcomes = {"receipt_handle": received["receipt_handle"], "outcome": ["ack", "retry", "ack"]}

    client.settle("counted", pa.table(outcomes))

    assert watch.tick() == GREEN


def test_dead_letters_that_the_consumer_wanted_leave_it_up(
    watch: Watch, client: Client, send: Send
) -> None:
    send("events", 3, message_group=["a", "b", "c"])

    client.forward_to_dead_letter_queue(client.receive("counted", "events"), reason="unwanted")

    assert watch.tick() == {**GREEN, "dead_letters": False}


def test_all_are_red_when_the_broker_stays_away(watch: Watch, away: BrokerResource) -> None:
    first, later, last = watch.tick(), watch.tick(away), None
    watch.at_s += AWAY_S

    last = watch.tick(away)

    assert (first, later, last) == (GREEN, GREEN, RED)
    assert watch.tick() == GREEN


@pytest.mark.parametrize("failing", ["due", "sql", "connect"])
@pytest.mark.parametrize("error", [StorageError("The store has failed."), ForbiddenError("No.")])
def test_all_are_red_at_once_when_the_broker_refuses(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, failing: str, error: RocketMQError
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    first = watch.tick()
    with monkeypatch.context() as patched:
        owner = BrokerResource if failing == "connect" else Client
        patched.setattr(owner, "client" if failing == "connect" else failing, refuse)
        red, said = watch.tick(), watch.said()["no_loss"]
        watch.tick()
        repeated = watch.reported

    assert (first, red, repeated) == (GREEN, RED, 0)
    assert (said.description or "").startswith(f"The broker refuses: {error.message}")
    assert watch.tick() == GREEN


def test_what_was_found_before_the_broker_went_is_reported(watch: Watch) -> None:
    def lost(_: Client) -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=False)

    def gone(_: Client) -> dg.AssetCheckResult:
        raise BusyError("It stops.")

    asked = {"no_loss": lost, "oldest_unread": gone}
    checks = [
        replace(check, evaluate=asked.get(check.name, check.evaluate))
        for check in COUNTED.watched.checks
    ]
    watch.tick()
    watch.at_s += HISTORY_EVERY_S
    watch.sensor = check_sensor(
        [replace(COUNTED.watched, checks=checks)], name="checks", now_s=lambda: watch.at_s
    )

    assert watch.tick() == {**GREEN, "no_loss": False}


def test_nothing_new_is_not_reported_within_an_hour(watch: Watch) -> None:
    watch.at_s = said_at(watch)

    watch.tick()
    within = watch.reported
    watch.at_s += REPEAT_S
    watch.tick()

    assert (within, watch.reported) == (0, len(GREEN))


def test_history_is_read_every_ten_minutes_and_the_rest_with_each_tick(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch.tick()
    asked = asked_of(monkeypatch)

    watch.tick()
    at_once = [query for query in asked if "OVER (PARTITION BY" in query]
    watch.at_s += HISTORY_EVERY_S
    watch.tick()

    assert not at_once
    assert len([query for query in asked if "OVER (PARTITION BY" in query]) == 1


def test_a_check_that_the_broker_cannot_answer_is_red_alone(watch: Watch) -> None:
    def ask(client: Client) -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=bool(client.sql("FROM nowhere")))

    checks = [
        Check(check.name, ask) if check.name == "oldest_unread" else check
        for check in COUNTED.watched.checks
    ]
    watch.sensor = check_sensor([replace(COUNTED.watched, checks=checks)], name="checks")

    assert watch.tick() == {**GREEN, "oldest_unread": False}


def test_upkeep_is_red_while_its_windows_fail(instance: dg.DagsterInstance, watch: Watch) -> None:
    watch.sensor = check_sensor(
        [watched_upkeep("seal", asset_key("seal"))], name="checks", now_s=lambda: watch.at_s
    )

    @dg.op
    def fails() -> None:
        raise OSError

    @dg.job(tags={WINDOW_TAG: "seal"})
    def seal() -> None:
        fails()

    watch.tick()
    seal.execute_in_process(instance=instance, raise_on_error=False)
    watch.tick()

    key = dg.AssetCheckKey(asset_key("seal"), "no_fallback")
    record = instance.get_latest_asset_check_evaluation_record(key)
    assert record is not None
    assert record.evaluation is not None
    assert not record.evaluation.passed


def fail(client: Client, *, reason: str) -> None:
    received = client.receive("counted", "events", invisible_duration_ms=60_000)
    n = received.num_rows
    outcomes = {
        "receipt_handle": received["receipt_handle"],
        "outcome": ["retry"] * n,
        "reason": [reason] * n,
        "error_type": [reason.partition(":")[0]] * n,
    }
    client.settle("counted", pa.table(outcomes))


def asked_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the SQL queries of all clients from now on."""
    asked: list[str] = []
    sql = Client.sql

    def noted(self: Client, query: str, **rest: Any) -> pa.Table:
        asked.append(query)
        return sql(self, query, **rest)

    monkeypatch.setattr(Client, "sql", noted)
    return asked


def said_at(watch: Watch) -> float:
    watch.tick()
    key = dg.AssetCheckKey(COUNTED.key, "order")
    record = watch.instance.get_latest_asset_check_evaluation_record(key)
    assert record is not None
    return float(record.create_timestamp)
