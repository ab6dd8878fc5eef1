"""Damaged tables that an older version has stored are contained: they stop and end nobody."""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rmq_pipeline import errors, tables
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.engine import SCHEMAS
from rmq_pipeline.flight import wire
from rmq_pipeline.settings import Settings
from rmq_pipeline.store.log.commit_log import CommitLog
from rmq_pipeline.tables import mended
from tests.broker.sealed_home import seal_all
from tests.damaged_tables import DAMAGES, Damage
from tests.store.log_batches import forget_validation
from tests.store.rows import keyed

SMALL = Settings(reserve_bytes=1 << 20, log_file_bytes=8 << 20, seal_after_ms=0)


def nothing(*_: object) -> None:
    """As versions before tables were validated."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def broker(home: Path) -> Iterator[Broker]:
    """A broker on the log of an older version."""
    with Broker.open(home, upkeep="none", settings=SMALL):
        pass
    forget_validation(home / "log")
    with Broker.open(home, upkeep="none", settings=SMALL) as broker:
        broker.create_topic("t", queues=1)
        broker.create_topic("filler", queues=1)
        broker.create_group("g")
        yield broker


@pytest.mark.parametrize("name", ["back", "negative"])
def test_damaged_bodies_of_an_older_log_are_empty(
    broker: Broker, home: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    damage: Damage = DAMAGES[name]
    with monkeypatch.context() as older:
        older.setattr(tables, "check_readable", nothing)
        broker.send("t", damage.table("body"))
    broker.send("t", pa.table({"body": [b"sound"]}))

    got = broker.receive("g", "t", limit=10)["body"].to_pylist()
    for _ in range(5):  # more than a file of the log has
        broker.send("filler", pa.table({"body": [bytes(3 << 20)]}))
    broker.sql("FROM in_flight")  # dispatch has read all of it then
    assert seal_all(broker)["segments"] > 0
    sealed = broker.read("t", 0, offset=0, limit=10)["body"].to_pylist()

    assert len(got) == 4
    assert got[3] == b"sound"
    assert b"" in got
    assert set(got) <= {b"zzzzz", b"zzzz", b"sound", b"", b"zzzzzzzzzz"}
    assert sealed == got
    broker.close()
    with Broker.open(home, upkeep="none", settings=SMALL) as again:
        assert again.read("t", 0, offset=0, limit=10)["body"].to_pylist() == got


def not_utf8() -> pa.Array:
    """A null, and a text that is not UTF-8."""
    buffers = [b"\x02", struct.pack("<3i", 0, 0, 2), b"i\xff"]
    return pa.Array.from_buffers(pa.string(), 2, [pa.py_buffer(each) for each in buffers])


def test_a_client_takes_what_can_be_read() -> None:
    times = pa.array([86_400_000_000, 0], pa.int64()).view(pa.time64("us"))
    given = pa.table({"tag": not_utf8(), "at": times, "body": [b"a", b"b"]})

    found = wire.read_answer(list(map(pa.py_buffer, wire.pieces(given))))

    assert found["tag"].cast(pa.binary()).to_pylist() == [None, b"i\xff"]
    assert found["body"].to_pylist() == [b"a", b"b"]
    assert found["at"].cast(pa.int64()).to_pylist() == [86_400_000_000, 0]


def test_a_mended_column_keeps_its_nulls() -> None:
    texts = pa.array([None, "zzzzz", None, "zzzz"])
    valid, _, data = texts.buffers()
    ends = pa.py_buffer(struct.pack("<5i", 0, 0, 10, 4, 9))
    batch = pa.record_batch({"tag": pa.Array.from_buffers(pa.string(), 4, [valid, ends, data])})

    assert mended(batch)["tag"].to_pylist() == [None, None, None, "zzzzz"]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_client_says_that_an_answer_is_damaged(damage: Damage) -> None:
    answer = pa.py_buffer(b"T" + damage.stream("body"))

    with pytest.raises(errors.TableSchemaError, match="answer is damaged"):
        wire.read_answer([answer])


def older_log(home: Path) -> CommitLog:
    return CommitLog.open(
        home / "log", schemas=SCHEMAS, file_bytes=8 << 20, reserve_bytes=1 << 20
    )  # fmt: skip


def test_keys_of_an_older_log_are_lost_only_where_they_are_damaged(
    broker: Broker, home: Path
) -> None:
    start = broker.engine.log.end
    broker.send("t", pa.table({"body": [b"a", b"b", b"c"]}))
    ((_, sections),) = broker.engine.log.frames(start, broker.engine.log.end)
    sent = sections[0].batch
    broker.close()
    keys = DAMAGES["text in a list"].table("keys").column("keys").chunk(0)
    sent = sent.set_column(sent.schema.get_field_index("keys"), sent.schema.field("keys"), keys)
    at = sent.schema.get_field_index("queue_offset")
    log = older_log(home)
    log.stage(1, sent.set_column(at, sent.schema.field(at), pa.array([3, 4, 5], pa.int64())))
    log.commit()
    log.close()

    with Broker.open(home, upkeep="none", settings=SMALL) as again:
        got = again.receive("g", "t", limit=10)
        found = again.sql("SELECT keys FROM messages ORDER BY queue_offset")

    assert got["body"].to_pylist() == [b"a", b"b", b"c"] * 2
    expected = [["zzzzz"], ["zzzzz"], None]
    assert got["keys"].to_pylist()[3:] == found["keys"].to_pylist()[3:] == expected


def test_keyed_state_of_an_older_log_is_lost_only_where_it_is_damaged(
    broker: Broker, home: Path
) -> None:
    """In small frames that follow each other, which dispatch decodes at once."""
    group_id = broker.engine.state.group("g").group_id
    topic_id = broker.engine.state.topic("t").topic.topic_id
    broker.close()
    log = older_log(home)
    for start in (0, 3):
        state = [{"message_group": f"m{i}", "seen": [i]} for i in range(start, start + 3)]
        types = {"seen": pa.list_(pa.int64())}
        _, batch = keyed(state, group_id=group_id, topic_id=topic_id, **types)
        ends = np.array([0, 2, 1, 3], np.int32)
        column = pa.Array.from_buffers(
            types["seen"], 3, [None, pa.py_buffer(ends)], children=[batch["seen"].values]
        )
        log.stage(3, batch.set_column(batch.schema.get_field_index("seen"), "seen", column))
        log.commit()
    log.close()

    with Broker.open(home, upkeep="none", settings=SMALL) as again:
        found = again.keyed_state("g", "t")
        assert again.status()["store"]["stuck"] is None

    assert found is not None
    assert found.sort_by("message_group")["seen"].to_pylist() == [
        [0, 1],
        None,
        [1, 2],
        [3, 4],
        None,
        [4, 5],
    ]
