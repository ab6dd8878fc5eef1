"""A failed message comes again after its backoff, and ends in the dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors, limits, schema
from rmq_pipeline.failure import signature_of

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

#: What a message is, wherever it lies.
MESSAGE = ["body", "tag", "keys", "message_group", "message_id", "properties", "born_at_ms"]
PROPERTIES = schema.PROPERTIES


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


def test_a_failed_message_returns_after_the_groups_backoff(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(backoff_ms=[1_000, 5_000])
    endpoint.broker.send(name, messages(1))

    for attempt, backoff_ms in [(1, 1_000), (2, 5_000), (3, 5_000), (4, 5_000)]:
        got = endpoint.broker.receive(readers, name)
        assert got["delivery_attempt"].to_pylist() == [attempt]
        fail(readers, got)
        endpoint.advance(backoff_ms - 1)
        assert endpoint.broker.receive(readers, name).num_rows == 0
        endpoint.advance(1)


def test_the_default_is_seventeen_deliveries_one_second_to_half_an_hour_apart(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    waits = [1, 5, 10, 30, *range(60, 601, 60), 1200, 1800]

    for attempt, seconds in enumerate(waits, start=1):
        got = endpoint.broker.receive(readers, name)
        assert got["delivery_attempt"].to_pylist() == [attempt]
        fail(readers, got)
        endpoint.advance(seconds * 1000 - 1)
        assert endpoint.broker.receive(readers, name).num_rows == 0
        endpoint.advance(1)
    last = endpoint.broker.receive(readers, name)
    fail(readers, last)

    assert last["delivery_attempt"].to_pylist() == [17]
    assert endpoint.stored(f"%DLQ%{readers}") == 1
    endpoint.advance(limits.INVISIBLE_MAX_MS)
    assert endpoint.broker.receive(readers, name).num_rows == 0


def test_a_group_that_was_declared_with_the_former_default_keeps_it(
    endpoint: Endpoint, group: Make
) -> None:
    readers = group(backoff_ms=limits.FORMER_BACKOFF_MS)

    again = endpoint.broker.ensure_group(readers)

    assert tuple(again["backoff_ms"]) == limits.FORMER_BACKOFF_MS
    with pytest.raises(errors.AlreadyExistsError):
        endpoint.broker.ensure_group(readers, backoff_ms=[1])


@pytest.mark.parametrize("retry_after_ms", [0, 1, 777])
def test_a_failure_may_name_its_own_delay(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make, retry_after_ms: int
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    fail(readers, endpoint.broker.receive(readers, name), retry_after_ms=retry_after_ms)

    early = 0
    if retry_after_ms:
        endpoint.advance(retry_after_ms - 1)
        early = endpoint.broker.receive(readers, name).num_rows
        endpoint.advance(1)

    assert early == 0
    assert endpoint.broker.receive(readers, name)["delivery_attempt"].to_pylist() == [2]


def test_a_negative_delay_is_refused(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    got = endpoint.broker.receive(readers, name)

    with pytest.raises(errors.RequestError):
        fail(readers, got, retry_after_ms=-1)

    endpoint.broker.ack(got)


def test_an_ended_lease_has_no_backoff(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(backoff_ms=[3_600_000])
    endpoint.broker.send(name, messages(1))
    endpoint.broker.receive(readers, name, invisible_duration_ms=1_000)

    endpoint.advance(1_000)

    assert endpoint.broker.receive(readers, name)["delivery_attempt"].to_pylist() == [2]


def test_a_failed_receipt_has_ended(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    got = endpoint.broker.receive(readers, name)
    fail(readers, got)

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(got)


def test_a_retry_is_the_same_message_in_its_place(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=2), group(backoff_ms=[1])
    endpoint.broker.send(name, messages(2, tag="t", properties=[[("p", "v")]] * 2))
    first = endpoint.broker.receive(readers, name)
    fail(readers, first)
    endpoint.advance(1)

    second = endpoint.broker.receive(readers, name)

    assert second.select(schema.READ.names).equals(first.select(schema.READ.names))
    assert endpoint.stored(name) == 2


def test_a_retry_does_not_hold_up_new_messages(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    fail(readers, endpoint.broker.receive(readers, name))
    endpoint.broker.send(name, messages(2, start=1))

    assert endpoint.drain(name, readers) == [b"1", b"2"]


# ---------------------------------------------------------------------------------- dead letters


def fail_to_the_end(
    endpoint: Endpoint, topic: str, group: str, fail: Make, attempts: int
) -> pa.Table:
    got = None
    for _ in range(attempts):
        got = endpoint.broker.receive(group, topic)
        fail(
            *(group, got),
            retry_after_ms=0,
            reason="no engine 7 of 'N14228'",
            error_type="EngineError",
            run_id="run-1",
        )
    return got


def test_the_last_failure_sends_the_message_to_the_dead_letters(
    endpoint: Endpoint, topic: Make, group: Make, fail: Make
) -> None:
    name, readers = topic(queues=2), group(max_attempts=3)
    row: dict[str, Any] = {
        "body": b"body",
        "tag": "t",
        "keys": ["k1", "k2"],
        "born_at_ms": 17,
        "message_id": "ID-1",
        "properties": [("colour", "blue")],
    }
    fields = [schema.SEND.field(n) for n in row]
    [sent] = endpoint.broker.send(
        name, schema_table({n: [v] for n, v in row.items()}, fields)
    ).to_pylist()

    last = fail_to_the_end(endpoint, name, readers, fail, 3)

    assert last["delivery_attempt"].to_pylist() == [3]
    assert endpoint.broker.receive(readers, name).num_rows == 0
    [dead] = endpoint.broker.read(f"%DLQ%{readers}", 0, offset=0, limit=10).to_pylist()
    assert {n: dead[n] for n in ("body", "tag", "keys", "born_at_ms")} == {
        n: row[n] for n in ("body", "tag", "keys", "born_at_ms")
    }
    assert dict(dead["properties"]) == {
        "colour": "blue",
        "DLQ_ORIGIN_TOPIC": name,
        "DLQ_ORIGIN_MESSAGE_ID": "ID-1",
        "DLQ_ORIGIN_QUEUE_ID": str(sent["queue_id"]),
        "DLQ_ORIGIN_QUEUE_OFFSET": str(sent["queue_offset"]),
        "DLQ_REASON": "no engine 7 of 'N14228'",
        "DLQ_ERROR_TYPE": "EngineError",
        "DLQ_SIGNATURE": signature_of("no engine 8 of 'N24211'", error_type="EngineError"),
        "DLQ_RUN_ID": "run-1",
        "DLQ_ATTEMPTS": "3",
    }


def schema_table(columns: dict[str, list[Any]], fields: list[pa.Field]) -> pa.Table:
    import pyarrow as pa

    return pa.table(columns, schema=pa.schema(fields))


def test_the_last_ended_lease_sends_the_message_to_the_dead_letters(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(max_attempts=2)
    endpoint.broker.send(name, messages(1))
    for _ in range(2):
        assert endpoint.broker.receive(readers, name, invisible_duration_ms=1_000).num_rows == 1
        endpoint.advance(1_000)

    again = endpoint.broker.receive(readers, name)
    endpoint.broker.revive()

    assert again.num_rows == 0
    [dead] = endpoint.broker.read(f"%DLQ%{readers}", 0, offset=0, limit=10).to_pylist()
    assert dict(dead["properties"])["DLQ_ATTEMPTS"] == "2"
    assert dead["body"] == b"0"


def test_max_attempts_of_one_gives_no_second_delivery(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(max_attempts=1)
    endpoint.broker.send(name, messages(3))

    answer = fail(readers, endpoint.broker.receive(readers, name), retry_after_ms=0)

    assert answer == {"acked": 0, "retried": 0, "dead_lettered": 3, "published": 0}
    assert endpoint.broker.receive(readers, name).num_rows == 0
    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0", b"1", b"2"]


def test_a_message_may_be_forwarded_to_the_dead_letters_at_once(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(2))
    got = endpoint.broker.receive(readers, name)

    endpoint.broker.forward_to_dead_letter_queue(got.slice(0, 1), reason="unreadable")

    [dead] = endpoint.broker.read(f"%DLQ%{readers}", 0, offset=0, limit=10).to_pylist()
    properties = dict(dead["properties"])
    assert dead["body"] == b"0"
    assert (properties["DLQ_REASON"], properties["DLQ_ATTEMPTS"]) == ("unreadable", "1")
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(got)
    endpoint.broker.ack(got.slice(1))


def test_a_settle_may_dead_letter_with_a_reason(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, outcomes: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(2))
    got = endpoint.broker.receive(readers, name)

    answer = endpoint.broker.settle(readers, outcomes(got, ["ack", "dead_letter"], reason="why"))

    assert answer == {"acked": 1, "retried": 0, "dead_lettered": 1, "published": 0}
    assert endpoint.bodies(f"%DLQ%{readers}") == [b"1"]


@pytest.mark.parametrize(
    ("on_failure", "dead", "parked"), [("dead_letter", [b"0"], 0), ("park", [], 1)]
)
def test_a_settle_may_say_that_it_was_the_last_attempt(
    on_failure: str,
    dead: list[bytes],
    parked: int,
    endpoint: Endpoint,
    topic: Make,
    group: Make,
    messages: Make,
    outcomes: Make,
) -> None:
    name, readers = topic(queues=1), group(max_attempts=9, on_failure=on_failure)
    endpoint.broker.send(name, messages(1))
    got = endpoint.broker.receive(readers, name)

    endpoint.broker.settle(readers, outcomes(got, "give_up", reason="enough"))

    assert endpoint.bodies(f"%DLQ%{readers}") == dead
    assert len(endpoint.sql(f"FROM parked WHERE consumer_group = '{readers}'")) == parked


def test_however_many_are_forwarded_at_once_all_are_there_when_it_returns(
    endpoint: Endpoint, topic: Make, group: Make
) -> None:
    name, readers = topic(queues=1), group()
    for _ in range(2):
        endpoint.broker.send(name, pa.table({"body": [b"x"] * 12_000}))
    parts = [endpoint.broker.receive(readers, name, limit=12_000) for _ in range(2)]

    endpoint.broker.forward_to_dead_letter_queue(pa.concat_tables(parts))

    (dead,) = endpoint.broker.describe_topic(f"%DLQ%{readers}")["offsets"]
    assert dead["max_offset"] == 24_000


def test_dead_letters_can_be_consumed_like_any_topic(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers, doctors = topic(queues=1), group(), group()
    endpoint.broker.send(name, messages(3))
    endpoint.broker.forward_to_dead_letter_queue(endpoint.broker.receive(readers, name))

    assert endpoint.drain(f"%DLQ%{readers}", doctors) == [b"0", b"1", b"2"]


def test_the_dead_letter_topic_is_there_from_the_start(endpoint: Endpoint, group: Make) -> None:
    readers = group()

    described = endpoint.broker.describe_topic(f"%DLQ%{readers}")

    assert described["queues"] == 1
    assert endpoint.stored(f"%DLQ%{readers}") == 0


def test_a_dead_letter_keeps_what_it_was_and_may_be_sent_again_without_where_it_was(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=1), group()
    endpoint.broker.send(name, messages(1, groups=["g"], message_id="m-0", properties=[{"p": "v"}]))
    endpoint.broker.forward_to_dead_letter_queue(endpoint.broker.receive(readers, name))
    dead = endpoint.broker.read(f"%DLQ%{readers}", 0, offset=0, limit=1).select(MESSAGE)
    own = [[pair for pair in row if pair[0] == "p"] for row in dead["properties"].to_pylist()]
    at = MESSAGE.index("properties")

    with pytest.raises(errors.IllegalMessagePropertyError):
        endpoint.broker.send(name, dead)
    endpoint.broker.send(
        name, dead.set_column(at, dead.schema.field(at), pa.array(own, PROPERTIES))
    )

    [got] = endpoint.broker.receive(readers, name).to_pylist()
    assert (got["message_id"], got["body"], got["message_group"]) == ("m-0", b"0", "g")
    assert got["properties"] == [("p", "v")]
    assert (got["delivery_attempt"], got["queue_offset"]) == (1, 1)


def test_a_message_one_group_gave_up_is_still_there_for_another(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, one, other = topic(queues=1), group(), group()
    endpoint.broker.send(name, messages(1))

    endpoint.broker.forward_to_dead_letter_queue(endpoint.broker.receive(one, name))

    assert endpoint.drain(name, other) == [b"0"]
    assert endpoint.stored(f"%DLQ%{other}") == 0
