"""What a handler returns is checked before it can stop a settle, or spoil a sink."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.window import run_window
from rmq_pipeline.handling.handler import Handler, Outcome, OutcomeError, conform, published
from rmq_pipeline.handling.sink import read_sink
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.settings import Settings

BROKEN = pa.array([b"ok", b"\xff"]).view(pa.string())
ENDS = pa.array([0, 1, 2], pa.int32())
SINK = pa.schema([("name", pa.string()), ("born_at_ms", pa.int64())])
STATE = pa.schema([("name", pa.string())])


@pytest.mark.parametrize(
    "column",
    [
        BROKEN,
        pa.array([b"\xff"], pa.large_binary()).view(pa.large_string()),
        pa.ListArray.from_arrays(ENDS, BROKEN),
        pa.StructArray.from_arrays([BROKEN], ["name"]),
        pa.MapArray.from_arrays(ENDS, BROKEN, BROKEN),
        pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), BROKEN),
    ],
)
def test_a_text_that_is_none_is_refused(column: pa.Array) -> None:
    returned = pa.table({"n": pa.array(range(len(column))), "x": column})

    with pytest.raises(OutcomeError, match=r"rows cannot be kept: .*UTF8"):
        conform(returned, returned.schema, what="rows")


def test_texts_that_are_some_are_not() -> None:
    returned = pa.table({"x": ["ä", None], "body": [b"\xff", b""]})

    assert conform(returned, returned.schema, what="rows") is returned


def test_a_row_is_not_refused_for_its_neighbours() -> None:
    names = pa.ListArray.from_arrays(ENDS, BROKEN)

    sound, broken = (pa.table({"x": names.slice(at, 1)}) for at in (0, 1))

    assert conform(sound, sound.schema, what="rows") is sound
    with pytest.raises(OutcomeError, match="UTF8"):
        conform(broken, broken.schema, what="rows")


def test_dates_in_rows_are_parquets() -> None:
    noon = pa.table({"on": pa.array([1_700_000_000_123], pa.int64())})

    rows = conform(noon, pa.schema([("on", pa.date64())]), what="rows")

    assert rows is not None
    assert str(rows["on"][0]) == "2023-11-14"
    with pytest.raises(OutcomeError, match="whole number of days"):
        conform(noon, pa.schema([("on", pa.date64())]), what="state", most=1)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    settings = Settings(reserve_bytes=1 << 20)
    with Broker.open(tmp_path / "home", upkeep="none", settings=settings) as broker:
        broker.create_topic("names", type="fifo", queues=1)
        broker.create_group("g", order="message_group", max_attempts=2, backoff_ms=[1])
        yield broker


def name_in_state(messages: pa.Table, _: pa.Table) -> Outcome:
    name = messages["body"].combine_chunks().view(pa.string())
    return Outcome(state=pa.table([name.slice(len(name) - 1)], schema=STATE))


def name_in_rows(messages: pa.Table, _: pa.Table) -> Outcome:
    name = messages["body"].combine_chunks().view(pa.string())
    return Outcome(rows=pa.table([name, pc.fill_null(messages["born_at_ms"], 0)], schema=SINK))


@pytest.mark.parametrize("handler", [name_in_state, name_in_rows])
def test_one_that_returns_it_is_a_dead_letter_and_blocks_no_other(
    broker: Broker, tmp_path: Path, handler: Handler
) -> None:
    sent = pa.table({"body": [b"x", b"\xff", b"y"], "message_group": ["a", "b", "c"]})
    broker.send("names", sent)
    spec = ConsumerSpec(
        name="g",
        topic="names",
        group="g",
        handler=handler,
        order_by="message_group",
        state=STATE,
        sink=tmp_path / "sink",
        sink_schema=SINK,
    )

    report = run_window(spec, broker, owner="test", idle_s=0.3)

    assert (report.acked, report.dead_lettered) == (2, 1)
    kept = read_sink(tmp_path / "sink", sink_schema=SINK)["name"].to_pylist()
    assert sorted(kept) == (["x", "y"] if handler is name_in_rows else [])


def test_a_published_message_with_a_queue_of_its_own_fails_alone() -> None:
    table = pa.table({"body": [b"x"], "queue_id": pa.array([0], pa.int32())})

    with pytest.raises(OutcomeError, match="the broker chooses the queue"):
        published({"t": table}, {"t": "normal"})
    assert published({"t": table.drop_columns("queue_id")}, {"t": "normal"})
