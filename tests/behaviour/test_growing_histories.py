"""Random histories of a fifo topic that grows: no message group is ever overtaken."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rmq_pipeline import errors
from tests.behaviour.conftest import Endpoint
from tests.behaviour.reopening import reopened_from_the_log
from tests.histories import histories

GROUPS = [f"g{i}" for i in range(8)]
STEPS = st.one_of(
    st.tuples(st.just("send"), st.lists(st.sampled_from(GROUPS), min_size=1, max_size=12)),
    st.tuples(st.just("grow"), st.integers(1, 4)),
    st.tuples(st.just("receive"), st.integers(1, 9)),
    st.tuples(st.just("ack"), st.floats(0, 1)),
    st.tuples(st.just("fail"), st.floats(0, 1)),
    st.tuples(st.just("advance"), st.sampled_from([500, 1_000, 5_000])),
    st.tuples(st.just("reopen"), st.booleans()),
)


class History:
    """Steps on a topic that grows, each receive checked against what must come next."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.queues = 1
        self.sent = 0
        #: Numbers of each message group that the consumer group has not acknowledged.
        self.open: dict[str, list[int]] = defaultdict(list)
        self.leased: list[pa.Table] = []
        endpoint.broker.create_topic("t", type="fifo", queues=1)
        endpoint.broker.create_group(
            "g", order="message_group", max_attempts=1_000, backoff_ms=[700]
        )

    def send(self, groups: list[str]) -> None:
        bodies = [b"%d" % (self.sent + i) for i in range(len(groups))]
        self.endpoint.broker.send("t", pa.table({"body": bodies, "message_group": groups}))
        for i, one in enumerate(groups):
            self.open[one].append(self.sent + i)
        self.sent += len(groups)

    def grow(self, more: int) -> None:
        self.queues = min(32, self.queues + more)
        self.endpoint.broker.alter_topic("t", queues=self.queues)

    def receive(self, limit: int) -> int:
        got = self.endpoint.broker.receive("g", "t", limit=limit, invisible_duration_ms=3_000)
        for one in set(got["message_group"].to_pylist()):
            rows = got.to_pylist()
            mine = [int(row["body"]) for row in rows if row["message_group"] == one]
            assert mine == self.open[one][: len(mine)], one
        if got.num_rows:
            self.leased.append(got)
        return int(got.num_rows)

    def ack(self, which: float) -> None:
        for row in self._some(which):
            try:
                self.endpoint.broker.ack([row["receipt_handle"]])
            except errors.ReceiptHandleError:
                continue
            self.open[row["message_group"]].remove(int(row["body"]))

    def fail(self, which: float) -> None:
        for row in self._some(which)[:1]:
            outcome = {"receipt_handle": [row["receipt_handle"]], "outcome": ["retry"]}
            try:
                self.endpoint.broker.settle("g", pa.table(outcome))
            except errors.ReceiptHandleError:
                continue

    def _some(self, which: float) -> list[dict[str, Any]]:
        if not self.leased:
            return []
        got = self.leased.pop(int(which * (len(self.leased) - 1)))
        return list(got.to_pylist())

    def advance(self, milliseconds: int) -> None:
        self.endpoint.advance(milliseconds)

    def reopen(self, from_the_log: bool) -> None:
        if from_the_log:
            reopened_from_the_log(self.endpoint)
        else:
            self.endpoint.reopen()

    def finish(self) -> None:
        """Everything comes in the end."""
        for _ in range(500):
            if not any(self.open.values()):
                return
            self.advance(3_000)
            while self.receive(100):
                self.ack(1.0)
        raise AssertionError(dict(self.open))


@histories(20)
@given(steps=st.lists(STEPS, max_size=40))
def test_no_history_with_growths_breaks_the_order_of_a_group(
    steps: list[tuple[str, Any]],
) -> None:
    with TemporaryDirectory() as folder:
        endpoint = Endpoint("in_process", Path(folder) / "home")
        try:
            history = History(endpoint)
            for name, argument in steps:
                getattr(history, name)(argument)
            history.finish()
        finally:
            endpoint.end()
