"""Replays of a range, on a real broker: what is in the sink, and what a replay leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import RequestError, SinkChangedError
from tests.broker.sealed_home import seal_all
from tests.spark.handlers import kept, numbered, renumbered, shouted
from tests.spark.replayed import GROUP, TOPIC, Consumer, replayed_broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with replayed_broker(tmp_path / "home") as broker:
        yield broker


@pytest.fixture
def consumer(broker: Broker, tmp_path: Path, spark: SparkSession) -> Consumer:
    return Consumer(broker, tmp_path, spark)


@pytest.fixture
def three_hours(consumer: Consumer) -> Consumer:
    """Nine messages of three groups in each of three hours, consumed hour by hour and sealed."""
    for hour in range(3):
        consumer.send(*(f"h{hour}-{i}" for i in range(9)), hour=hour)
        consumer.consume()
        seal_all(consumer.broker)
    return consumer


def test_a_range_is_replaced_and_nothing_else(three_hours: Consumer) -> None:
    before, progress = three_hours.files(), three_hours.progress()
    state = three_hours.broker.keyed_state(GROUP, TOPIC)

    report = three_hours.again(1, 2, handler=shouted)

    after = three_hours.files()
    assert report.messages == report.rows == 9
    assert report.replaced_files == len(before["1970-01-01T01"])
    assert after.keys() == before.keys()
    assert after["1970-01-01T00"] == before["1970-01-01T00"]
    assert after["1970-01-01T02"] == before["1970-01-01T02"]
    assert [row for row in three_hours.rows() if row[2].startswith("H1")] == [
        (f"g{g}", 4 + i, f"H1-{3 * i + g}") for g in range(3) for i in range(3)
    ]
    assert len(three_hours.rows()) == 27
    assert three_hours.progress() == progress
    assert three_hours.broker.keyed_state(GROUP, TOPIC) == state


def test_the_same_replay_again_changes_nothing(three_hours: Consumer) -> None:
    three_hours.again(1, 2, handler=shouted)
    once = three_hours.files()

    again = three_hours.again(1, 2, handler=numbered)
    other = three_hours.again(1, 2, handler=numbered, replay_id="another")

    assert again.repeated
    assert not other.repeated
    assert once != three_hours.files()
    assert [row[2] for row in three_hours.rows() if row[2].startswith("H")] == []


def test_a_dry_run_lists_what_would_change_and_changes_nothing(three_hours: Consumer) -> None:
    before, events = three_hours.files(), three_hours.broker.sql("SELECT * FROM events").num_rows

    report = three_hours.again(1, 2, handler=shouted, mode="dry_run")

    assert three_hours.files() == before
    assert three_hours.broker.sql("SELECT * FROM events").num_rows == events
    assert (report.rows_added, report.rows_removed) == (9, 9)
    assert report.changed == {"1970-01-01T01": 18}
    listed = pq.read_table(report.rows_report).to_pylist()
    old = {r["body"] for r in listed if r["change"] == "removed"}
    assert old == {f"h1-{i}".encode() for i in range(9)}
    assert {r["body"] for r in listed if r["change"] == "added"} == {b.upper() for b in old}
    in_order = [(r["message_group"], r["body"], r["step"]) for r in listed]
    assert in_order == sorted(in_order)
    assert report.outcomes.num_rows == 0


def test_a_dry_run_of_the_same_code_finds_no_difference(three_hours: Consumer) -> None:
    report = three_hours.again(0, 3, mode="dry_run")

    assert (report.messages, report.rows_added, report.rows_removed) == (27, 0, 0)
    assert (report.states_differ, report.later) == (0, [])


def test_what_is_not_sealed_is_replayed_too(consumer: Consumer) -> None:
    consumer.send(*(f"h0-{i}" for i in range(6)), hour=0)
    consumer.consume()
    seal_all(consumer.broker)
    consumer.send(*(f"h0-{i}" for i in range(6, 12)), hour=0)
    consumer.consume()

    report = consumer.again(0, 1, handler=shouted)

    assert report.messages == 12
    assert consumer.rows() == [
        (f"g{g}", i + 1, f"H0-{3 * i + g}") for g in range(3) for i in range(4)
    ]


def test_state_begins_in_the_middle_of_a_batch(consumer: Consumer) -> None:
    """Hours that were consumed in one batch have no recorded state between them."""
    for hour in range(4):
        consumer.send(*(f"h{hour}-{i}" for i in range(6)), hour=hour)
    consumer.consume()
    seal_all(consumer.broker)

    report = consumer.again(2, 3, handler=shouted)

    assert (report.warm_up, report.messages, report.behind) == (12, 6, 6)
    assert sorted(row[1] for row in consumer.rows() if row[2].startswith("H")) == [5, 5, 5, 6, 6, 6]
    assert (report.states_differ, report.later) == (0, [])
    assert report.behind_rows == {"1970-01-01T03": 6}


def test_later_partitions_that_other_state_would_change_are_named(consumer: Consumer) -> None:
    for hour in range(2):
        consumer.send(*(f"h{hour}-{i}" for i in range(6)), hour=hour)
    consumer.consume()
    consumer.send(*(f"h2-{i}" for i in range(6)), hour=2)
    consumer.consume()
    seal_all(consumer.broker)

    report = consumer.again(0, 1, handler=renumbered, mode="dry_run")

    assert report.states_differ == 3
    assert report.later == ["1970-01-01T01", "1970-01-01T02"]
    # Hour 1 was settled together with the range.
    assert report.behind_rows == {"1970-01-01T01": 6}


def test_dead_letters_and_retried_messages_are_in_the_range(consumer: Consumer) -> None:
    consumer.send("a", "bad-b", "c", "d", "e", "f", hour=0)
    for _ in range(2):
        consumer.consume()
    seal_all(consumer.broker)
    assert len(consumer.rows()) == 5

    dry = consumer.again(0, 1, handler=kept, state=None, mode="dry_run", publishes=())
    same = consumer.again(0, 1, mode="dry_run", replay_id="same")

    [healed] = dry.outcomes.to_pylist()
    assert (healed["was"], healed["would_be"]) == ("dead_letter", "acked")
    assert "bad-b" in healed["reason"]
    assert (same.failed, same.outcomes.num_rows, same.rows_added) == (1, 0, 0)


def test_scheduled_messages_are_in_the_range_of_their_copy(
    broker: Broker, consumer: Consumer
) -> None:
    broker.create_topic("mixed", type="mixed", partition_time="born", queues=2)
    broker.send("mixed", pa.table({"body": [b"one"], "message_group": ["g"], "born_at_ms": [1]}))
    late = {"body": [b"two"], "message_group": [None], "born_at_ms": [2], "delay_level": [1]}
    types = pa.schema(
        [
            ("body", pa.binary()),
            ("message_group", pa.string()),
            ("born_at_ms", pa.int64()),
            ("delay_level", pa.int32()),
        ]
    )
    broker.send("mixed", pa.table(late, schema=types))
    broker.deliver_scheduled(wait_ms=5_000)
    consumer.consume(topic="mixed", handler=kept, state=None)

    report = consumer.again(0, 1, topic="mixed", handler=kept, state=None, mode="dry_run")

    assert (report.messages, report.rows_added, report.rows_removed) == (2, 0, 0)


def test_what_is_not_settled_is_left_to_the_group(consumer: Consumer) -> None:
    consumer.send("a", "b", "c", hour=0)
    consumer.consume()
    consumer.send("d", "e", "f", hour=0)
    held = consumer.broker.receive(GROUP, TOPIC, limit=1, invisible_duration_ms=3_600_000)

    report = consumer.again(0, 1, handler=shouted)
    consumer.broker.change_invisible_duration(held, 1)
    consumer.consume()

    assert (report.messages, report.not_settled) == (3, 3)
    assert sorted(row[2] for row in consumer.rows()) == ["A", "B", "C", "d", "e", "f"]


def test_a_side_sink_is_filled_next_to_the_consumers(three_hours: Consumer) -> None:
    before = three_hours.files()
    settings = {"mode": "side_sink", "side_sink": three_hours.folder / "side"}

    three_hours.again(0, 2, handler=shouted, **settings)
    three_hours.again(2, 3, handler=shouted, **settings)
    again = three_hours.again(0, 2, handler=shouted, replay_id="another", **settings)

    assert again.replaced_files > 0
    assert three_hours.files() == before
    assert three_hours.rows("side") == [(g, n, b.upper()) for g, n, b in three_hours.rows()]


def test_a_side_sink_has_each_row_once_whatever_ranges_filled_it(three_hours: Consumer) -> None:
    settings = {"mode": "side_sink", "side_sink": three_hours.folder / "side"}
    three_hours.again(1, 3, **settings)

    with pytest.raises(RequestError, match="Replay \\[1970-01-01T01, 1970-01-01T03\\)"):
        three_hours.again(2, 3, handler=shouted, **settings)
    before = three_hours.rows("side")
    three_hours.again(0, 3, handler=shouted, **settings)

    assert len(before) == 18
    assert three_hours.rows("side") == [(g, n, b.upper()) for g, n, b in three_hours.rows()]


def test_rows_outside_the_range_are_refused(three_hours: Consumer) -> None:
    before = three_hours.files()

    with pytest.raises(RequestError, match="outside the range, such as"):
        three_hours.again(1, 2, handler=renumbered, partition_time="step", partitions_match=True)

    assert three_hours.files() == before
    assert not list((three_hours.folder / "sink").glob("hour=*/replay-*"))


def test_a_replay_that_lost_a_race_changes_nothing(
    three_hours: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = three_hours.broker.replace_sink_files

    def late(*args: Any, **named: Any) -> Any:
        monkeypatch.undo()
        three_hours.again(1, 2, replay_id="first")
        return real(*args, **named)

    monkeypatch.setattr(three_hours.broker, "replace_sink_files", late)
    with pytest.raises(SinkChangedError):
        three_hours.again(1, 2, handler=shouted, replay_id="second")

    assert not [row for row in three_hours.rows() if row[2].startswith("H")]
    assert len(three_hours.rows()) == 27


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"side_sink": Path("x")}, "side_sink"),
        ({"sink": None, "sink_schema": None}, "no sink"),
        ({"idempotency_key": "keys"}, "effects outside the broker"),
        ({"tries": 0}, "tries"),
        ({"partition_time": "step"}, "partitions_match"),
    ],
)
def test_what_does_not_fit_is_refused(
    consumer: Consumer, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        consumer.again(0, 1, **changes)
