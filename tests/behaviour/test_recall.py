"""A scheduled message is called back or delivered, and never both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from rmq_pipeline import errors, schema
from rmq_pipeline.broker.decide.publish import checked
from rmq_pipeline.broker.decide.schedule import Deliver, FindDue, Recall

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

SECOND = 1_000
UNKNOWN = "0" * 48


@pytest.fixture
def later(topic: Make) -> str:
    return str(topic(type="delay", queues=1))


def handles(*texts: str | None) -> pa.Table:
    return pa.table({"recall_handle": pa.array(texts, pa.string())})


def of(sent: pa.Table, *rows: int) -> pa.Table:
    return sent.select(["recall_handle"]).take(list(rows)) if rows else sent.select([3])


@pytest.mark.every_endpoint
def test_a_scheduled_message_has_a_recall_handle_and_others_have_none(
    endpoint: Endpoint, later: str, topic: Make, messages: Make
) -> None:
    now = endpoint.clock.now_ms()
    scheduled = endpoint.broker.send(later, messages(3, deliver_at_ms=[now + 1, now, now + 9]))
    plain = endpoint.broker.send(topic(), messages(2))

    given = scheduled["recall_handle"].to_pylist()
    assert [text is None for text in given] == [False, True, False]
    assert len(set(given)) == 3
    assert plain["recall_handle"].to_pylist() == [None, None]


@pytest.mark.every_endpoint
def test_a_recalled_message_is_never_delivered(
    endpoint: Endpoint, later: str, group: Make, messages: Make
) -> None:
    readers = group()
    sent = endpoint.broker.send(later, messages(4, delay_level=[1, 2, 2, 18]))

    recalled = endpoint.broker.recall(later, of(sent, 2, 0))

    assert recalled.schema.equals(schema.RECALLED)
    assert recalled["recall_handle"].equals(of(sent, 2, 0)["recall_handle"])
    assert recalled["message_id"].to_pylist() == [sent["message_id"][i].as_py() for i in (2, 0)]
    endpoint.advance(7_200 * SECOND)
    report = endpoint.broker.deliver_scheduled()
    assert (report["delivered"], report["dropped"]) == (2, 0)
    assert sorted(endpoint.drain(later, readers)) == [b"1", b"3"]


@pytest.mark.every_endpoint
def test_a_message_may_be_recalled_up_to_the_moment_of_its_delivery(
    endpoint: Endpoint, later: str, group: Make, messages: Make
) -> None:
    readers = group()
    sent = endpoint.broker.send(later, messages(1, delay_level=1))
    endpoint.advance(10 * SECOND)

    endpoint.broker.recall(later, of(sent))

    assert endpoint.broker.deliver_scheduled()["delivered"] == 0
    assert endpoint.drain(later, readers) == []


@pytest.mark.every_endpoint
def test_a_delivered_message_cannot_be_recalled(
    endpoint: Endpoint, later: str, messages: Make
) -> None:
    sent = endpoint.broker.send(later, messages(2, delay_level=[1, 2]))
    endpoint.advance(SECOND)
    endpoint.broker.deliver_scheduled()

    with pytest.raises(errors.RecallError, match=r"Row 1 .*delivered"):
        endpoint.broker.recall(later, of(sent, 1, 0))

    endpoint.advance(4 * SECOND)
    assert endpoint.broker.deliver_scheduled()["delivered"] == 1


def test_a_message_is_recalled_once(endpoint: Endpoint, later: str, messages: Make) -> None:
    sent = endpoint.broker.send(later, messages(2, delay_level=1))
    endpoint.broker.recall(later, of(sent, 0))

    with pytest.raises(errors.RecallError, match="Row 1 "):
        endpoint.broker.recall(later, of(sent, 1, 0))
    with pytest.raises(errors.RecallError, match=r"Row 1 .*twice"):
        endpoint.broker.recall(later, of(sent, 1, 1))

    endpoint.advance(SECOND)
    assert endpoint.broker.deliver_scheduled()["delivered"] == 1


@pytest.mark.every_endpoint
def test_a_message_of_another_topic_is_not_recalled(
    endpoint: Endpoint, later: str, topic: Make, messages: Make
) -> None:
    other = topic(type="delay")
    sent = endpoint.broker.send(later, messages(1, delay_level=1))

    with pytest.raises(errors.RecallError, match=f"not of topic {other}"):
        endpoint.broker.recall(other, of(sent))
    with pytest.raises(errors.TopicNotFoundError):
        endpoint.broker.recall("nowhere", of(sent))

    endpoint.advance(SECOND)
    assert endpoint.broker.deliver_scheduled()["delivered"] == 1


def test_a_handle_of_another_home_is_not_taken_for_what_lies_there_here(
    endpoint: Endpoint, later: str, messages: Make
) -> None:
    sent = endpoint.broker.send(later, messages(1, delay_level=1))
    foreign = "00000000DEADBEEF" + sent["recall_handle"][0].as_py()[16:]

    with pytest.raises(errors.RecallError, match="no such message"):
        endpoint.broker.recall(later, handles(foreign))

    endpoint.advance(SECOND)
    assert endpoint.broker.deliver_scheduled()["delivered"] == 1


@pytest.mark.parametrize("bad", ["", "x", UNKNOWN[:-1], "g" * 48, UNKNOWN + "00", None])
def test_what_is_no_recall_handle_recalls_nothing(
    endpoint: Endpoint, later: str, messages: Make, bad: str | None
) -> None:
    sent = endpoint.broker.send(later, messages(1, delay_level=1))

    with pytest.raises(errors.RecallError, match="Row 1 is not a recall handle"):
        endpoint.broker.recall(later, handles(sent["recall_handle"][0].as_py(), bad))

    endpoint.advance(SECOND)
    assert endpoint.broker.deliver_scheduled()["delivered"] == 1


@pytest.mark.parametrize(
    "table",
    [pa.table({}), pa.table({"recall_handle": [1]}), pa.table({"recall_handle": ["a"], "x": [1]})],
)
def test_a_table_that_is_none_of_handles_is_refused(
    endpoint: Endpoint, later: str, table: pa.Table
) -> None:
    with pytest.raises(errors.RocketMQError):
        endpoint.broker.recall(later, table)


def test_recalling_nothing_is_no_fault(endpoint: Endpoint, later: str) -> None:
    assert endpoint.broker.recall(later, handles()).num_rows == 0


@pytest.mark.every_endpoint
@pytest.mark.parametrize("dispatched", [True, False], ids=["from_tables", "from_log"])
def test_after_a_restart_what_was_recalled_stays_recalled(
    endpoint: Endpoint, later: str, group: Make, messages: Make, dispatched: bool
) -> None:
    readers = group()
    sent = endpoint.broker.send(later, messages(10, delay_level=1))
    if dispatched:
        endpoint.sql("SELECT count(*) FROM scheduled")
    endpoint.broker.recall(later, of(sent, 3, 4))
    if dispatched:
        assert endpoint.sql("SELECT count(*) AS n FROM scheduled") == [{"n": 8}]

    endpoint.reopen()

    with pytest.raises(errors.RecallError):
        endpoint.broker.recall(later, of(sent, 3))
    endpoint.broker.recall(later, of(sent, 5))
    endpoint.advance(SECOND)
    assert endpoint.broker.deliver_scheduled()["delivered"] == 7
    assert sorted(map(int, endpoint.drain(later, readers))) == [0, 1, 2, 6, 7, 8, 9]


def test_a_recall_is_in_the_trace_of_the_message(
    endpoint: Endpoint, later: str, messages: Make
) -> None:
    sent = endpoint.broker.send(later, messages(1, delay_level=1, message_id="one"))
    endpoint.broker.recall(later, of(sent))

    found = endpoint.sql("SELECT what FROM message_trace WHERE message_id = 'one' ORDER BY at_ms")

    assert [row["what"] for row in found] == ["scheduled", "schedule_recalled"]


def test_what_is_recalled_holds_no_topic(endpoint: Endpoint, later: str, messages: Make) -> None:
    sent = endpoint.broker.send(later, messages(2, delay_level=1))
    with pytest.raises(errors.InUseError):
        endpoint.broker.delete_topic(later)
    endpoint.broker.recall(later, of(sent))

    endpoint.broker.delete_topic(later)

    with pytest.raises(errors.TopicNotFoundError):
        endpoint.broker.describe_topic(later)


# ----------------------------------------------------------------------------------- exactly once


def both(endpoint: Endpoint, topic: str, *, recall_first: bool) -> tuple[Any, Any]:
    """A delivery and a recall of everything due, in one frame; their answers."""
    engine = endpoint.inside.engine
    rows, _ = engine.submit(FindDue(100, None))
    n = len(rows)
    columns = {f.name: pa.nulls(n, f.type) for f in schema.SEND}
    columns["body"] = pa.array([b"x"] * n)
    send = checked(
        engine.state.topic(topic).topic,
        columns,
        ids=engine.ids,
        delay_max_ms=SECOND,
        now_ms=endpoint.clock.now_ms(),
    )
    deliver = Deliver(rows, ((np.arange(n), send),), None)
    if recall_first:
        recalled, delivered = endpoint.inside.writer.submit_together([Recall(rows), deliver])
    else:
        delivered, recalled = endpoint.inside.writer.submit_together([deliver, Recall(rows)])
    return delivered, recalled


@pytest.mark.parametrize("recall_first", [True, False])
def test_in_one_frame_the_first_of_recall_and_delivery_wins(
    inside: Endpoint, topic: Make, messages: Make, recall_first: bool
) -> None:
    # In process only: no endpoint lets a caller choose what shares a frame.
    name = topic(type="delay")
    inside.broker.send(name, messages(5, delay_level=1))
    inside.advance(SECOND)

    delivered, recalled = both(inside, name, recall_first=recall_first)

    if recall_first:
        assert recalled is None
        assert len(delivered[0]) == 0
        assert inside.stored(name) == 0
    else:
        assert isinstance(recalled, errors.RecallError)
        assert len(delivered[0]) == 5
        assert inside.stored(name) == 5
    inside.reopen()
    assert inside.stored(name) == (0 if recall_first else 5)
    assert inside.broker.deliver_scheduled()["delivered"] == 0


@pytest.mark.every_endpoint
def test_in_a_race_each_message_is_recalled_or_delivered_and_never_both(
    endpoint: Endpoint, later: str, group: Make, messages: Make
) -> None:
    readers = group()
    rounds, size = 40, 50
    for start in range(0, rounds * size, size):
        sent = endpoint.broker.send(later, messages(size, start=start, delay_level=1))
        endpoint.advance(SECOND)
        step = 1 + start // size % 7
        deliveries = endpoint.pool.submit(
            lambda: [endpoint.broker.deliver_scheduled(limit=10) for _ in range(size // 10)]
        )

        recalled = set()
        for row in range(size - 1, -1, -step):
            try:
                endpoint.broker.recall(later, of(sent, row))
            except errors.RecallError:
                continue
            recalled.add(start + row)
        deliveries.result(30)
        while endpoint.broker.deliver_scheduled()["delivered"]:
            pass

        got = {int(body) for body in endpoint.drain(later, readers)}
        assert not got & recalled
        assert got | recalled == set(range(start, start + size))
