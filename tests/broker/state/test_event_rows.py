"""Events as the commit log keeps them: filled into a form, or made column by column."""

import numpy as np
import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker.state.event_rows import (
    EventRows,
    from_batch,
    single,
    to_batch,
    to_payload,
)
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.log import frame


def some_events(*, n: int, client_id: str | None = None) -> list[EventRows]:
    """A lease of ``n`` messages, every column of which has something in it, and an ack."""
    offsets = np.arange(100, 100 + n)
    lease = EventRows(
        kind=Kind.LEASE,
        at_ms=1_700_000_000_000,
        group_id=2,
        topic_id=3,
        queue_id=4,
        queue_offset=offsets,
        attempt=np.arange(n, dtype=np.int32),
        visible_at_ms=offsets + 5,
        delivery=6,
        epoch=7,
        message_group_hash=-offsets,
        client_id=client_id,
    )
    return [lease, single(Kind.ACK, 8, offset=9, topic_id=10)]


@pytest.mark.parametrize("n", [1, 2, 33, 127, 128, 1000])
@pytest.mark.parametrize("client_id", [None, "a client"])
def test_a_payload_says_what_the_batch_does(n: int, client_id: str | None) -> None:
    events = some_events(n=n, client_id=client_id)
    read = frame.decode(to_payload(events), schema.EVENT)
    read.validate(full=True)
    assert read.equals(to_batch(events))


def test_a_payload_is_not_changed_by_the_next_one() -> None:
    first = frame.decode(to_payload([single(Kind.ACK, 1, offset=2)]), schema.EVENT)
    to_payload([single(Kind.CURSOR, 3, offset=4)])
    assert first.column("at_ms").equals(pa.array([1], pa.int64()))
    assert first.column("queue_offset").equals(pa.array([2], pa.int64()))


def test_a_name_is_read_only_in_the_kinds_of_events_that_have_it() -> None:
    half = single(Kind.HALF, 1, client_id="producers")
    window = single(Kind.WINDOW, 1, client_id="run-1")
    renewed = single(Kind.WINDOW, 2)

    assert half.producer_group == "producers"
    assert (window.window_owner, renewed.window_owner) == ("run-1", "")
    with pytest.raises(AssertionError):
        _ = window.producer_group
    with pytest.raises(AssertionError):
        _ = half.window_owner


def test_an_attempt_and_a_lock_time_are_stored_in_the_column_of_epochs() -> None:
    offsets = np.arange(2)
    attempt = EventRows(kind=Kind.LEASE, at_ms=1, queue_offset=offsets, attempt_id_hash=7)
    windowed = EventRows(kind=Kind.LEASE, at_ms=2, queue_offset=offsets, epoch=3)
    locked = single(Kind.QUEUE_LOCKED, 3, locked_at_ms=1_700_000_000_000)
    opened = single(Kind.WINDOW, 4, epoch=5)
    events = [attempt, windowed, locked, opened]

    stored = frame.decode(to_payload(events), schema.EVENT)
    read = list(from_batch(stored))

    assert stored["epoch"].to_pylist() == [-7, -7, 3, 3, 1_700_000_000_000, 5]
    for name in ("epoch", "attempt_id_hash", "locked_at_ms"):
        found = [rows.column(name, np.int64).tolist() for rows in read]
        assert found == [rows.column(name, np.int64).tolist() for rows in events], name
