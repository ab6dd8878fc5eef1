"""settle is one step: outcomes, published messages, sink files and keyed state, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors, schema

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

MINUTE = 60_000


@pytest.fixture
def source(topic: Make) -> str:
    return str(topic(name="source", type="fifo", queues=2))


@pytest.fixture
def onward(topic: Make) -> str:
    return str(topic(name="onward", queues=1))


@pytest.fixture
def readers(group: Make) -> str:
    return str(group(name="readers", order="message_group"))


def totals(**by_key: int) -> pa.Table:
    return pa.table({"message_group": list(by_key), "total": pa.array(by_key.values(), pa.int64())})


def state_of(endpoint: Endpoint, **which: Any) -> dict[str, int] | None:
    found = endpoint.broker.keyed_state("readers", "source", **which)
    if found is None:
        return None
    return {row["message_group"]: row["total"] for row in found.to_pylist()}


def files(*names: str) -> pa.Table:
    n = len(names)
    columns = [list(names), [10] * n, [1_000] * n, ["hour=1"] * n]
    return pa.table(columns, names=schema.SINK_FILE.names[:4])


def open_window(
    endpoint: Endpoint, owner: str = "run-1", *, takeover: bool = False
) -> tuple[str, int]:
    opened = endpoint.broker.open_window(
        "consumer/readers", owner=owner, duration_ms=10 * MINUTE, takeover=takeover
    )
    return "consumer/readers", opened["epoch"]


def test_a_settle_does_everything_it_names(
    endpoint: Endpoint, source: str, onward: str, readers: str, messages: Make, outcomes: Make
) -> None:
    endpoint.broker.send(source, messages(4, groups=["a", "b", "c", "d"]))
    window = open_window(endpoint)
    got = endpoint.broker.receive(readers, source, window=window)
    how = {"a": "ack", "b": "retry", "c": "dead_letter", "d": "ack"}

    answer = endpoint.broker.settle(
        readers,
        outcomes(got, [how[g] for g in got["message_group"].to_pylist()], reason="r"),
        settle_id="s-1",
        window=window,
        publish={onward: messages(3, start=10)},
        sink_files=files("hour=1/x.parquet"),
        state=totals(a=1, d=4),
        topic=source,
    )

    counts = {"acked": 2, "retried": 1, "dead_lettered": 1, "published": 3}
    assert answer == {**counts, "sink_version": 1}
    assert endpoint.bodies(onward) == [b"10", b"11", b"12"]
    assert endpoint.bodies("%DLQ%readers") == [b"2"]
    assert state_of(endpoint) == {"a": 1, "d": 4}
    assert endpoint.broker.sink_files(readers)["path"].to_pylist() == ["hour=1/x.parquet"]
    endpoint.advance(10_000)
    assert endpoint.broker.receive(readers, source)["body"].to_pylist() == [b"1"]


def refusals() -> dict[str, Any]:
    """What makes a settle wrong: changes of its arguments, and the error."""
    return {
        "an old epoch": ({"window": ("consumer/readers", 0)}, errors.FencedError),
        "a message onward that is empty": (
            {"publish": {"onward": pa.table({"body": [b"fine", b""]})}},
            errors.MessageBodyEmptyError,
        ),
        "an unknown topic onward": (
            {"publish": {"nowhere": pa.table({"body": [b"fine"]})}},
            errors.TopicNotFoundError,
        ),
        "a message of the wrong type": (
            {"publish": {"source": pa.table({"body": [b"no group"]})}},
            errors.RequestError,
        ),
        "one topic onward of two is wrong": (
            {
                "publish": {
                    "onward": pa.table({"body": [b"fine"]}),
                    "nowhere": pa.table({"body": [b"fine"]}),
                }
            },
            errors.TopicNotFoundError,
        ),
        "state without its key": (
            {"state": pa.table({"total": [1]})},
            errors.TableSchemaError,
        ),
        "a sink file without its path": (
            {"sink_files": pa.table({"rows": [1]})},
            errors.TableSchemaError,
        ),
        "state of an unknown topic": ({"topic": "nowhere"}, errors.TopicNotFoundError),
    }


@pytest.mark.every_endpoint
@pytest.mark.parametrize("case", refusals())
def test_a_settle_with_one_wrong_part_changes_nothing(
    endpoint: Endpoint,
    source: str,
    onward: str,
    readers: str,
    messages: Make,
    outcomes: Make,
    case: str,
) -> None:
    endpoint.broker.send(source, messages(2, groups=["a", "b"]))
    window = open_window(endpoint)
    got = endpoint.broker.receive(readers, source, window=window)
    right: dict[str, Any] = {
        "settle_id": "s-1",
        "window": window,
        "publish": {onward: messages(3)},
        "sink_files": files("hour=1/x.parquet"),
        "state": totals(a=1),
        "topic": source,
    }
    change, error = refusals()[case]

    with pytest.raises(error):
        endpoint.broker.settle(readers, outcomes(got, "ack"), **{**right, **change})

    assert_nothing_settled(endpoint, onward)
    answer = endpoint.broker.settle(readers, outcomes(got, "ack"), **right)
    assert answer["acked"] == 2


def assert_nothing_settled(endpoint: Endpoint, onward: str) -> None:
    assert endpoint.stored(onward) == 0
    assert not state_of(endpoint)
    assert endpoint.broker.sink_files("readers").num_rows == 0


def test_one_ended_receipt_refuses_the_whole_settle(
    endpoint: Endpoint, source: str, onward: str, readers: str, messages: Make, outcomes: Make
) -> None:
    endpoint.broker.send(source, messages(2, groups=["a", "b"]))
    short = endpoint.broker.receive(readers, source, limit=1, invisible_duration_ms=1_000)
    long = endpoint.broker.receive(readers, source, invisible_duration_ms=MINUTE)
    endpoint.advance(1_000)

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.settle(
            readers,
            outcomes(pa.concat_tables([long, short]), "ack"),
            publish={onward: messages(3)},
            sink_files=files("hour=1/x.parquet"),
            state=totals(a=1),
            topic=source,
        )

    assert_nothing_settled(endpoint, onward)
    assert endpoint.broker.receive(readers, source)["delivery_attempt"].to_pylist() == [2]
    endpoint.broker.ack(long)


def test_two_outcomes_of_one_receipt_are_refused(
    endpoint: Endpoint, source: str, readers: str, messages: Make, outcomes: Make
) -> None:
    endpoint.broker.send(source, messages(1, groups=["a"]))
    got = endpoint.broker.receive(readers, source)

    with pytest.raises(errors.RequestError):
        endpoint.broker.settle(readers, outcomes(got.take([0, 0]), ["ack", "retry"]))

    endpoint.broker.ack(got)


def test_an_outcome_that_is_none_is_refused(
    endpoint: Endpoint, source: str, readers: str, messages: Make, outcomes: Make
) -> None:
    endpoint.broker.send(source, messages(2, groups=["a", "b"]))
    got = endpoint.broker.receive(readers, source)

    with pytest.raises(errors.RequestError, match="maybe"):
        endpoint.broker.settle(readers, outcomes(got, ["ack", "maybe"]))

    endpoint.broker.ack(got)


def test_a_repeated_settle_is_answered_the_same_and_does_nothing(
    endpoint: Endpoint, source: str, onward: str, readers: str, messages: Make, outcomes: Make
) -> None:
    endpoint.broker.send(source, messages(2, groups=["a", "b"]))
    window = open_window(endpoint)
    got = endpoint.broker.receive(readers, source, window=window)

    answers = [
        endpoint.broker.settle(
            readers,
            outcomes(got, "ack"),
            settle_id="s-1",
            window=window,
            publish={onward: messages(3)},
            sink_files=files("hour=1/x.parquet"),
            state=totals(a=1),
            topic=source,
        )
        for _ in range(3)
    ]

    counts = {"acked": 2, "retried": 0, "dead_lettered": 0, "published": 3}
    assert answers == [{**counts, "sink_version": 1}] * 3
    assert endpoint.stored(onward) == 3
    assert endpoint.broker.sink_files(readers).num_rows == 1


def test_another_settle_id_is_another_settle(
    endpoint: Endpoint, source: str, onward: str, readers: str, messages: Make, outcomes: Make
) -> None:
    endpoint.broker.send(source, messages(2, groups=["a", "b"]))
    window = open_window(endpoint)
    got = endpoint.broker.receive(readers, source, window=window)
    for row in (0, 1):
        endpoint.broker.settle(
            readers,
            outcomes(got.take([row]), "ack"),
            settle_id=f"s-{row}",
            window=window,
            publish={onward: messages(1, start=row)},
        )

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.settle(readers, outcomes(got, "ack"), settle_id="s-2", window=window)

    assert endpoint.bodies(onward) == [b"0", b"1"]


def test_a_settle_id_means_the_settle_of_its_own_window(
    endpoint: Endpoint, source: str, onward: str, readers: str, messages: Make, outcomes: Make
) -> None:
    for start, owner in enumerate(("run-1", "run-2")):
        endpoint.broker.send(source, messages(1, start=start, groups=["a"]))
        window = open_window(endpoint, owner, takeover=True)
        got = endpoint.broker.receive(readers, source, window=window)
        endpoint.broker.settle(
            readers,
            outcomes(got, "ack"),
            settle_id="1",
            window=window,
            publish={onward: messages(1, start=start)},
        )

    assert endpoint.bodies(onward) == [b"0", b"1"]
    assert endpoint.broker.receive(readers, source).num_rows == 0


def test_a_settle_may_only_publish(
    endpoint: Endpoint, onward: str, readers: str, messages: Make
) -> None:
    nothing = pa.table({"receipt_handle": [], "outcome": []}).cast(
        pa.schema([("receipt_handle", pa.string()), ("outcome", pa.string())])
    )

    answer = endpoint.broker.settle(readers, nothing, publish={onward: messages(2)})

    assert answer == {"acked": 0, "retried": 0, "dead_lettered": 0, "published": 2}
    assert endpoint.stored(onward) == 2


def test_what_a_settle_publishes_may_be_delayed(
    endpoint: Endpoint,
    source: str,
    topic: Make,
    group: Make,
    readers: str,
    messages: Make,
    outcomes: Make,
) -> None:
    later, others = topic(type="delay", queues=1), group()
    endpoint.broker.send(source, messages(1, groups=["a"]))
    got = endpoint.broker.receive(readers, source)

    endpoint.broker.settle(
        readers, outcomes(got, "ack"), publish={later: messages(1, delay_level=1)}
    )

    assert endpoint.broker.receive(others, later).num_rows == 0
    endpoint.advance(1_000)
    endpoint.broker.deliver_scheduled()
    assert endpoint.drain(later, others) == [b"0"]


def test_what_a_settle_publishes_wakes_who_waits_for_it(
    endpoint: Endpoint,
    source: str,
    onward: str,
    group: Make,
    readers: str,
    messages: Make,
    outcomes: Make,
) -> None:
    others = group()
    endpoint.broker.send(source, messages(1, groups=["a"]))
    got = endpoint.broker.receive(readers, source)
    poll = endpoint.begin(lambda: endpoint.broker.receive(others, onward, wait_ms=30_000))

    endpoint.broker.settle(readers, outcomes(got, "ack"), publish={onward: messages(1, start=5)})

    assert poll.result(60)["body"].to_pylist() == [b"5"]


def test_a_settle_of_an_older_epoch_is_fenced(
    endpoint: Endpoint, source: str, onward: str, readers: str, messages: Make, outcomes: Make
) -> None:
    endpoint.broker.send(source, messages(1, groups=["a"]))
    old = open_window(endpoint, "run-1")
    got = endpoint.broker.receive(readers, source, window=old)
    new = open_window(endpoint, "run-2", takeover=True)

    with pytest.raises(errors.FencedError):
        endpoint.broker.settle(
            readers,
            outcomes(got, "ack"),
            window=old,
            publish={onward: messages(1)},
            sink_files=files("x.parquet"),
            state=totals(a=1),
            topic=source,
        )

    assert_nothing_settled(endpoint, onward)
    again = endpoint.broker.receive(readers, source, window=new)
    assert again["delivery_attempt"].to_pylist() == [1]
