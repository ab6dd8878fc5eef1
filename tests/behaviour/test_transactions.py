"""No consumer sees half messages before they are committed, and they are ended once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors, schema
from tests.behaviour.halves import TRANSACTION_ID, Producer, ends, reopened_from_the_log, sweep

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.behaviour.conftest import Endpoint, Make

pytestmark = pytest.mark.every_endpoint
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
#: What a broker may be started from: nothing is lost but memory, or nothing is left but the log.
RESTARTS: dict[str, Callable[[Endpoint], object]] = {
    "running": lambda _: None,
    "restarted": lambda endpoint: endpoint.reopen(),
    "from the log": reopened_from_the_log,
}


# ------------------------------------------------------------------------------------ seen by whom


def test_a_half_message_is_seen_by_no_consumer(
    endpoint: Endpoint, orders: str, group: Make, begin: Producer
) -> None:
    readers = group()
    begin(3)

    got = endpoint.broker.receive(readers, orders)

    assert got.num_rows == 0
    assert endpoint.stored(orders) == 0
    assert endpoint.sql("SELECT count(*) AS n FROM messages WHERE topic NOT LIKE 'RMQ_SYS%'") == [
        {"n": 0}
    ]


@pytest.mark.parametrize("hidden", [HALF_TOPIC, "SCHEDULE_TOPIC_XXXX"])
def test_no_consumer_group_may_read_the_half_topic(
    endpoint: Endpoint, group: Make, begin: Producer, hidden: str
) -> None:
    readers = group()
    begin(1)

    for read in (
        lambda: endpoint.broker.receive(readers, hidden),
        lambda: endpoint.broker.subscribe(readers, hidden),
    ):
        with pytest.raises(errors.IllegalTopicError):
            read()


def test_committed_messages_come_rolled_back_ones_never(
    endpoint: Endpoint, orders: str, group: Make, begin: Producer
) -> None:
    readers = group()
    halves = begin(4)

    ended = endpoint.broker.end_transactions(
        ends(halves, ["commit", "rollback", "unknown", "commit"]), producer_group="producers"
    )

    assert ended["resolution"].to_pylist() == ["commit", "rollback", "unknown", "commit"]
    assert ended["first_time"].to_pylist() == [True, True, False, True]
    assert endpoint.drain(orders, readers) == [b"0", b"3"]
    assert endpoint.sql("SELECT message_id FROM half") == [
        {"message_id": halves["message_id"][2].as_py()}
    ]


def test_the_committed_message_is_the_one_sent(
    endpoint: Endpoint, orders: str, group: Make, begin: Producer
) -> None:
    readers = group()
    halves = begin(tag="t", keys=[["k"]], properties=[[("p", "v")]], born_at_ms=17)
    endpoint.advance(1_000)

    endpoint.broker.end_transactions(ends(halves, "commit"))

    [got] = endpoint.broker.receive(readers, orders).to_pylist()
    assert got["message_id"] == halves["message_id"][0].as_py()
    assert (got["body"], got["tag"], got["keys"], got["born_at_ms"]) == (b"0", "t", ["k"], 17)
    transaction_id = halves["transaction_id"][0].as_py()
    assert dict(got["properties"]) == {"p": "v", TRANSACTION_ID: transaction_id}
    assert got["stored_at_ms"] == endpoint.clock.now_ms()
    assert got["delivery_attempt"] == 1


def test_halves_of_several_topics_are_committed_together(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    names = [topic(type="transaction", queues=3) for _ in range(3)]
    halves = [
        endpoint.broker.send_half(name, messages(5, start=10 * i), producer_group=f"p{i}")
        for i, name in enumerate(names)
    ]

    endpoint.broker.end_transactions(ends(pa.concat_tables(halves), "commit"))

    for i, name in enumerate(names):
        assert sorted(endpoint.bodies(name)) == sorted(str(10 * i + j).encode() for j in range(5))


# --------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("kind", ["normal", "fifo", "delay"])
def test_only_a_transaction_topic_takes_half_messages(
    endpoint: Endpoint, topic: Make, messages: Make, kind: str
) -> None:
    name = topic(type=kind)

    with pytest.raises(errors.MessageTypeError, match=kind):
        endpoint.broker.send_half(name, messages(1), producer_group="p")

    assert endpoint.sql("FROM half") == []


def test_a_mixed_topic_takes_half_messages_among_others(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="mixed", queues=1), group()
    halves = endpoint.broker.send_half(name, messages(2), producer_group="p")
    endpoint.broker.send(name, messages(1, start=2))

    endpoint.broker.end_transactions(ends(halves, ["commit", "rollback"]))

    assert sorted(endpoint.drain(name, readers)) == [b"0", b"2"]


def test_a_commit_of_a_message_that_the_topic_has_is_suppressed_as_a_send_is(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(type="mixed", queues=1, deduplicate="message_id", deduplicate_window_ms=60_000)
    twice = messages(2, message_id=["m", "m"])
    halves = endpoint.broker.send_half(name, twice, producer_group="p")

    ended = endpoint.broker.end_transactions(ends(halves, "commit"))

    assert ended["first_time"].to_pylist() == [True, True]
    assert endpoint.bodies(name) == [b"0"]


def test_a_transaction_topic_takes_nothing_but_half_messages(
    endpoint: Endpoint, orders: str, messages: Make
) -> None:
    with pytest.raises(errors.MessageTypeError, match="half messages only"):
        endpoint.broker.send(orders, messages(1))

    assert endpoint.stored(orders) == 0


@pytest.mark.parametrize(
    "columns",
    [{"message_group": "g"}, {"delay_level": 1}, {"deliver_at_ms": 1_800_000_000_000}],
    ids=["group", "level", "time"],
)
def test_a_transaction_with_a_delay_or_a_group_is_refused(
    endpoint: Endpoint, begin: Producer, columns: dict[str, Any]
) -> None:
    [(name, value)] = columns.items()
    given: dict[str, Any] = {name: [None, value]}

    with pytest.raises(errors.MessageTypeError, match=f"Row 1: it has a {name}"):
        begin(2, **given)

    assert endpoint.sql("FROM half") == []


@pytest.mark.parametrize("immunity_ms", [0, -1, 3_600_001, True])
def test_an_immunity_out_of_range_is_refused(begin: Producer, immunity_ms: int) -> None:
    with pytest.raises(errors.RequestError, match="immunity_ms"):
        begin(1, immunity_ms=immunity_ms)


@pytest.mark.parametrize("name", ["", "a b", "x" * 121])
def test_a_producer_group_has_a_name(begin: Producer, name: str) -> None:
    with pytest.raises(errors.TransactionError):
        begin(1, producer_group=name)


@pytest.mark.parametrize("foreign", ["", "x", "0" * 32, "é" * 32, None])
def test_a_transaction_id_that_was_never_given_is_refused_and_nothing_is_ended(
    endpoint: Endpoint, orders: str, begin: Producer, foreign: str | None
) -> None:
    halves = begin(1)
    ids = [halves["transaction_id"][0].as_py(), foreign]

    with pytest.raises(errors.TransactionNotFoundError, match="Row 1"):
        endpoint.broker.end_transactions(
            pa.table({"transaction_id": ids, "resolution": ["commit", "commit"]})
        )

    assert errors.TransactionNotFoundError.code == 40008
    assert endpoint.stored(orders) == 0
    assert len(endpoint.sql("FROM half")) == 1


@pytest.mark.parametrize("ended", [False, True])
def test_the_id_of_another_home_is_refused(
    endpoint: Endpoint, begin: Producer, ended: bool
) -> None:
    halves = begin(1)
    [known] = halves["transaction_id"].to_pylist()
    foreign = known[:16] + f"{(int(known[16:], 16) ^ 1):016X}"
    if ended:
        endpoint.broker.end_transactions(ends(halves, "commit"))

    with pytest.raises(errors.TransactionNotFoundError):
        endpoint.broker.end_transactions(
            pa.table({"transaction_id": [foreign], "resolution": ["commit"]})
        )


def test_another_producer_group_may_not_end_it(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    halves = pa.concat_tables([begin(1), begin(1, producer_group="others")])

    with pytest.raises(errors.TransactionError, match=r"Row 1: .* others"):
        endpoint.broker.end_transactions(ends(halves, "commit"), producer_group="producers")

    assert endpoint.stored(orders) == 0
    endpoint.broker.end_transactions(ends(halves, "commit"))
    with pytest.raises(errors.TransactionError, match=r"Row 1: .* others"):
        endpoint.broker.end_transactions(ends(halves, "commit"), producer_group="producers")


@pytest.mark.parametrize("resolution", ["", "COMMIT", None])
def test_a_resolution_that_is_none_is_refused(
    endpoint: Endpoint, orders: str, begin: Producer, resolution: str | None
) -> None:
    halves = begin(2)
    ids = halves["transaction_id"].to_pylist()

    with pytest.raises(errors.TransactionError, match="Row 1"):
        endpoint.broker.end_transactions(
            pa.table({"transaction_id": ids, "resolution": ["commit", resolution]})
        )

    assert endpoint.stored(orders) == 0


# --------------------------------------------------------------------------------------- once only


@pytest.mark.parametrize("restart", RESTARTS)
def test_ending_twice_is_answered_the_same_and_delivers_once(
    endpoint: Endpoint, orders: str, begin: Producer, restart: str
) -> None:
    halves = begin(3)
    said = ends(halves, ["commit", "rollback", "commit"])
    first = endpoint.broker.end_transactions(said)
    RESTARTS[restart](endpoint)

    again = endpoint.broker.end_transactions(said)

    assert first["first_time"].to_pylist() == [True] * 3
    assert again["first_time"].to_pylist() == [False] * 3
    assert again["resolution"].to_pylist() == ["commit", "rollback", "commit"]
    assert sorted(endpoint.bodies(orders)) == [b"0", b"2"]


@pytest.mark.parametrize("restart", RESTARTS)
def test_ending_otherwise_than_the_first_time_is_refused(
    endpoint: Endpoint, orders: str, begin: Producer, restart: str
) -> None:
    halves = begin(2)
    endpoint.broker.end_transactions(ends(halves.slice(0, 1), "rollback"))
    RESTARTS[restart](endpoint)

    with pytest.raises(errors.TransactionEndedError, match=r"Row 0.*rollback"):
        endpoint.broker.end_transactions(ends(halves, "commit"))

    assert endpoint.stored(orders) == 0
    assert len(endpoint.sql("FROM half")) == 1


def test_unknown_is_answered_with_what_was_said_first(endpoint: Endpoint, begin: Producer) -> None:
    halves = begin(2)
    endpoint.broker.end_transactions(ends(halves, ["commit", "rollback"]))

    again = endpoint.broker.end_transactions(ends(halves, "unknown"))

    assert again["resolution"].to_pylist() == ["commit", "rollback"]
    assert again["first_time"].to_pylist() == [False, False]


def test_a_transaction_named_twice_in_a_table_is_ended_once(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    halves = begin(2)
    twice = pa.concat_tables([ends(halves, ["unknown", "commit"]), ends(halves, "commit")])

    ended = endpoint.broker.end_transactions(twice)

    assert ended["resolution"].to_pylist() == ["commit"] * 4
    assert ended["first_time"].to_pylist() == [False, True, True, False]
    assert endpoint.stored(orders) == 2


def test_a_table_that_contradicts_itself_is_refused(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    halves = begin(1)
    twice = pa.concat_tables([ends(halves, "commit"), ends(halves, "rollback")])

    with pytest.raises(errors.TransactionEndedError, match="Row 1"):
        endpoint.broker.end_transactions(twice)

    assert endpoint.stored(orders) == 0


def test_an_empty_table_ends_nothing(endpoint: Endpoint) -> None:
    empty = schema.RESOLUTION.empty_table()

    assert endpoint.broker.end_transactions(empty).equals(schema.ENDED.empty_table())


# ------------------------------------------------------------------------------- the topic is gone


def test_a_topic_with_open_half_messages_is_deleted_by_force_only(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    begin(2)

    with pytest.raises(errors.InUseError, match="2 half messages"):
        endpoint.broker.delete_topic(orders)

    assert endpoint.broker.delete_topic(orders, force=True)["halves"] == 2


def test_a_commit_for_a_deleted_topic_is_dropped(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    halves = begin(2)
    endpoint.broker.delete_topic(orders, force=True)
    endpoint.broker.create_topic(orders, type="transaction")

    ended = endpoint.broker.end_transactions(ends(halves.slice(0, 1), "commit"))
    endpoint.advance(6_000)

    assert ended["first_time"].to_pylist() == [True]
    assert sweep(endpoint) == {"checked": 0, "given_up": 0, "dropped": 1}
    assert endpoint.stored(orders) == 0
    assert endpoint.sql("FROM half") == []


# ------------------------------------------------------------------------------------- what is told


def test_the_view_of_half_messages(endpoint: Endpoint, orders: str, begin: Producer) -> None:
    halves = begin(2, born_at_ms=[1, 2])
    now = endpoint.clock.now_ms()
    endpoint.advance(6_000)
    sweep(endpoint)

    rows = endpoint.sql("FROM half ORDER BY born_at_ms")

    assert rows == [
        {
            "topic": orders,
            "message_id": halves["message_id"][i].as_py(),
            "transaction_id": halves["transaction_id"][i].as_py(),
            "producer_group": "producers",
            "checks": 1,
            "next_check_ms": now + 36_000,
            "born_at_ms": i + 1,
            "stored_at_ms": now,
        }
        for i in range(2)
    ]


def test_the_trace_of_a_message_tells_of_its_transaction(
    endpoint: Endpoint, begin: Producer
) -> None:
    halves = begin(1)
    endpoint.advance(6_000)
    sweep(endpoint)
    endpoint.broker.end_transactions(ends(halves, "commit"))

    told = endpoint.sql(
        f"SELECT what FROM message_trace WHERE message_id = '{halves['message_id'][0].as_py()}'"
        " ORDER BY at_ms, what"
    )

    assert [row["what"] for row in told] == ["half", "stored", "half", "half_committed", "stored"]
