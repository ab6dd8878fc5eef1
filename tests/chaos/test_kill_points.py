"""Killed at any step of a commit or of dispatch, the broker has what it answered, and is whole."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.archive import manifest
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.storage import place as root
from tests.broker import archive_home
from tests.chaos.victim import SETTINGS
from tests.chaos.zygote import Zygote

pytestmark = pytest.mark.chaos
ROOT = Path(__file__).parents[2]

#: Each step of a frame and of a dispatch transaction, and which time it comes.
KILLS = [
    ("staged", 1),
    ("staged", 200),
    # A frame is decided, and the one before it not on disk yet.
    ("staged_ahead", 1),
    ("staged_ahead", 8),
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
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            if not line.endswith("\n"):  # the kill came while it was written down
                break
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
    while (got := broker.receive(group, topic, limit=1000)).num_rows:
        delivered.update(got["message_id"].to_pylist())
        for row in got.filter(pa.compute.is_valid(got["message_group"])).to_pylist():
            number = [int(part) for part in row["body"].split(b".")]
            assert last.get(row["message_group"], []) < number
            last[row["message_group"]] = number
        broker.ack(got)
    return delivered


#: Each step of a compaction and of an expiry, and which time it comes.
ARCHIVE_KILLS = [
    ("merged", 1),
    ("replaced", 1),
    ("replaced_hidden", 2),
    ("replaced_shown", 1),
    ("replaced_listed", 2),
    ("expired", 1),
    ("expired_hidden", 1),
    ("expired_unlisted", 1),
    ("dead_lettered", 1),
]


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pa.Table]:
    """A home with many small segments, and its messages."""
    home = tmp_path_factory.mktemp("archived") / "home"
    with archive_home.opened(home) as broker:
        archive_home.fill(broker)
        return home, archive_home.everything(broker)


@pytest.mark.parametrize(("step", "times"), ARCHIVE_KILLS)
def test_a_kill_while_segments_are_replaced_or_expire_leaves_each_message_once(
    archived: tuple[Path, pa.Table], tmp_path: Path, step: str, times: int
) -> None:
    full, before = archived
    home = tmp_path / "home"
    # Links and all.
    subprocess.run(["cp", "-a", str(full), str(home)], check=True)

    child = [sys.executable, "-m", "tests.broker.archive_home", str(home), step, str(times)]
    died = subprocess.run(child, cwd=ROOT, capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr

    # No repair has run yet: the manifest is whole.
    for offsets in archive_home.offsets_in(archive_home.by_manifest(home)).values():
        assert offsets == list(range(offsets[0], 240))
    with archive_home.opened(home) as broker:
        assert_archive(broker, home, before=before)
        broker.compact()
        broker.alter_topic("t", retention_bytes=archive_home.KEPT_BYTES)
        broker.expire()
        assert_archive(broker, home, before=before)
        assert archive_home.kept(broker)[0][0] > 0


def assert_archive(broker: Broker, home: Path, *, before: pa.Table) -> None:
    """Broker, manifest and globs have the same messages, and nothing else lies there."""
    broker.seal()
    kept = archive_home.kept(broker)
    starts = pa.array([kept[queue_id][0] for queue_id in before["queue_id"].to_pylist()])
    left = before.filter(pa.compute.greater_equal(before["queue_offset"], starts))
    assert archive_home.everything(broker).equals(left.combine_chunks())
    listed, shown = archive_home.by_manifest(home), archive_home.by_glob(home)
    assert archive_home.offsets_in(listed) == archive_home.offsets_in(shown) == kept
    folder = shown[0].parents[1]
    archive = root.opened(home / "topics")
    replaced = manifest.read(archive, f"t/{folder.name}").replaced
    hidden = {path.name for path in folder.glob(".segments/*/*.kept")}
    wanted = {path.name for path in listed} | {Path(each["path"]).name for each in replaced}
    assert hidden <= wanted
    assert {path.name for path in listed} <= hidden
