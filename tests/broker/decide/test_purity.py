"""``decide`` changes nothing: the writer applies what a request decided, and nothing else."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import rmq_pipeline.broker
from rmq_pipeline import receipt, schema
from rmq_pipeline import transaction as transaction_ids
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.broker.decide import admin, group_offsets, schedule, segments, transaction
from rmq_pipeline.broker.decide.background import (
    CloseWindow,
    Due,
    NoteFallback,
    OpenWindow,
    RenewWindow,
)
from rmq_pipeline.broker.decide.backlog import Count, Overview
from rmq_pipeline.broker.decide.dead_letter import FindExhausted, StoreDeadLetters
from rmq_pipeline.broker.decide.deliver import BacklogWanted, Receive, Subscribe
from rmq_pipeline.broker.decide.members import (
    Begun,
    LockQueues,
    LocksOfGroup,
    SyncLiteSubscription,
    UnlockMember,
    UnlockQueues,
)
from rmq_pipeline.broker.decide.publish import Send, prepare
from rmq_pipeline.broker.decide.queue_index import (
    FillBacklog,
    FillIndex,
    FindPlaces,
    FindStretches,
    FindUndispatched,
    TrimIndex,
)
from rmq_pipeline.broker.decide.redeliver import Revive
from rmq_pipeline.broker.decide.redrive import Origins, Redrive, Unpark
from rmq_pipeline.broker.decide.request import CheckFence, RefillReserve, Request
from rmq_pipeline.broker.decide.segments import ExpireSegments
from rmq_pipeline.broker.decide.settle import OUTCOMES, Outcomes, Settle, retries
from rmq_pipeline.broker.decide.settle_each import (
    AckEach,
    ChangeInvisible,
    FailEach,
    Release,
    ReleaseEach,
    Renew,
)
from rmq_pipeline.broker.decide.sinks import ReplaceSinkFiles
from rmq_pipeline.broker.decide.transaction import EndHalves, FindHalves, SendHalf, TargetsOf
from rmq_pipeline.broker.state.consumption import QueueKey
from rmq_pipeline.broker.state.filter_cache import TagHashFilter
from rmq_pipeline.broker.state.group_facts import SinkVersion
from rmq_pipeline.broker.state.queue_index import PAGE_ROWS, IndexRows
from rmq_pipeline.broker.state.schedule import Schedule
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.broker.work.following import Follow
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.message import MessageIds
from rmq_pipeline.receipt import Receipts
from rmq_pipeline.storage.local import LocalRoot
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.log.engines.postgres_store import PostgresStore
from rmq_pipeline.store.log.shared_log import FollowingLog
from rmq_pipeline.store.segment_reader import Segments
from rmq_pipeline.tables import columns_of
from rmq_pipeline.topic import HALF_TOPIC_ID
from tests.broker.sealed_home import messages, open_broker

#: What a look-up may keep for the next one: bounds of times and offsets, and the age of a page.
#: A schedule may also sort what has arrived (``_rows_of``).
MEMOS = {"next_visible", "_backlog_from", "_tick", "used"}
MEMOS_OF_HALVES = {"_next"}
LEASE_MS = 30_000
#: While the leases run, when they have ended, and when everything is due.
MOMENTS = (0, LEASE_MS + 1, 1 << 40)
WINDOW = ("upkeep/seal", 1)
NONE = np.zeros(0, np.int64)
#: Consumer groups, by their order, and the topic that each receives from.
GROUPS = {
    "plain": ("none", "t"),
    "fifo": ("message_group", "orders"),
    "line": ("queue", "t"),
    "sick": ("message_group", "orders"),
    "lite": ("none", "lite"),
}


@pytest.fixture(scope="module")
def home_state(tmp_path_factory: pytest.TempPathFactory) -> tuple[State, dict[str, Receipts], int]:
    """The state of a broker with some of everything, the receipts of its groups, and the time."""
    clock = ManualClock()
    with open_broker(tmp_path_factory.mktemp("purity") / "home", clock) as broker:
        for name, kind in (("t", "normal"), ("late", "delay"), ("twofold", "transaction")):
            broker.create_topic(name, type=kind, queues=2)
        broker.create_topic("orders", type="fifo", queues=1)
        broker.create_topic("lite", type="lite", queues=2)
        broker.create_topic("once", queues=1, deduplicate="message_id")
        broker.create_group("new")
        for name, (order, _) in GROUPS.items():
            broker.create_group(name, order=order, max_attempts=2 if name == "lite" else 1)
        broker.alter_group("sick", on_failure="dead_letter_group")
        broker.alter_group("line", on_failure="park", max_rate_per_s=1000)
        broker.sync_lite_subscription(
            "lite", "lite", client_id="c", action="add", lite_topics=["a"]
        )
        broker.send("t", messages(40))
        broker.send("once", messages(2, message_id=["one", "two"]))
        broker.send("orders", messages(40, message_group=[f"g{n % 5}" for n in range(40)]))
        broker.send("lite", messages(8, lite_topic=[f"{'ab'[n % 2]}" for n in range(8)]))
        broker.send("late", messages(4, delay_level=[1, 2, 3, 4]))
        due = clock.now_ms() + 60_000
        broker.send("late", messages(2, deliver_at_ms=[due, due]))
        broker.send_half("twofold", messages(3), producer_group="p")
        broker.open_window(WINDOW[0], owner="o", duration_ms=60_000)
        broker.lock_queues("line", "t", queue_ids=[0], client_id="c", duration_ms=60_000)
        receipts = {}
        for group, (_, topic) in GROUPS.items():
            got = [
                broker.receive(group, topic, limit=8, invisible_duration_ms=ms, client_id="c")
                for ms in (LEASE_MS, LEASE_MS // 2)
            ]
            handles = [h for each in got for h in each["receipt_handle"].to_pylist()]
            receipts[group] = receipt.decode(pa.array(handles[2:]))
            broker.ack(handles[:1])
            failed = receipt.decode(pa.array(handles[1:2]))
            broker.engine.submit(
                Settle(retries(failed, "{}"), group)
            )  # dead letters are not copied
        broker.alter_topic("orders", queues=3)
        broker.send("orders", messages(20, message_group=[f"g{n % 5}" for n in range(20)]))
        state = broker.engine.state
    return state, receipts, clock.now_ms()


def send(state: State, topic: str, n: int, **columns: Any) -> Send:
    known = state.topic(topic).topic
    plain = known if columns else replace(known, type="normal")
    table = messages(n, **columns)
    columns = columns_of(table, schema.SEND)
    return prepare(plain, columns, ids=MessageIds(), delay_max_ms=1 << 40, now_ms=state.last_at_ms)


def copies(state: State, topic_id: int, n: int) -> Send:
    """A send of the broker itself, to a topic that takes no messages from clients."""
    return replace(
        send(state, "once", n), topic=state.topics[topic_id].topic.name, topic_id=topic_id
    )


def of_groups(state: State, receipts: Mapping[str, Receipts], now_ms: int) -> Iterator[Request]:
    """Requests of every consumer group, whatever its order."""
    for group, (_, topic) in GROUPS.items():
        key = QueueKey(state.group(group).group_id, state.topic(topic).topic.topic_id, 0)
        held = receipts[group]
        n = len(held)
        assert n
        tags = TagHashFilter(np.zeros(1, np.int64))
        for row_filter, queues, attempt in ((None, None, -7), (tags, frozenset([1]), 0)):
            for limit in (1, 1000):
                yield Receive(
                    *(topic, group, limit, LEASE_MS, row_filter, "c", None, 5, queues, attempt)
                )
        yield Receive("t", "new", 10, LEASE_MS, None, "c", None, 5)
        yield Subscribe(topic, group)
        for code in OUTCOMES.values():
            outcome = np.full(n, code, np.int8)
            outcome[::3] = 0
            done = Outcomes(held, outcome, np.full(n, -1), pa.nulls(n, pa.string()))
            yield Settle(done, group, publish=(send(state, "t", 3),))
            yield Settle(replace(done, outcome=np.full(n, code, np.int8)), keep_behind=True)
        yield from (AckEach(held), FailEach(held, "{}"), Renew(held, 9), Release(held))
        yield from (
            ReleaseEach(held),
            ReleaseEach(held, 500),
            ChangeInvisible(held, 9, held.delivery),
        )
        yield from (Unpark(group, topic, None, skip=skip) for skip in (False, True))
        yield LockQueues(group, topic, (0, 1), "other", 1000)
        yield UnlockQueues(group, topic, (0, 1), "c")
        yield LocksOfGroup(group)
        begun = Begun(2, by_queue=False, suspects=frozenset(), trying=frozenset())
        yield from (UnlockMember(group, "c"), UnlockMember(group, "c", now_ms, begun))
        yield OpenWindow(f"consumer/{group}", "o", 1000, takeover=True)
        backlog = list(state.consumption(state.group(group), key[1], queue_id=0).backlog)
        found: list[list[int]] = [[] for _ in backlog]
        wanted = BacklogWanted(key, backlog, [0] * len(backlog), 9, 0, None)
        yield FillBacklog(wanted, found, [None] * len(backlog))
        yield FindUndispatched(key, 0, 5)
        yield from offsets(group, topic)
        yield admin.AlterGroup(group, {"max_attempts": 9})
        yield admin.DeleteGroup(group, force=True)


def offsets(group: str, topic: str) -> Iterator[Request]:
    yield group_offsets.CommitOffsets(group, topic, {0: (-1, 1)}, "c", {})
    yield group_offsets.CommitOffsets("new", topic, {0: (-1, 1)}, "c", {})
    yield group_offsets.StartOffsets("new", topic, "last")
    yield group_offsets.CloneOffsets(group, "new", topic)
    yield group_offsets.Places(group, topic)
    yield group_offsets.Resets(group, (topic,))
    yield group_offsets.ResetOffset(group, topic, {0: 1}, clip=False)
    yield group_offsets.UpdateOffsets("new", topic, {0: 1})
    yield group_offsets.CommittedOffset(group, topic, 0)
    yield group_offsets.Offsets(topic)


def of_topics(state: State) -> Iterator[Request]:
    """Requests about topics, their read-ahead, and what is sent to them."""
    topic_id = state.topic("t").topic.topic_id
    two = np.arange(2)
    rows = IndexRows(9 * PAGE_ROWS, two, two.astype(np.int32), two, two)
    yield from (TrimIndex(0, 1 << 40), FillIndex(topic_id, 0, rows))
    yield FindPlaces(topic_id, np.zeros(3, np.int32), np.arange(3))
    yield FindStretches("t", {0: 0, 1: 1}, 10)
    yield send(state, "t", 3)
    yield send(state, "late", 2, delay_level=[1, 2])
    yield send(state, "once", 3, message_id=["one", "three", "three"])
    yield send(state, "orders", 2, message_group=["g1", "g2"])
    yield admin.Found(30)
    yield admin.CreateTopic("more", "normal", 1, None, ensure=False)
    yield admin.CreateGroup("more", "none", 3, [1], "dead_letter", ensure=False)
    yield admin.AlterTopic("t", 5, None)
    yield admin.DeleteTopic("t", force=True)
    yield SyncLiteSubscription("lite", "lite", "c", "add", ("b",))
    yield ExpireSegments(topic_id, ((Segment("t", topic_id, 0, 0, 4), 9),), WINDOW)
    segment = Segment("t", topic_id, 0, 0, 4)
    yield segments.ReplaceSegments((segment,), segment, 9, WINDOW)
    yield segments.RegisterHistory({Kind.EVENT_SEGMENTS_REPLACED: {}}, WINDOW)
    sealed = segments.Sealed((segment,), Path("a/b"), 1, 0, 9, 9)
    yield segments.RegisterSealed(sealed, (9,), WINDOW)
    yield ReplaceSinkFiles("plain", "r", "why", [], [], SinkVersion(), None, whole=False)


def of_jobs(state: State, now_ms: int) -> Iterator[Request]:
    """Requests of the upkeep jobs."""
    yield from (Due(), NoteFallback("seal", 1, {}), Revive(1, None), Revive(1000, WINDOW))
    yield from (CheckFence(WINDOW), RefillReserve(WINDOW))
    yield Overview()
    yield Count(Overview().decide(deepcopy(state), now_ms).answer.keys, 0, {})
    yield from (RenewWindow(*WINDOW, 1000), CloseWindow(*WINDOW))
    yield FindExhausted(None, 100)
    for exhausted in FindExhausted(None, 100).decide(deepcopy(state), now_ms).answer:
        group = state.groups[exhausted.key.group_id]
        yield StoreDeadLetters(exhausted, copies(state, group.dead_letter_topic_id, len(exhausted)))
        n = len(exhausted)
        yield Redrive(
            group.name,
            "again",
            Origins(
                np.zeros(n, np.int32),
                np.arange(n),
                np.full(n, exhausted.key.topic_id, np.int32),
                np.full(n, exhausted.key.queue_id, np.int32),
                exhausted.queue_offset,
                np.zeros(n, np.int64),
                ["t"] * n,
                ["id"] * n,
            ),
        )
    late = deepcopy(state).schedule.due(1 << 60, 10)
    yield schedule.FindDue(10, None)
    yield schedule.FindScheduled(late.keys())
    yield schedule.Deliver(late, ((np.arange(len(late)), send(state, "late", len(late))),), None)
    yield schedule.PutOff(late, np.arange(len(late)) % 2 == 0, None)
    yield schedule.Recall(late)
    halves = deepcopy(state).halves.due(1 << 60, 10)
    places, hashes = halves["queue_offset"], halves["message_id_hash"]
    yield transaction.Sweep(10, 2, 1000, None, places[:1])
    yield transaction.Sweep(10, 0, 1000, None, NONE)
    yield transaction.GiveUp(halves, send(state, "t", len(halves)))
    yield transaction.PutOff(places)
    yield FindHalves(places, hashes)
    yield EndHalves(halves, places > 0, (send(state, "twofold", len(halves) - 1),))
    ids = transaction_ids.encode(places, hashes)
    yield TargetsOf(pa.table({"transaction_id": ids}))
    half = copies(state, HALF_TOPIC_ID, 2)
    yield SendHalf("twofold", state.topic("twofold").topic.topic_id, half, np.arange(2), "p", 9)


def content(value: Any) -> Any:
    """The value as something that can be compared, without what a look-up may keep."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Schedule):
        return _rows_of(value)
    if isinstance(value, Mapping):
        return [(key, content(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [content(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if value is None or isinstance(value, bool | int | float | str | bytes | Enum | np.generic):
        return value
    if isinstance(value, pa.Table | pa.RecordBatch | pa.Array):
        return value.to_pylist()
    if callable(value):
        return None
    named = [each.name for each in fields(value)] if is_dataclass(value) else _names(value)
    memos = MEMOS | MEMOS_OF_HALVES if type(value).__name__ == "Halves" else MEMOS
    return type(value).__name__, [(n, content(getattr(value, n))) for n in named if n not in memos]


def _names(value: Any) -> list[str]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*slots, *getattr(value, "__dict__", ())]


def _rows_of(schedule: Schedule) -> Any:
    """The rows that wait, whether or not they are sorted into runs."""
    copy = deepcopy(schedule)
    copy._settled()
    runs = {name: getattr(copy, name) for name in ("_runs", "_timed", "_untried", "_unreadable")}
    return [
        (name, *sorted(row for run in some for row in _columns(run) if row[0]))
        for name, some in runs.items()
    ]


def _columns(run: Any) -> Iterator[tuple[Any, ...]]:
    columns = [getattr(run.rows, each.name) for each in fields(run.rows)]
    yield from zip((~run.gone).tolist(), run.due_at.tolist(), *columns, strict=True)


def unopened_log(folder: Path) -> FollowingLog:
    store = PostgresStore("postgresql://host/log", timeout_s=1.0, lease_s=1.0, home_format=1)
    how: dict[str, Any] = {"schemas": {}, "file_bytes": 1, "reserve_bytes": 0, "fault": None}
    return FollowingLog(folder, sync_commits=True, store=store, answered_alone=False, **how)


def every_type() -> set[str]:
    """The names of all types of requests in the library."""
    path, name = rmq_pipeline.broker.__path__, rmq_pipeline.broker.__name__
    for module in pkgutil.walk_packages(path, f"{name}."):
        importlib.import_module(module.name)
    return {each for each in map(name_of, Request.__subclasses__()) if each.startswith(name)}


def name_of(kind: type[Request]) -> str:
    return f"{kind.__module__}.{kind.__name__}"


@pytest.mark.parametrize("later_ms", MOMENTS)
def test_a_decision_leaves_the_state_as_it_was(
    home_state: tuple[State, dict[str, Receipts], int], later_ms: int, tmp_path: Path
) -> None:
    state, receipts, start = home_state
    state, now_ms = deepcopy(state), start + later_ms
    requests = [
        *of_groups(state, receipts, now_ms),
        *of_topics(state),
        *of_jobs(state, now_ms),
        Follow(unopened_log(tmp_path), [], Segments(LocalRoot(tmp_path))),
    ]
    before = content(state)
    decided = set()

    for request in requests:
        answers = []
        for _ in range(2):
            try:
                answers.append(content(request.decide(state, now_ms)))
                decided.add(name_of(type(request)))
            except RocketMQError as error:
                answers.append(repr(error))
        assert content(state) == before, request
        assert answers[0] == answers[1], request

    assert {name_of(type(each)) for each in requests} == every_type()
    if not later_ms:
        assert decided == every_type()
