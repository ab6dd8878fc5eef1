"""What a topic no longer keeps goes, but nothing that is under way."""

from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline import errors
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.archiving import expire
from rmq_pipeline.clock import ManualClock
from tests.broker.archive_home import (
    HOUR_MS,
    by_glob,
    by_manifest,
    everything,
    fill,
    kept,
    offsets_in,
    opened,
)
from tests.broker.sealed_home import messages, seal_all


def begins(broker: Broker, topic: str = "t") -> list[int]:
    return [each["min_offset"] for each in broker.describe_topic(topic)["offsets"]]


def test_messages_older_than_their_retention_go(broker: Broker, home: Path) -> None:
    fill(broker)
    broker.alter_topic("t", retention_ms=5 * HOUR_MS)
    before = everything(broker)

    report = broker.expire()

    # The newest was stored an hour ago, the sixth newest six hours ago.
    assert (report["segments"], report["rows"], report["held_back"]) == (16, 320, 0)
    assert begins(broker) == [160, 160]
    assert offsets_in(by_manifest(home)) == offsets_in(by_glob(home)) == kept(broker)
    left = before.filter(pa.compute.greater_equal(before["queue_offset"], 160))
    assert everything(broker).equals(left.combine_chunks())
    assert broker.sql("SELECT * FROM segments").num_rows == 8
    assert broker.sql("SELECT min(queue_offset) AS m FROM messages")["m"].to_pylist() == [160]
    assert broker.expire()["segments"] == 0


