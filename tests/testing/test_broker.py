"""What a TestBroker refuses, with a sentence that says what to do, and the bounds of a drain."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.errors import ConflictError, RequestError, RocketMQError, TopicNotFoundError
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.orchestration.consumer import python_consumer
from rmq_pipeline.orchestration.declarations import topic
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.settings import Settings
from rmq_pipeline.testing import TestBroker
from rmq_pipeline.testing.draining import EXTRA_DELIVERIES
from tests.testing import shop

LOOPS = topic("loops", queues=1)


@python_consumer(topic=LOOPS, group="echo", publishes=[LOOPS])
def echo(messages: pa.Table, state: pa.Table) -> Outcome:  # noqa: ARG001
    """Publish each message to its own topic."""
    return Outcome(publish={"loops": messages.select(["body"])})


@pytest.mark.parametrize(
    ("by", "ms"),
    [
        ("250ms", 250),
        ("10s", 10_000),
        ("1.5s", 1_500),
        ("5m", 300_000),
        (" 1 h ", 3_600_000),
        ("2d", 172_800_000),
        (timedelta(minutes=1), 60_000),
        (7, 7),
        (0, 0),
    ],
)
def test_time_advances_by_a_duration(rmq: TestBroker, by: Any, ms: int) -> None:
    before_ms, before = rmq.clock.now_ms(), rmq.clock.now()

    rmq.advance(by)

    assert rmq.clock.now_ms() - before_ms == ms
    assert rmq.clock.now() - before == timedelta(milliseconds=ms)


@pytest.mark.parametrize("by", ["10", "ten seconds", "", None, 1.5, True, "10 S"])
def test_what_is_no_duration_is_refused(rmq: TestBroker, by: Any) -> None:
    with pytest.raises(RequestError, match=r'is not a duration. Give "250ms", "10s"'):
        rmq.advance(by)


@pytest.mark.parametrize("by", [-1, timedelta(seconds=-1)])
def test_time_never_goes_back(rmq: TestBroker, by: Any) -> None:
    with pytest.raises(RequestError, match="the broker's time never goes back"):
        rmq.advance(by)


def test_each_message_is_delivered_at_its_own_time(rmq: TestBroker) -> None:
    rmq.publish(shop.REMINDERS, ["late"], delay="20m")
    rmq.publish(shop.REMINDERS, ["early"], delay="10m")

    rmq.advance("1h")

    messages = rmq.messages(shop.REMINDERS)
    assert messages["body"].to_pylist() == [b"early", b"late"]
    assert messages["stored_at_ms"].equals(messages["deliver_at_ms"])


def test_a_thousand_delivery_times_cost_few_stops(rmq: TestBroker) -> None:
    now_ms = rmq.clock.now_ms()
    times = [{"body": "x", "deliver_at_ms": now_ms + 1 + n} for n in range(5_000)]
    rmq.publish(shop.REMINDERS, times)

    rmq.advance("1h")

    assert rmq.messages(shop.REMINDERS).num_rows == 5_000


def test_a_half_message_is_given_up_as_without_a_checker(rmq: TestBroker) -> None:
    rmq.prepare(shop.PAYMENTS, ["commit 5"])

    rmq.advance("1h")

    assert rmq.check(shop.payment_checker)["commit"] == 0
    assert rmq.sql("FROM half").num_rows == 0


@pytest.mark.parametrize(
    ("messages", "bodies"),
    [
        ([b"a", "b", {"c": 1}], [b"a", b"b", b'{"c": 1}']),
        ([{"body": {"body": 1}}], [b'{"body": 1}']),
        ([{"tag": "a tag", "price": 3}], [b'{"tag": "a tag", "price": 3}']),
        (pa.table({"body": ["a", "b"]}), [b"a", b"b"]),
        ([], []),
        (("a",), [b"a"]),
    ],
)
def test_messages_are_bodies_or_columns(
    rmq: TestBroker, messages: Any, bodies: list[bytes]
) -> None:
    sent = rmq.publish(shop.OFFERS, messages)

    assert sent.num_rows == len(bodies)
    assert rmq.messages(shop.OFFERS)["body"].to_pylist() == bodies


def test_columns_of_a_message_arrive(rmq: TestBroker) -> None:
    columns = {"tag": "sale", "keys": ["a", "b"], "properties": {"price": "5"}}

    rmq.publish(shop.OFFERS, [{"body": "1", **columns}, "2"])

    first, second = rmq.messages(shop.OFFERS).to_pylist()
    assert (first["tag"], first["keys"]) == ("sale", ["a", "b"])
    assert dict(first["properties"]) == {"price": "5"}
    assert second["tag"] is None


@pytest.mark.parametrize("columns", [{}, {"deliver_at_ms": [None, 1_700_000_000_001]}])
def test_a_delay_applies_to_messages_without_a_time(
    rmq: TestBroker, columns: dict[str, list[int | None]]
) -> None:
    rmq.publish(shop.REMINDERS, pa.table({"body": ["a", "b"], **columns}), delay="1m")

    rmq.advance("1ms")
    soon = rmq.messages(shop.REMINDERS).num_rows
    rmq.advance("59999ms")

    assert soon == len(columns)
    assert rmq.messages(shop.REMINDERS).num_rows == 2


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("paid", "The messages are a str, not a list. Give a list, also for one message"),
        ({"body": "paid"}, "The messages are a dict, not a list."),
        (7, "The messages are a int, not a list."),
        (["a", 7], "Message 1 has the body 7. Give bytes, a text, a dict"),
        ([None], "Message 0 has the body None."),
        ([{"body": 7}], "Message 0 has the body 7."),
        ([{"when": object()}], "The body of message 0 cannot be JSON"),
        ([{"body": "a", "group": "b"}], "and group is no such column. Columns are body, tag"),
        ([{"body": "a", "keys": 7}], "Column keys of the messages is not list<item: string>"),
    ],
)
def test_what_is_no_message_is_refused(rmq: TestBroker, messages: Any, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        rmq.publish(shop.OFFERS, messages)

    assert said in str(refused.value)


def plain(messages: pa.Table, state: pa.Table) -> Outcome:  # noqa: ARG001
    """Lack a decorator."""
    return Outcome()


USES: dict[str, tuple[Callable[[TestBroker], Any], type[RocketMQError], str]] = {
    "function": (
        lambda rmq: rmq.drain(plain),  # type: ignore[arg-type]
        RequestError,
        "is no consumer. Give a function that is decorated with @python_consumer",
    ),
    "pipeline": (
        lambda rmq: rmq.drain(shop.PIPELINE),  # type: ignore[arg-type]
        RequestError,
        "Give one of the pipeline's consumers: billing, dunning",
    ),
    "checker": (
        lambda rmq: rmq.check(shop.billing),  # type: ignore[arg-type]
        RequestError,
        "is no transaction checker. Give a function that is decorated with @transaction_checker",
    ),
    "unknown topic": (
        lambda rmq: rmq.publish("oders", ["a"]),
        TopicNotFoundError,
        "There is no topic 'oders'. Give what topic(…) returns, which creates the topic",
    ),
    "no topic": (
        lambda rmq: rmq.messages(7),  # type: ignore[arg-type]
        RequestError,
        "7 is no topic. Give what topic(…) returns, or a name.",
    ),
    "no sink": (
        lambda rmq: rmq.rows(shop.dunning),
        RequestError,
        "Consumer dunning has no sink. Declare one",
    ),
    "no pipeline": (
        lambda rmq: rmq.create(shop.ORDERS),  # type: ignore[arg-type]
        RequestError,
        "is no pipeline. Give what Pipeline(…) returns.",
    ),
    "lacking topic": (
        lambda rmq: rmq.create(Pipeline("lacking", topics=[], consumers=[shop.dunning])),
        RequestError,
        "Consumer dunning uses topic invoices, which pipeline lacking does not list. Add it",
    ),
    "lacking topic of a checker": (
        lambda rmq: rmq.create(
            Pipeline("lacking", topics=[], consumers=[], checkers=[shop.payment_checker])
        ),
        RequestError,
        "The checker of payments uses topic payments, which pipeline lacking",
    ),
}


@pytest.mark.parametrize("use", USES)
def test_a_mistake_is_told_with_its_remedy(rmq: TestBroker, use: str) -> None:
    call, kind, said = USES[use]

    with pytest.raises(kind) as refused:
        call(rmq)

    assert said in str(refused.value)


def test_a_drain_that_never_ends_is_ended(rmq: TestBroker) -> None:
    rmq.publish(LOOPS, ["a"])

    with pytest.raises(
        RequestError, match=r"echo has had .* Its handler publishes to loops"
    ) as said:
        rmq.drain(echo)

    assert said.value.remedy.endswith("allow more: rmq.drain(consumer, limit=…).")
    read = rmq.broker.describe_topic("loops")["offsets"][0]["max_offset"]
    assert EXTRA_DELIVERIES <= read <= EXTRA_DELIVERIES + 100


def test_a_limit_may_be_given(rmq: TestBroker) -> None:
    rmq.publish(LOOPS, ["a"])

    with pytest.raises(RequestError, match="4 deliveries, more than 3"):
        rmq.drain(echo, limit=3)


def test_many_messages_are_no_drain_without_end(rmq: TestBroker) -> None:
    rmq.publish(shop.INVOICES, [{"order": "a"}] * 3_000)

    assert rmq.drain(shop.dunning).acked == 3_000


def test_a_group_with_an_open_window_is_not_drained(rmq: TestBroker) -> None:
    rmq.create(shop.PIPELINE)
    rmq.broker.open_window("consumer/dunning", owner="another test", duration_ms=1_000)

    with pytest.raises(ConflictError, match="ended as yielded: another test has it"):
        rmq.drain(shop.dunning)

    rmq.advance("1s")
    assert rmq.drain(shop.dunning).delivered == 0


def test_nothing_is_there_yet(rmq: TestBroker) -> None:
    result = rmq.drain(shop.billing)

    assert (result.delivered, result.failures, result.published) == (0, (), {})
    assert result.rows.schema == rmq.rows(shop.billing).schema == shop.BILL
    assert rmq.messages(shop.ORDERS).num_rows == 0
    assert rmq.dead_letters(shop.billing).num_rows == rmq.parked(shop.packing).num_rows == 0


def test_threads_share_a_drain(rmq: TestBroker) -> None:
    rmq.publish(shop.INVOICES, [{"order": str(n)} for n in range(40)])

    result = rmq.drain(shop.ledger, parallelism=4)

    assert result.rows.num_rows == result.acked == 40


def test_failures_of_a_drain_are_told_when_it_is_printed(rmq: TestBroker) -> None:
    rmq.publish(shop.ORDERS, [{"body": {}, "message_group": "a"}])

    told = repr(rmq.drain(shop.billing))

    assert told.startswith("DrainResult(delivered=1, acked=0, retried=1,")
    assert "reason=\"KeyError: 'amount'\"" in told


class TestSettings:
    """A test may have its own settings of the broker."""

    @pytest.fixture
    def rmq_settings(self) -> Settings:
        return Settings(reserve_bytes=1 << 20, delay_levels_ms=(5,))

    def test_delay_levels(self, rmq: TestBroker) -> None:
        rmq.publish(shop.REMINDERS, [{"body": "a", "delay_level": 1}])
        rmq.advance("5ms")

        assert rmq.drain(shop.mailing).acked == 1
