"""Random histories of lite topics: each in order, only to who asked for it, none lost."""

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
from tests.behaviour.lite import Clients
from tests.behaviour.reopening import reopened_from_the_log
from tests.histories import histories

NAMES = [f"lite-{i}" for i in range(6)]
CLIENTS = ["one", "other", "third"]
SOME = st.lists(st.sampled_from(NAMES), max_size=4, unique=True)
CLIENT = st.sampled_from(CLIENTS)
STEPS = st.one_of(
    st.tuples(st.just("send"), st.lists(st.sampled_from(NAMES), min_size=1, max_size=12)),
    st.tuples(st.just("add"), CLIENT, SOME),
    st.tuples(st.just("remove"), CLIENT, SOME),
    st.tuples(st.just("replace"), CLIENT, SOME),
    st.tuples(st.just("receive"), CLIENT, st.integers(1, 9)),
    st.tuples(st.just("ack"), st.integers(0, 100)),
    st.tuples(st.just("advance"), st.sampled_from([500, 3_000])),
    st.tuples(st.just("grow"), st.integers(1, 3)),
    st.tuples(st.just("reopen"), st.booleans()),
)


class History:
    """Steps of three clients, each receive checked against what it may and must give."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        endpoint.broker.create_topic("t", type="lite", queues=1)
        endpoint.broker.create_group("g", max_attempts=1_000)
        self.clients = Clients(endpoint, "t", "g")
        self.wanted: dict[str, set[str]] = defaultdict(set)
        self.open: dict[str, list[int]] = defaultdict(list)
        self.leased: list[dict[str, Any]] = []
        self.sent = 0
        self.queues = 1

    def send(self, names: list[str]) -> None:
        bodies = [b"%d" % (self.sent + i) for i in range(len(names))]
        self.endpoint.broker.send("t", pa.table({"body": bodies, "lite_topic": names}))
        for i, name in enumerate(names):
            self.open[name].append(self.sent + i)
        self.sent += len(names)

    def add(self, client: str, names: list[str]) -> None:
        self._sync(client, "add", names, after=self.wanted[client] | set(names))

    def remove(self, client: str, names: list[str]) -> None:
        self._sync(client, "remove", names, after=self.wanted[client] - set(names))

    def replace(self, client: str, names: list[str]) -> None:
        self._sync(client, "replace", names, after=set(names))

    def _sync(self, client: str, action: str, names: list[str], *, after: set[str]) -> None:
        assert self.clients.sync(client, action, *names) == sorted(after)
        self.wanted[client] = after

    def receive(self, client: str, limit: int) -> int:
        got = self.clients.receive(client, limit=limit, invisible_duration_ms=2_000).to_pylist()
        given = defaultdict(list)
        for row in got:
            given[row["message_group"]].append(int(row["body"]))
        assert set(given) <= self.wanted[client]
        for name, numbers in given.items():
            assert numbers == self.open[name][: len(numbers)]
        self.leased += got
        return len(got)

    def ack(self, count: int) -> None:
        for row in self.leased[:count]:
            try:
                self.endpoint.broker.ack([row["receipt_handle"]])
            except errors.ReceiptHandleError:
                continue
            self.open[row["message_group"]].remove(int(row["body"]))
        del self.leased[:count]

    def advance(self, milliseconds: int) -> None:
        self.endpoint.advance(milliseconds)

    def grow(self, more: int) -> None:
        self.queues = min(16, self.queues + more)
        self.endpoint.broker.alter_topic("t", queues=self.queues)

    def reopen(self, from_the_log: bool) -> None:
        if from_the_log:
            reopened_from_the_log(self.endpoint)
        else:
            self.endpoint.reopen()

    def finish(self) -> None:
        """Whoever asks for everything gets everything that is left."""
        self.advance(2_000)
        self.replace("last", NAMES)
        while self.receive("last", 100):
            self.ack(1_000)
        assert not any(self.open.values()), dict(self.open)


@histories(20)
@given(steps=st.lists(STEPS, max_size=40))
def test_no_history_gives_a_lite_topic_to_a_stranger_or_out_of_order(
    steps: list[tuple[Any, ...]],
) -> None:
    with TemporaryDirectory() as folder:
        endpoint = Endpoint("in_process", Path(folder) / "home")
        try:
            history = History(endpoint)
            for name, *arguments in steps:
                getattr(history, name)(*arguments)
            history.finish()
        finally:
            endpoint.end()
