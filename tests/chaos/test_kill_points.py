"""Killed at any step of a commit or of dispatch, the broker has what it answered, and is whole."""

import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from tests.chaos.victim import SETTINGS
from tests.chaos.zygote import Zygote

pytestmark = pytest.mark.chaos

#: Each step of a frame and of a dispatch transaction, and which time it comes.
KILLS = [
    ("staged", 1),
    ("staged", 200),
    ("before_write", 150),
    ("half_written", 9),
    ("half_written", 170),
    ("written", 1),
    ("written", 180),
    ("before_roll", 2),
    ("rolled", 1),
    ("rolled", 3),
    ("before_dispatch", 1),
    ("before_dispatch", 30),
    ("dispatched", 1),
    ("dispatched", 30),
]


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path_factory.mktemp("zygote") / "output")
    yield zygote
    zygote.close()


@dataclass
class Facts:
    """What the killed broker had answered, and what it was asked at the end."""

    #: message_id -> topic, queue_id, queue_offset, body.
    sent: dict[str, tuple[str, int, int, bytes]] = field(default_factory=dict)
    acked: set[str] = field(default_factory=set)
    trying: set[str] = field(default_factory=set)
    state: int | None = None
    state_tried: int | None = None

    @classmethod
    def read(cls, path: Path) -> "Facts":
        facts = cls()
        for line in path.read_text().splitlines() if path.exists() else ():
            fact = json.loads(line)
            for body, message_id, *place in fact.get("rows", ()):
                facts.sent[message_id] = (fact["sent"], *place, bytes.fromhex(body))
            facts.acked.update(fact.get("acked", ()))
            facts.trying.update(fact.get("trying", ()))
            if "state" in fact:
                facts.state_tried = fact["state"]
                facts.state = fact["state"] if "acked" in fact else facts.state
        return facts


@pytest.mark.parametrize(("step", "times"), KILLS)
def test_nothing_answered_is_lost_by_a_kill(
    zygote: Zygote, tmp_path: Path, step: str, times: int
) -> None:
    home, log = tmp_path / "home", tmp_path / "facts"
    task = {"home": str(home), "facts": str(log), "step": step, "times": times}
    assert zygote.ask(reap=zygote.ask(victim=task)) == -signal.SIGKILL

    facts = Facts.read(log)
    later = ManualClock(time.time_ns() // 1_000_000 + 600_000)
    with Broker.open(home, clock=later, upkeep="none", settings=SETTINGS) as broker:
        assert_whole(broker, facts)


def assert_whole(broker: Broker, facts: Facts) -> None:
    """The broker has what it answered, and its parts agree with each other."""
    for topic, type_, queues, group in (
        ("plain", "normal", 3, "readers"),
        ("ordered", "fifo", 2, "followers"),
    ):
        broker.ensure_topic(topic, type=type_, queues=queues)
        order = "message_group" if type_ == "fifo" else "none"
        broker.ensure_group(group, order=order, max_attempts=100)
        kept = messages_of(broker, topic)
        mine = {i: place for i, place in facts.sent.items() if place[0] == topic}
        assert {i: kept[i] for i in mine} == mine
        counted = broker.sql(f"SELECT count(*) AS n FROM messages WHERE topic = '{topic}'")
        assert counted["n"].to_pylist() == [len(kept)]

        delivered = drained(broker, topic, group)

        assert not facts.acked & set(delivered)
        assert delivered == Counter(delivered.keys()), "delivered twice"
        assert kept.keys() - facts.acked - facts.trying <= delivered.keys()
    state = broker.keyed_state("followers", "ordered")
    turns = set() if state is None else set(state["turn"].to_pylist())
    assert turns <= {facts.state, facts.state_tried}
    assert len(turns) == (0 if facts.state is None and not turns else 1)
    sent = broker.send("plain", pa.table({"body": [b"it goes on"]}))
    assert sent["message_id"][0].as_py() in messages_of(broker, "plain")


def messages_of(broker: Broker, topic: str) -> dict[str, tuple[str, int, int, bytes]]:
    """message_id -> where each stored message is; offsets have no gap, ids are there once."""
    found: dict[str, tuple[str, int, int, bytes]] = {}
    for queue in broker.describe_topic(topic)["offsets"]:
        table = broker.read(topic, queue["queue_id"], offset=0, limit=100_000)
        assert table["queue_offset"].to_pylist() == list(range(queue["max_offset"]))
        for row in table.select(["message_id", "queue_id", "queue_offset", "body"]).to_pylist():
            assert row["message_id"] not in found
            found[row["message_id"]] = (topic, *list(row.values())[1:])
    return found


def drained(broker: Broker, topic: str, group: str) -> Counter[Any]:
    """What the group still gets, how often; groups of messages in order."""
    delivered: Counter[Any] = Counter()
    last: dict[str, list[int]] = {}
    while (got := broker.receive(topic, group, limit=1000)).num_rows:
        delivered.update(got["message_id"].to_pylist())
        for row in got.filter(pa.compute.is_valid(got["message_group"])).to_pylist():
            number = [int(part) for part in row["body"].split(b".")]
            assert last.get(row["message_group"], []) < number
            last[row["message_group"]] = number
        broker.ack(got)
    return delivered
