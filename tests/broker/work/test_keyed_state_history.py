"""Keyed state as it was: before and after a stretch of each message group, sealed or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import TableSchemaError
from tests.broker.sealed_home import open_broker, seal_all

TOPIC, GROUP = "legs", "counters"
HOUR_MS = 3_600_000


@pytest.fixture
def broker(home: Path) -> Iterator[Broker]:
    with open_broker(home) as broker:
        broker.create_topic(TOPIC, type="fifo", queues=1)
        broker.create_group(GROUP, order="message_group", max_attempts=1)
        yield broker


def send(broker: Broker, *groups: str) -> None:
    broker.send(TOPIC, pa.table({"body": [b"x"] * len(groups), "message_group": list(groups)}))


def settle(broker: Broker, *, outcome: str = "ack", state: dict[str, int | None]) -> None:
    """Settle all that is there, and leave groups that state; None removes it."""
    got = broker.receive(GROUP, TOPIC, limit=1000)
    outcomes = {
        "receipt_handle": got["receipt_handle"],
        "outcome": [outcome] * got.num_rows,
    }
    columns = {
        "message_group": list(state),
        "removed": [n is None for n in state.values()],
        "n": pa.array(state.values(), pa.int64()),
    }
    broker.settle(GROUP, pa.table(outcomes), state=pa.table(columns), topic=TOPIC)


def history(broker: Broker, **places: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """For each group, asked for by its first and last offset: what is said of it."""
    n = len(places)
    asked = pa.table(
        {
            "message_group": list(places),
            "queue_id": [0] * n,
            "queue_offset": [first for first, _ in places.values()],
            "stored_at_ms": [0] * n,
            "last_queue_id": [0] * n,
            "last_queue_offset": [last for _, last in places.values()],
        }
    )
    found: dict[str, dict[str, Any]] = {}
    for row in broker.keyed_state_history(GROUP, TOPIC, places=asked).to_pylist():
        told = row["queue_offset"] if row["moment"] == "begins" else (row["queue_offset"], row["n"])
        found.setdefault(row["message_group"], {})[row["moment"]] = told
    return found


@pytest.mark.parametrize("sealed", [0, 1, 3])
def test_the_states_around_a_stretch_are_found(broker: Broker, sealed: int) -> None:
    """Offsets: a 0 2 4, b 1 3; three settles, of which some are sealed."""
    for turn, groups in enumerate(("ab", "ab", "a")):
        send(broker, *groups)
        settle(broker, state=dict.fromkeys(groups, turn + 1))
        if turn < sealed:
            seal_all(broker)

    assert history(broker, a=(2, 2), b=(3, 3)) == {
        "a": {"before": (0, 1), "after": (2, 2)},
        "b": {"before": (1, 1), "after": (3, 2)},
    }
    assert history(broker, a=(0, 3)) == {"a": {"begins": 0, "after": (4, 3)}}
    # Where nothing was settled behind the stretch, the newest state is the one after it.
    assert history(broker, b=(3, 9)) == {"b": {"before": (1, 1), "after": (3, 2)}}


def test_state_belongs_to_the_last_message_of_its_settle(broker: Broker) -> None:
    send(broker, "a", "a", "a")
    settle(broker, state={"a": 3})
    seal_all(broker)

    assert history(broker, a=(1, 1)) == {"a": {"begins": 0, "after": (2, 3)}}


def test_a_message_given_up_counts_as_settled(broker: Broker) -> None:
    send(broker, "a")
    settle(broker, outcome="dead_letter", state={"a": 7})
    send(broker, "a")
    settle(broker, state={"a": 8})
    seal_all(broker)

    assert history(broker, a=(1, 1)) == {"a": {"before": (0, 7), "after": (1, 8)}}


def test_removed_state_is_told_as_such(broker: Broker) -> None:
    send(broker, "a")
    settle(broker, state={"a": 1})
    send(broker, "a")
    settle(broker, state={"a": None})
    send(broker, "a")

    assert history(broker, a=(2, 2)) == {"a": {"before": (1, None), "after": (1, None)}}


def test_the_history_outlives_a_restart_and_is_not_doubled(home: Path) -> None:
    with open_broker(home) as broker:
        broker.create_topic(TOPIC, type="fifo", queues=1)
        broker.create_group(GROUP, order="message_group")
        for turn in range(6):
            send(broker, "a")
            settle(broker, state={"a": turn})
            seal_all(broker)
    with open_broker(home) as broker:
        found = history(broker, a=(4, 4))

    assert found == {"a": {"before": (3, 3), "after": (4, 4)}}


def test_a_file_of_a_seal_that_died_is_written_again(broker: Broker, home: Path) -> None:
    send(broker, "a")
    settle(broker, state={"a": 1})

    def die(step: str) -> None:
        if step == "events_renamed":
            raise OSError("the disk is gone")

    with pytest.raises(Exception, match="disk is gone"):
        seal_all(broker, die)
    left = list((home / "state").glob("*/*.parquet"))
    send(broker, "a")
    settle(broker, state={"a": 2})
    seal_all(broker)

    assert len(left) == 1
    assert history(broker, a=(1, 1)) == {"a": {"before": (0, 1), "after": (1, 2)}}


def test_columns_may_change_with_the_code(broker: Broker) -> None:
    send(broker, "a")
    settle(broker, state={"a": 1})
    seal_all(broker)
    send(broker, "a")
    got = broker.receive(GROUP, TOPIC, limit=10)
    outcomes = pa.table({"receipt_handle": got["receipt_handle"], "outcome": ["ack"]})
    state = pa.table({"message_group": ["a"], "n": [2.5], "place": ["JFK"]})
    broker.settle(GROUP, outcomes, state=state, topic=TOPIC)
    seal_all(broker)

    assert history(broker, a=(1, 1)) == {"a": {"before": (0, 1.0), "after": (1, 2.5)}}


def test_the_history_of_what_is_deleted_goes(broker: Broker, home: Path) -> None:
    send(broker, "a")
    settle(broker, state={"a": 1})
    seal_all(broker)
    assert list((home / "state").iterdir())

    broker.delete_topic(TOPIC, force=True)
    broker.create_topic("other", queues=1)
    broker.send("other", pa.table({"body": [b"x"]}))
    broker.create_topic(TOPIC, type="fifo", queues=1)
    send(broker, "a")
    settle(broker, state={"a": 5})
    seal_all(broker)

    assert history(broker, a=(0, 0)) == {"a": {"begins": 0, "after": (0, 5)}}
    assert len(list((home / "state").iterdir())) == 1


def test_a_group_without_state_begins_with_its_first_message(broker: Broker) -> None:
    send(broker, "x", "a", "a")

    assert history(broker, a=(2, 2)) == {"a": {"begins": 1}}


def test_places_without_a_column_are_refused(broker: Broker) -> None:
    with pytest.raises(TableSchemaError, match="last_queue_id"):
        broker.keyed_state_history(GROUP, TOPIC, places=pa.table({"message_group": ["a"]}))


def test_of_old_states_the_newest_of_each_group_is_kept(home: Path) -> None:
    clock = ManualClock()
    with open_broker(home, clock, state_retention_ms=HOUR_MS) as broker:
        broker.create_topic(TOPIC, type="fifo", queues=1)
        broker.create_group(GROUP, order="message_group", max_attempts=1)
        for turn in range(10):
            groups = "ab" if turn < 5 else "a"
            send(broker, *groups)
            settle(broker, state=dict.fromkeys(groups, turn))
            seal_all(broker)
        before = history(broker, a=(14, 14), b=(9, 9))
        clock.advance(2 * HOUR_MS)
        send(broker, "a", "b")
        settle(broker, state={"a": 10, "b": 10})
        seal_all(broker)
        files = list((home / "state").glob("*/*.parquet"))
        after = history(broker, a=(15, 15), b=(16, 16))
        # What began before the newest state that is kept has to begin with its first message.
        old = history(broker, a=(2, 2))

    assert before == {
        "a": {"before": (13, 8), "after": (14, 9)},
        "b": {"before": (7, 3), "after": (9, 4)},
    }
    assert len(files) == 2
    assert sum(pq.read_metadata(file).num_rows for file in files) == 4
    assert after == {
        "a": {"before": (14, 9), "after": (15, 10)},
        "b": {"before": (9, 4), "after": (16, 10)},
    }
    assert old == {"a": {"begins": 0, "after": (14, 9)}}


def test_young_states_are_all_kept(home: Path) -> None:
    with open_broker(home, ManualClock(), state_retention_ms=HOUR_MS) as broker:
        broker.create_topic(TOPIC, type="fifo", queues=1)
        broker.create_group(GROUP, order="message_group", max_attempts=1)
        for turn in range(10):
            send(broker, "a")
            settle(broker, state={"a": turn})
            seal_all(broker)

        assert history(broker, a=(4, 4)) == {"a": {"before": (3, 3), "after": (4, 4)}}