def test_the_oldest_go_when_there_is_too_much(broker: Broker) -> None:
    fill(broker)
    (total,) = broker.sql("SELECT sum(bytes)::BIGINT AS n FROM segments")["n"].to_pylist()
    broker.alter_topic("t", retention_bytes=total // 2)

    report = broker.expire()

    assert 10 <= report["segments"] <= 14
    (left,) = broker.sql("SELECT sum(bytes)::BIGINT AS n FROM segments")["n"].to_pylist()
    assert left <= total // 2 < left + report["bytes"] / report["segments"] * 2
    assert abs(begins(broker)[0] - begins(broker)[1]) <= 20


def test_a_topic_keeps_everything_unless_it_says_otherwise(broker: Broker) -> None:
    fill(broker)
    assert broker.describe_topic("t")["retention_ms"] is None
    assert broker.expire()["segments"] == 0

    broker.alter_topic("t", retention_ms=HOUR_MS, retention_bytes=1)
    topic = broker.alter_topic("t", retention_ms=0, retention_bytes=0)

    assert (topic["retention_ms"], topic["retention_bytes"]) == (None, None)
    assert broker.expire()["segments"] == 0


@pytest.mark.parametrize("wrong", [-1, 1, True, "1h", 0.5])
def test_a_retention_out_of_range_is_refused(broker: Broker, wrong: object) -> None:
    with pytest.raises(errors.RequestError, match="retention_ms"):
        broker.create_topic("t", retention_ms=wrong)  # type: ignore[arg-type]


def test_ensuring_a_topic_leaves_its_retention_unless_it_asks(broker: Broker) -> None:
    broker.create_topic("t", retention_ms=HOUR_MS)

    assert broker.ensure_topic("t")["retention_ms"] == HOUR_MS
    assert broker.ensure_topic("t", retention_ms=HOUR_MS)["retention_ms"] == HOUR_MS
    with pytest.raises(errors.AlreadyExistsError, match="retention_ms"):
        broker.ensure_topic("t", retention_ms=2 * HOUR_MS)


def test_expired_offsets_are_refused_by_name(broker: Broker) -> None:
    fill(broker)
    broker.alter_topic("t", retention_ms=5 * HOUR_MS)
    broker.expire()

    with pytest.raises(errors.IllegalOffsetError, match="has offsets 160 to 240, not 0"):
        broker.read("t", 0, offset=0, limit=1)
    assert broker.offset_at("t", 0, at_ms=0) == 160
    broker.create_group("g")
    with pytest.raises(errors.IllegalOffsetError):
        broker.reset_offset("g", "t", to_offset=3)
    assert broker.reset_offset("g", "t", to_earliest=True)["queue_offset"].to_pylist() == [160] * 2


def test_groups_go_on_behind_what_has_expired(
    broker: Broker, home: Path, clock: ManualClock
) -> None:
    fill(broker)
    for name in ("begun", "subscribed", "ordered"):
        broker.create_group(name, order="message_group" if name == "ordered" else "none")
        broker.subscribe(name, "t")
    broker.ack(broker.receive("begun", "t", limit=30))
    broker.alter_topic("t", retention_ms=5 * HOUR_MS)
    assert broker.expire()["segments"] == 16

    def lags(broker: Broker) -> list[tuple[str, int]]:
        query = "SELECT consumer_group, sum(lag)::BIGINT AS lag FROM lag GROUP BY ALL ORDER BY ALL"
        rows = broker.sql(query).to_pylist()
        return [(row["consumer_group"], row["lag"]) for row in rows]

    assert lags(broker) == [("begun", 160), ("ordered", 160), ("subscribed", 160)]
    broker.create_group("late")
    broker.subscribe("late", "t")
    assert broker.due()["groups"]["late"]["topics"]["t"]["unread"] == 160
    broker.close()
    with opened(home, clock) as again:
        assert lags(again)[0] == ("begun", 160)
        got = again.receive("begun", "t", limit=1000)
        assert got.num_rows == 160
        assert got["queue_offset"].to_pylist() == [*range(160, 240)] * 2


@pytest.mark.parametrize("what", ["leased", "waiting", "parked"])
def test_what_is_under_way_stays(broker: Broker, clock: ManualClock, what: str) -> None:
    fill(broker, queues=1)
    broker.create_group("g", max_attempts=1 if what == "parked" else 9, on_failure="park")
    broker.reset_offset("g", "t", to_offset=90)
    got = broker.receive("g", "t", limit=1, invisible_duration_ms=5 * HOUR_MS)
    if what != "leased":
        failed = {"receipt_handle": got["receipt_handle"], "outcome": ["retry"]}
        broker.settle("g", pa.table({**failed, "retry_after_ms": [10 * HOUR_MS]}))
    broker.alter_topic("t", retention_ms=HOUR_MS)
    clock.advance(HOUR_MS)

    report = broker.expire()

    assert begins(broker) == [80]
    assert (report["segments"], report["held_back"]) == (2, 10)
    if what == "parked":
        broker.unpark("g")
    elif what == "leased":
        broker.ack(got)
    clock.advance(10 * HOUR_MS)
    if what != "leased":
        broker.ack(broker.receive("g", "t", limit=1))
    assert broker.expire()["held_back"] == 0
    assert begins(broker) == [480]


def test_backlogs_of_blocked_groups_move_up(broker: Broker, clock: ManualClock) -> None:
    broker.create_topic("f", type="fifo", queues=1)
    broker.create_group("g", order="message_group")
    for turn in range(10):
        groups = [f"g{i % 4}" for i in range(8)]
        broker.send("f", messages(8, start=8 * turn, body_bytes=1000, message_group=groups))
        clock.advance(HOUR_MS)
        seal_all(broker)
    first = broker.receive("g", "f", limit=4)  # one of each group; the rest waits behind them
    assert first.num_rows == 4
    assert broker.receive("g", "f", limit=100).num_rows == 0
    broker.ack(first.slice(0, 3))
    broker.forward_to_dead_letter_queue(first.slice(3))
    broker.alter_topic("f", retention_ms=5 * HOUR_MS)

    assert broker.expire()["segments"] == 6

    assert begins(broker, "f") == [48]
    got = []
    while (some := broker.receive("g", "f", limit=100)).num_rows:
        got += some["queue_offset"].to_pylist()
        broker.ack(some)
    assert sorted(got) == list(range(48, 80))
    assert broker.sql("SELECT sum(lag)::BIGINT AS n FROM lag")["n"].to_pylist() == [0]


def test_scheduled_messages_stay_until_they_are_delivered(home: Path, clock: ManualClock) -> None:
    with opened(home, clock, system_retention_ms=HOUR_MS) as broker:
        broker.create_topic("late", type="delay", queues=1)
        for i in range(3):
            at = [clock.now_ms() + (i + 1) * 10 * HOUR_MS]
            broker.send("late", messages(1, start=i, deliver_at_ms=at))
            clock.advance(1000)
            seal_all(broker)
        clock.advance(5 * HOUR_MS)

        assert broker.expire()["held_back"] == 3
        clock.advance(6 * HOUR_MS)
        assert broker.deliver_scheduled()["delivered"] == 1
        assert broker.expire()["segments"] == 1
        clock.advance(20 * HOUR_MS)
        assert broker.deliver_scheduled()["delivered"] == 2
        assert broker.expire()["segments"] == 2

        assert len(everything(broker, "late")) == 3


def test_half_messages_stay_until_they_are_ended(home: Path, clock: ManualClock) -> None:
    with opened(home, clock, system_retention_ms=HOUR_MS) as broker:
        broker.create_topic("paid", type="transaction", queues=1)
        sent = broker.send_half("paid", messages(1), producer_group="p")
        seal_all(broker)
        clock.advance(2 * HOUR_MS)
        assert broker.expire()["held_back"] == 1

        ended = {"transaction_id": sent["transaction_id"], "resolution": ["commit"]}
        broker.end_transactions(pa.table(ended))

        assert broker.expire()["segments"] == 1
        assert len(everything(broker, "paid")) == 1


def test_dead_letters_expire_with_their_rows(broker: Broker, clock: ManualClock) -> None:
    broker.create_topic("t", queues=1)
    broker.create_group("g")
    broker.send("t", messages(3))
    broker.forward_to_dead_letter_queue(broker.receive("g", "t", limit=3), reason="no")
    seal_all(broker)
    clock.advance(HOUR_MS)
    broker.alter_topic("%DLQ%g", retention_ms=1000)

    assert broker.expire()["rows"] == 3

    assert broker.sql("SELECT * FROM dead_letters").num_rows == 0
    assert begins(broker, "%DLQ%g") == [3]


def test_what_tells_repetitions_stays(broker: Broker, clock: ManualClock) -> None:
    day = 24 * HOUR_MS
    broker.create_topic("d", queues=1, deduplicate="key", deduplicate_window_ms=day)
    broker.send("d", messages(1, keys=[["a"]]))
    clock.advance(2 * HOUR_MS)
    seal_all(broker)
    broker.alter_topic("d", retention_ms=HOUR_MS)

    assert broker.expire()["segments"] == 0
    assert broker.send("d", messages(1, keys=[["a"]]))["duplicate"].to_pylist() == [True]
    clock.advance(day)
    assert broker.expire()["segments"] == 1


def test_expired_files_stay_for_their_grace(broker: Broker, home: Path, clock: ManualClock) -> None:
    fill(broker, queues=1)
    old = by_manifest(home)
    broker.alter_topic("t", retention_ms=5 * HOUR_MS)
    broker.expire()

    assert all(path.exists() for path in old)
    assert len(by_glob(home)) == 4
    clock.advance(60_000)
    assert broker.expire()["deleted_files"] == 8
    assert [path for path in old if path.exists()] == by_manifest(home)


def test_a_topic_may_expire_as_a_whole_and_go_on(
    broker: Broker, home: Path, clock: ManualClock
) -> None:
    fill(broker, queues=1)
    broker.alter_topic("t", retention_ms=1000)
    broker.expire()
    clock.advance(60_000)
    broker.expire()
    assert (by_manifest(home), begins(broker)) == ([], [480])

    fill(broker, turns=1, queues=1)
    broker.close()

    with opened(home, clock) as again:
        assert begins(again) == [480]
        assert everything(again)["queue_offset"].to_pylist() == list(range(480, 520))
        again.delete_topic("t")
        again.seal()
        assert not (home / "topics" / "t").exists()


def test_a_fenced_run_expires_nothing(broker: Broker) -> None:
    fill(broker, turns=2)
    broker.alter_topic("t", retention_ms=1000)
    broker.open_window("upkeep/expire", owner="a", duration_ms=1000)
    broker.open_window("upkeep/expire", owner="b", duration_ms=1000, takeover=True)

    with pytest.raises(errors.FencedError):
        expire(broker.engine, window=("upkeep/expire", 1))

    assert begins(broker) == [0, 0]


def test_retention_bounds_what_compaction_makes(broker: Broker, home: Path) -> None:
    fill(broker, turns=16, queues=1)
    broker.alter_topic("t", retention_ms=24 * HOUR_MS)

    broker.compact()

    # An eighth of a day is three hours: none of the files spans more.
    assert max(len(offsets_in([path])[0]) for path in by_manifest(home)) == 160


def test_a_read_beside_expiry_gives_messages_or_says_that_they_are_gone(broker: Broker) -> None:
    fill(broker, queues=1)
    broker.alter_topic("t", retention_ms=5 * HOUR_MS)
    seen = []

    def read(_step: str) -> None:
        try:
            seen.append(broker.read("t", 0, offset=0, limit=480).num_rows)
        except errors.IllegalOffsetError:
            seen.append(0)
        seen.append(broker.read("t", 0, offset=320, limit=480).num_rows)

    expire(broker.engine, window=None, fault=read)

    assert seen == [0, 160] * 4


def test_scheduled_messages_stay_as_long_as_they_may_be_repeated(
    home: Path, clock: ManualClock
) -> None:
    window_ms = 10 * HOUR_MS
    message = messages(1).append_column("message_id", pa.array(["a"]))
    later = {"delay_level": pa.array([1], pa.int32())}
    with opened(home, clock, system_retention_ms=HOUR_MS) as broker:
        broker.create_topic(
            "once",
            type="delay",
            queues=1,
            deduplicate="message_id",
            deduplicate_window_ms=window_ms,
        )
        first = broker.send("once", message.append_column("delay_level", later["delay_level"]))
        clock.advance(1000)
        assert broker.deliver_scheduled()["delivered"] == 1
        seal_all(broker)
        clock.advance(5 * HOUR_MS)

        assert broker.expire()["segments"] == 0
        assert broker.due()["jobs"]["expire"]["due"] == 0

    with opened(home, clock, system_retention_ms=HOUR_MS) as broker:
        again = broker.send("once", message.append_column("delay_level", later["delay_level"]))
        assert again["duplicate"].to_pylist() == [True]
        assert again["queue_offset"].to_pylist() == first["queue_offset"].to_pylist()

        clock.advance(window_ms)
        assert broker.expire()["segments"] == 1
