"""Messages of groups are put in the order of their queues ahead; nobody can tell from outside."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide.publish import Send, as_given, place, prepare
from rmq_pipeline.tables import columns_of

COUNT = 500


def some(seed: int, *, groups: int = 40) -> pa.Table:
    """Messages of groups in no order, some with everything that a message may have."""
    dice = np.random.default_rng(seed)
    rows = dice.integers(0, groups, COUNT).tolist()
    return pa.table(
        {
            "body": [f"body-{i}".encode() * (i % 7 + 1) for i in range(COUNT)],
            "message_group": [f"group-{group}" for group in rows],
            "tag": [None if i % 3 else f"tag-{i % 5}" for i in range(COUNT)],
            "keys": pa.array(
                [[f"key-{i}"] if i % 2 else None for i in range(COUNT)], pa.list_(pa.string())
            ),
            "properties": pa.array(
                [[("n", str(i))] if i % 4 else None for i in range(COUNT)],
                schema.SEND.field("properties").type,
            ),
        }
    )


def prepared(broker: Broker, table: pa.Table, topic: str = "ordered") -> Send:
    engine = broker.engine
    columns = columns_of(table, schema.SEND)
    return prepare(
        engine.state.topic(topic).topic, columns, ids=engine.ids, delay_max_ms=1, now_ms=5
    )


def as_placed(broker: Broker, send: Send) -> tuple[list[dict[str, Any]], pa.Table]:
    placed, sent = place(send, broker.engine.state, now_ms=6, heads={})
    rows = pa.Table.from_batches([one.batch for one in placed]).to_pylist()
    return rows, sent.table()


@pytest.fixture
def broker(broker: Broker) -> Broker:
    broker.create_topic("ordered", type="fifo", queues=8)
    return broker


@pytest.mark.parametrize("seed", range(4))
def test_what_is_in_order_ahead_is_placed_as_what_is_not(broker: Broker, seed: int) -> None:
    send = prepared(broker, some(seed))

    assert send.order is not None
    assert as_placed(broker, send) == as_placed(broker, as_given(send))


def test_the_answer_is_in_the_order_of_the_question(broker: Broker) -> None:
    table = some(9)

    sent = broker.send("ordered", table)

    for row in range(0, COUNT, 37):
        queue, offset = sent["queue_id"][row].as_py(), sent["queue_offset"][row].as_py()
        found = broker.read("ordered", queue, offset=offset, limit=1)
        assert found["message_id"][0] == sent["message_id"][row]
        assert found["body"][0] == table["body"][row]
        assert found["tag"][0].as_py() == table["tag"][row].as_py()


def test_a_group_keeps_the_order_it_was_given_in(broker: Broker) -> None:
    table = some(11)

    broker.send("ordered", table)

    read = pa.concat_tables(broker.read("ordered", q, offset=0, limit=COUNT) for q in range(8))
    for group in set(table["message_group"].to_pylist()):
        given = [r["body"] for r in table.to_pylist() if r["message_group"] == group]
        assert [r["body"] for r in read.to_pylist() if r["message_group"] == group] == given


def test_a_topic_that_grows_meanwhile_chooses_again(broker: Broker) -> None:
    send = prepared(broker, some(3))
    broker.alter_topic("ordered", queues=16)

    placed, answer = as_placed(broker, send)

    assert max(row["queue_id"] for row in placed) >= 8
    again = prepared(broker, some(3).append_column("message_id", answer["message_id"]))
    assert as_placed(broker, again)[1] == answer


def test_a_topic_that_begins_to_suppress_repetitions_meanwhile_does(broker: Broker) -> None:
    table = some(5).append_column("message_id", pa.array([f"id-{i % 250}" for i in range(COUNT)]))
    send = prepared(broker, table)
    broker.alter_topic("ordered", deduplicate="message_id")

    sent = broker.engine.submit(send).table()

    assert sent["duplicate"].to_pylist() == [False] * 250 + [True] * 250
    assert sent["message_id"].to_pylist() == table["message_id"].to_pylist()


def test_rows_in_order_are_left_where_they_are(broker: Broker) -> None:
    send = prepared(broker, some(7, groups=1))

    assert send.order is not None
    assert send.columns["body"].to_pylist() == some(7)["body"].to_pylist()
    assert as_placed(broker, send) == as_placed(broker, replace(send, order=None))
