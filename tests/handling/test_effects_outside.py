"""Handlers with effects outside: of messages that are marked, no call is made again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.window import run_window
from rmq_pipeline.handling.group_walk import Rules, walk
from rmq_pipeline.handling.handler import RESULT, Outcome
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.idempotency import SEEN_BEFORE
from rmq_pipeline.settings import Settings
from tests.handling.test_group_walk import bodies, exceptions, messages

TOPIC, GROUP = "payments", "charges"
BODY = pa.schema([("body", pa.binary())])


class Bank:
    """Charges each message; one of body ``late`` not the first time."""

    def __init__(self, late: bytes) -> None:
        self.charged: Counter[bytes] = Counter()
        self.calls: list[int] = []
        self._late: bytes | None = late

    def charge(self, given: pa.Table, _: pa.Table) -> Outcome:
        """As in docs/idempotency.md."""
        self.calls.append(given.num_rows)
        failed: list[dict[str, Any]] = []
        for row in given.filter(pc.invert(given["seen_before"])).to_pylist():
            if row["body"] == self._late:
                self._late = None
                failed.append({**row, "outcome": "retry", "reason": "busy"})
            else:
                self.charged[row["body"]] += 1
        picked = [{name: row.get(name) for name in RESULT.names} for row in failed]
        return Outcome(results=pa.Table.from_pylist(picked, schema=RESULT))

    def charge_and_keep(self, given: pa.Table, state: pa.Table) -> Outcome:
        """With a row and a published message for each."""
        done = self.charge(given, state)
        body = given.select(["body"])
        return Outcome(rows=body, publish={"onward": body}, results=done.results)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    settings = Settings(reserve_bytes=1 << 20)
    with Broker.open(tmp_path / "home", upkeep="none", settings=settings) as broker:
        broker.create_topic(TOPIC, type="fifo", queues=1)
        yield broker


@pytest.mark.parametrize("ordered", [True, False])
def test_every_key_is_charged_once_where_one_message_of_ten_is_retried(
    broker: Broker, *, ordered: bool
) -> None:
    order: Any = "message_group" if ordered else None
    broker.create_group(GROUP, order=order or "none", backoff_ms=[1])
    sent = [b"%d" % i for i in range(10)]
    ids = [f"pay-{i}" for i in range(10)]
    broker.send(TOPIC, pa.table({"body": sent, "message_id": ids, "message_group": ["a"] * 10}))
    bank = Bank(late=b"7")
    spec = ConsumerSpec(
        name=GROUP,
        topic=TOPIC,
        group=GROUP,
        handler=bank.charge,
        order_by=order,
        idempotency_key="message_id",
    )

    report = run_window(spec, broker, owner="test", idle_s=0.5, parallelism=1)

    assert bank.charged == Counter(sent)
    assert (report.acked, report.retried) == (10, 1)
    assert report.messages == 11 + report.released
    assert bank.calls == ([1] * 11 if ordered else [10, 1])


def marked(*given: tuple[str | None, str]) -> pa.Table:
    """Messages whose keys are new."""
    return messages(*given).append_column(SEEN_BEFORE, pa.array([False] * len(given)))


def test_a_call_that_gave_nothing_but_results_stands() -> None:
    bank = Bank(late=b"1")

    walked = walk(
        marked((None, "0"), (None, "1"), (None, "2")), None, rules=Rules(bank.charge, ordered=False)
    )

    assert bank.calls == [3]
    assert exceptions(walked) == [(1, "retry", None, "busy", None)]


@pytest.mark.parametrize("sink", [BODY, None])
@pytest.mark.parametrize("publishes", [{"onward": "normal"}, {}])
def test_where_more_comes_of_a_call_it_has_one_message(
    sink: pa.Schema | None, publishes: dict[str, str]
) -> None:
    bank = Bank(late=b"1")

    def handler(given: pa.Table, state: pa.Table) -> Outcome:
        done = bank.charge_and_keep(given, state)
        return Outcome(
            rows=done.rows if sink is not None else None,
            publish=done.publish if publishes else None,
            results=done.results,
        )

    these = Rules(handler, ordered=False, sink_schema=sink, publishes=publishes)
    walked = walk(marked((None, "0"), (None, "1"), (None, "2")), None, rules=these)

    counts = ["0", "2"]
    assert bank.calls == ([1, 1, 1] if sink is not None or publishes else [3])
    assert bank.charged == Counter([b"0", b"2"])
    assert bodies(walked) == (counts if sink is not None else [])
    onward = walked.publish["onward"]["body"].to_pylist() if publishes else []
    assert onward == ([each.encode() for each in counts] if publishes else [])
    assert exceptions(walked) == [(1, "retry", None, "busy", None)]


def test_with_order_what_follows_a_failure_is_not_called() -> None:
    bank = Bank(late=b"1")
    given = marked(("a", "0"), ("a", "1"), ("a", "2"), ("b", "3"))

    walked = walk(given, None, rules=Rules(bank.charge))

    assert bank.calls == [1, 1, 1]
    assert bank.charged == Counter([b"0", b"3"])
    assert exceptions(walked) == [
        (1, "retry", None, "busy", None),
        (2, "release", None, None, None),
    ]
