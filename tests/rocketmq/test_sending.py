"""SendMessage and RecallMessage as they go over the wire."""

import gzip
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.rocketmq import protocol as pb
from tests.conformance import raw
from tests.conformance.raw import Raw
from tests.rocketmq.conftest import Open

Clients = Callable[..., Raw]
FORWARDED = pa.schema([schema.SEND.field("body"), schema.SEND.field("properties")])


def send(client: Raw, *messages: Any) -> Any:
    return client("SendMessage", raw.sends(*messages))


def rows(broker: Broker, topic: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for queue_id in range(broker.engine.state.topic(topic).topic.queues):
        found += broker.read(topic, queue_id, offset=0, limit=1000).to_pylist()
    return found


def test_a_message_is_stored_with_all_it_has(broker: Broker, client: Clients) -> None:
    broker.create_topic("t", queues=1)
    message = raw.message(
        "t", b"body", tag="blue", keys=["a", "b"], born_timestamp_ms=5_000, user={"x": "y"}
    )

    answer = send(client(), message)

    (entry,) = answer.entries
    own = message.system_properties.message_id
    assert (answer.status.code, entry.status.code) == (pb.Code.OK, pb.Code.OK)
    # The official tests want a transaction_id for what is in no transaction, too.
    assert (entry.message_id, entry.transaction_id, entry.offset) == (own, own, 0)
    assert entry.recall_handle == ""
    (row,) = rows(broker, "t")
    assert row["body"] == b"body"
    assert (row["message_id"], row["tag"], row["keys"]) == (own, "blue", ["a", "b"])
    assert (row["born_at_ms"], dict(row["properties"])) == (5_000, {"x": "y"})


@pytest.mark.parametrize("copies", [1, 20])
def test_keys_are_split_at_blanks(broker: Broker, client: Clients, copies: int) -> None:
    broker.create_topic("t", queues=1)
    given = [["order-1 user-2"], [], [" a  b", "c"]]

    send(client(), *(raw.message("t", keys=keys) for keys in given * copies))

    kept = [["order-1", "user-2"], [], ["a", "b", "c"]]
    assert [row["keys"] or [] for row in rows(broker, "t")] == kept * copies


def received(client: Raw, topic: str) -> Any:
    (message,) = raw.received(client("ReceiveMessage", raw.receives(topic, "g")))
    return message


def test_a_trace_context_goes_with_the_message(broker: Broker, client: Clients) -> None:
    broker.create_topic("t", queues=1)
    broker.create_group("g", max_attempts=1)
    one = client()
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    send(one, raw.message("t", trace_context=trace, user={"x": "y"}), raw.message("t"))

    traced, plain = raw.received(one("ReceiveMessage", raw.receives("t", "g")))

    assert traced.system_properties.trace_context == trace
    assert dict(traced.user_properties) == {"x": "y"}
    assert not plain.system_properties.HasField("trace_context")
    # Elsewhere it is a property, which RocketMQ has it as; and it comes back from there.
    stored = rows(broker, "t")
    assert [row["properties"] for row in stored] == [[("x", "y"), ("TRACE_CONTEXT", trace)], None]
    broker.create_topic("u", queues=1)
    on = pa.table({"body": [b"on"], "properties": [stored[0]["properties"]]}, schema=FORWARDED)
    broker.send("u", on)
    assert received(one, "u").system_properties.trace_context == trace
    # A dead letter has it, too.
    handle = traced.system_properties.receipt_handle
    assert raw.code(one("ForwardMessageToDeadLetterQueue", raw.buries("t", "g", handle=handle)))
    (dead,) = raw.received(one("ReceiveMessage", raw.receives("%DLQ%g", "burial")))
    assert dead.system_properties.trace_context == trace


def test_where_a_message_was_born_is_kept_if_it_is_wanted(open_endpoint: Open) -> None:
    broker, endpoint, _ = open_endpoint(grpc_born_hosts=True)
    broker.create_topic("t", queues=1)
    broker.create_group("g")
    with Raw(endpoint.address) as one:
        send(one, raw.message("t", user={"x": "y"}))

        message = received(one, "t")

    assert message.system_properties.born_host == "127.0.0.1"
    assert dict(message.user_properties) == {"x": "y"}
    assert dict(rows(broker, "t")[0]["properties"]) == {"x": "y", "__BORNHOST": "127.0.0.1"}


def test_a_message_without_a_born_host_has_no_such_property(
    broker: Broker, client: Clients
) -> None:
    broker.create_topic("t", queues=1)

    send(client(), raw.message("t"))

    assert rows(broker, "t")[0]["properties"] is None


@pytest.mark.parametrize("name", ["TRACE_CONTEXT", "__BORNHOST"])
def test_what_has_a_field_is_no_property_of_clients(
    broker: Broker, client: Clients, name: str
) -> None:
    broker.create_topic("t")

    answer = send(client(), raw.message("t", user={name: "x"}))

    assert raw.code(answer) == "ILLEGAL_MESSAGE_PROPERTY_KEY"


def test_a_body_in_an_unknown_encoding_is_refused(broker: Broker, client: Clients) -> None:
    broker.create_topic("t")

    answer = send(client(), raw.message("t", body_encoding=77))

    assert raw.code(answer) == "MESSAGE_CORRUPTED"


def test_a_request_has_an_entry_for_each_message(broker: Broker, client: Clients) -> None:
    broker.create_topic("t", queues=1)
    messages = [raw.message("t", str(n).encode()) for n in range(300)]

    answer = send(client(), *messages)

    ids = [message.system_properties.message_id for message in messages]
    assert [entry.message_id for entry in answer.entries] == ids
    assert sorted(entry.offset for entry in answer.entries) == list(range(300))
    assert {entry.status.code for entry in answer.entries} == {pb.Code.OK}
    assert [row["message_id"] for row in rows(broker, "t")] == ids


def test_a_request_is_stored_whole_or_not_at_all(broker: Broker, client: Clients) -> None:
    broker.create_topic("t", queues=1)

    answer = send(client(), raw.message("t"), raw.message("t", b""))

    assert raw.code(answer) == "MESSAGE_BODY_EMPTY"
    assert len(answer.entries) == 0
    assert rows(broker, "t") == []


def test_the_broker_chooses_the_queue(broker: Broker, client: Clients) -> None:
    # Node takes the id of a queue for that of a broker: all that it sends is for queue 0.
    broker.create_topic("f", type="fifo", queues=4)
    groups = [f"group-{n}" for n in range(16)]
    one = client()

    for group in groups * 2:
        assert raw.code(
            send(one, raw.message("f", kind="FIFO", message_group=group, queue_id=0))
        ) == ("OK")

    queues: dict[str, set[int]] = {}
    for row in rows(broker, "f"):
        queues.setdefault(row["message_group"], set()).add(row["queue_id"])
    assert {len(own) for own in queues.values()} == {1}
    assert len(set.union(*queues.values())) > 1


def test_a_delayed_message_can_be_called_back(
    broker: Broker, client: Clients, clock: ManualClock
) -> None:
    broker.create_topic("d", type="delay", queues=1)
    one = client()
    due = clock.now_ms() + 60_000
    message = raw.message("d", kind="DELAY", delivery_timestamp_ms=due)
    (entry,) = send(one, message).entries
    assert entry.recall_handle

    recalled = one("RecallMessage", raw.recalls("d", entry.recall_handle))

    assert raw.code(recalled) == "OK"
    assert recalled.message_id == message.system_properties.message_id
    assert raw.code(one("RecallMessage", raw.recalls("d", entry.recall_handle))) == "NOT_FOUND"
    clock.advance(60_000)
    broker.deliver_scheduled()
    assert rows(broker, "d") == []


def test_of_a_request_only_what_waits_has_a_handle(
    broker: Broker, client: Clients, clock: ManualClock
) -> None:
    broker.create_topic("m", type="mixed", queues=1)
    due = clock.now_ms() + 60_000

    answer = send(
        client(), raw.message("m"), raw.message("m", kind="DELAY", delivery_timestamp_ms=due)
    )

    assert [bool(entry.recall_handle) for entry in answer.entries] == [False, True]


def test_priorities_choose_queues(broker: Broker, client: Clients) -> None:
    broker.create_topic("p", type="priority", queues=4)
    one = client()

    for priority in (0, 3, 9):
        message = raw.message("p", str(priority).encode(), kind="PRIORITY", priority=priority)
        assert raw.code(send(one, message)) == "OK"

    queues = {row["body"]: row["queue_id"] for row in rows(broker, "p")}
    assert queues == {b"0": 0, b"3": 3, b"9": 3}


def test_packed_bodies_are_stored_unpacked(broker: Broker, client: Clients) -> None:
    broker.create_topic("t", queues=1)
    one = client()
    packed = gzip.compress(b"plain" * 1000)

    good = send(one, raw.message("t", packed, body_encoding=pb.Encoding.GZIP))
    bad = send(one, raw.message("t", b"plain", body_encoding=pb.Encoding.GZIP))

    assert (raw.code(good), raw.code(bad)) == ("OK", "MESSAGE_CORRUPTED")
    assert [row["body"] for row in rows(broker, "t")] == [b"plain" * 1000]


def test_namespaces_keep_topics_apart(broker: Broker, client: Clients) -> None:
    for name in ("t", "ns%t"):
        broker.create_topic(name, queues=1)
    inside = raw.message("t", b"field")
    inside.topic.resource_namespace = "ns"

    send(client(), raw.message("t", b"plain"))
    send(client(), inside)
    send(client(namespace="ns"), raw.message("t", b"header"))

    assert [row["body"] for row in rows(broker, "t")] == [b"plain"]
    assert [row["body"] for row in rows(broker, "ns%t")] == [b"field", b"header"]


@pytest.mark.parametrize(
    ("topic", "status"),
    [
        ("", "ILLEGAL_TOPIC"),
        ("nowhere", "TOPIC_NOT_FOUND"),
        ("SCHEDULE_TOPIC_XXXX", "ILLEGAL_TOPIC"),
        ("%DLQ%g", "ILLEGAL_TOPIC"),
    ],
)
def test_there_are_topics_that_take_nothing(
    broker: Broker, client: Clients, topic: str, status: str
) -> None:
    broker.create_group("g")

    assert raw.code(send(client(), raw.message(topic))) == status


def test_a_request_is_for_one_topic(broker: Broker, client: Clients) -> None:
    for name in ("a", "b"):
        broker.create_topic(name)

    assert raw.code(send(client(), raw.message("a"), raw.message("b"))) == "MESSAGE_CORRUPTED"
    assert raw.code(send(client())) == "MESSAGE_CORRUPTED"
    assert rows(broker, "a") == []


def test_a_repetition_is_answered_as_the_first(broker: Broker, client: Clients) -> None:
    broker.create_topic("t", queues=1, deduplicate="message_id")
    one, message = client(), raw.message("t")

    first, second = send(one, message), send(one, message)

    assert first.entries == second.entries
    assert len(rows(broker, "t")) == 1


def test_the_repetition_of_a_key_has_the_id_of_the_first(broker: Broker, client: Clients) -> None:
    broker.create_topic("t", queues=1, deduplicate="key")
    one = client()
    send(one, raw.message("t", keys=["k"], message_id="first"))

    (entry,) = send(one, raw.message("t", keys=["k"], message_id="second")).entries

    assert (entry.message_id, entry.offset) == ("first", 0)
