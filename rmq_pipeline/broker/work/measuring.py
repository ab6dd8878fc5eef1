"""Samples of all metrics of an open broker: its counters, and gauges of the state and the process.

A scrape reads no message. It asks the writer for the state of consumer groups in parts of 128
queues, and keeps the result for 20 times as long as that took: so all scrapes together cost the
writer at most a twentieth of its time, and a small broker's figures are always fresh. With 10,000
queues a look takes 0.1 to 0.25 s, and a scrape without one 10 ms (benchmarks/metrics.py).
"""

import os
import shutil
import threading
import time
from dataclasses import dataclass
from importlib import metadata
from typing import Final

import psutil
import pyarrow as pa

from rmq_pipeline.broker.decide.backlog import Count, Held, Key, Overview, Unsettled
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.meter import OUTCOMES, Counts
from rmq_pipeline.metrics.declared import Samples
from rmq_pipeline.store.consume_queue import StoredAt
from rmq_pipeline.store.events import Kind
from rmq_pipeline.topic import is_system

#: Share of the time for which a look at consumer groups is kept, and the longest such time.
_KEPT_FOR: Final = 20
_KEPT_MOST_S: Final = 60.0
#: Storage times that one scrape looks up in DuckDB, for messages stored before the last start.
_LOOKUPS: Final = 16
_DISK: Final = ("local", "disk")
#: group_id and topic_id; True: of the messages that were never delivered, False: of the unsettled.
_Age = tuple[int, int, bool]


@dataclass(frozen=True, slots=True)
class _Looked:
    """What the writer answered, and until when it is used."""

    held: Held
    unsettled: dict[tuple[int, int], Unsettled]
    until: float


class Measuring:
    """The verb ``metrics`` of one broker; safe for all threads."""

    def __init__(self, engine: Engine, *, mode: str) -> None:
        self._engine = engine
        self._mode = mode
        self._looking = threading.Lock()
        self._looked: _Looked | None = None
        #: Storage times that were looked up, by topic_id, queue_id and queue_offset; None: the
        #: message was not found.
        self._stored_at: dict[Key, int | None] = {}
        #: Oldest storage times, as they were last looked up.
        self._ages: dict[_Age, int] = {}
        #: The last place that was looked up: the next scrape goes on behind it.
        self._turn: Key = (0, 0, 0)
        self._process = psutil.Process()

    def samples(self) -> pa.Table:
        """Return declared.SAMPLES."""
        engine, found = self._engine, Samples()
        looked = self._look()
        counts = engine.meter.counts(engine.state)
        self._add_broker(found, looked.held)
        _add_traffic(found, engine.state, counts=counts)
        _add_groups(found, engine.state, looked=looked)
        _add_calls(found, counts)
        self._add_consumers(found)
        for source in list(engine.meter.sources):
            source(found)
        return found.to_table()

    def _look(self) -> _Looked:
        """Return the state of consumer groups; one scrape looks, and others wait for it."""
        with self._looking:
            began = time.perf_counter()
            if self._looked is None or began >= self._looked.until:
                held: Held = self._engine.submit(Overview())
                unsettled: dict[tuple[int, int], Unsettled] = {}
                at = 0
                while at < len(held.keys):
                    at = self._engine.submit(Count(held.keys, at, unsettled))
                self._complete(unsettled)
                now = time.perf_counter()
                kept_s = min(_KEPT_MOST_S, _KEPT_FOR * (now - began))
                # A look that took a few ms need not be kept.
                until = now + kept_s if kept_s > 0.1 else now
                self._looked = _Looked(held, unsettled, until)
            return self._looked

    def _complete(self, unsettled: dict[tuple[int, int], Unsettled]) -> None:
        """Look up storage times that are not in memory: of messages older than the last start.

        A group that stays where it is costs one lookup for each queue. Each scrape makes a few; a
        group that moves keeps its last time until its next turn. ``unknown`` keeps its places while
        none of them was looked up: the times of newer messages would make an old lag look young.
        """
        unknown: dict[_Age, list[Key]] = {}
        for (group_id, topic_id), each in unsettled.items():
            for is_unread, places in ((False, each.unknown), (True, each.unknown_unread)):
                if places:
                    keys = [(topic_id, *place) for place in places]
                    unknown[group_id, topic_id, is_unread] = keys
        if missing := self._missing(unknown):
            found = self._engine.database.find(StoredAt(missing))
            self._stored_at |= {key: found.get(key) for key in missing}
        ages: dict[_Age, int] = {}
        for age, keys in unknown.items():
            times = [at_ms for key in keys if (at_ms := self._stored_at.get(key)) is not None]
            at_ms = min(times, default=self._ages.get(age))
            if at_ms is not None:
                ages[age] = at_ms
                _add_age(unsettled[age[:2]], at_ms, is_unread=age[2])
        self._ages = ages

    def _missing(self, unknown: dict[_Age, list[Key]]) -> list[Key]:
        """Return the places to look up now, in turns, and forget the times of others.

        Ages of which no time is known come first, and messages that were not found come last.
        """
        wanted = {key for keys in unknown.values() for key in keys}
        self._stored_at = {key: at for key, at in self._stored_at.items() if key in wanted}
        first = {
            keys[0]
            for age, keys in unknown.items()
            if age not in self._ages and self._stored_at.keys().isdisjoint(keys)
        }
        missing = sorted(
            (key for key in wanted if self._stored_at.get(key) is None),
            key=lambda key: (key in self._stored_at, key not in first, key <= self._turn, key),
        )[:_LOOKUPS]
        if missing:
            self._turn = missing[-1]
        return missing

    def _add_broker(self, found: Samples, held: Held) -> None:
        engine, log = self._engine, self._engine.log
        version = metadata.version("rmq_pipeline")
        home = engine.home.path
        found.add("rmq_build_info", 1, version, str(home), self._mode, engine.flush)
        found.add("rmq_start_time_seconds", engine.meter.started_at)
        found.add("rmq_memory_bytes", self._process.memory_info().rss)
        found.add("rmq_log_bytes", log.end - log.first)
        found.add("rmq_log_written_bytes_total", engine.meter.written_bytes)
        found.add_histogram("rmq_frame_write_seconds", engine.meter.frames.copy())
        found.add("rocketmq_storage_flush_behind_bytes", log.end - log.synced, *_DISK)
        behind = engine.dispatcher.behind_bytes
        found.add("rocketmq_storage_dispatch_behind_bytes", behind, *_DISK)
        files = (engine.home.database, engine.home.database.with_name(_wal_of(engine)))
        found.add("rmq_database_bytes", sum(map(_size_of, files)))
        disk = shutil.disk_usage(home)
        found.add("rocketmq_storage_size_bytes", disk.used, *_DISK)
        found.add("rmq_disk_bytes", disk.total)
        found.add("rmq_disk_free_bytes", disk.free)
        found.add("rmq_clock_ahead_milliseconds", engine.clock.ahead_ms())
        found.add("rocketmq_topic_number", len(engine.state.topics))
        found.add("rocketmq_consumer_group_number", len(engine.state.groups))
        found.add("rocketmq_half_messages", held.halves)
        found.add("rmq_scheduled_messages", held.scheduled)
        found.add("rmq_scheduled_overdue_milliseconds", held.overdue_ms)

    def _add_consumers(self, found: Samples) -> None:
        """Add the members that send heartbeats at the Flight endpoint."""
        for group, count in self._engine.members.counts().items():
            found.add("rocketmq_consumer_connections", count, group, "", "member", _said(group))


def _add_age(each: Unsettled, at_ms: int, *, is_unread: bool) -> None:
    """Add a storage time that was looked up."""
    if is_unread:
        each.oldest_unread_ms = min(at_ms, each.oldest_unread_ms or at_ms)
        each.unknown_unread.clear()
    else:
        each.oldest_ms = min(at_ms, each.oldest_ms or at_ms)
        each.unknown.clear()


def _wal_of(engine: Engine) -> str:
    return engine.home.database.name + ".wal"


def _size_of(path: os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 Path has no shorter way
    except FileNotFoundError:
        return 0


def _said(name: str) -> str:
    return "true" if is_system(name) else "false"


def _add_traffic(found: Samples, state: State, *, counts: Counts) -> None:
    """Add the counters of topics and groups."""
    topics = list(state.topics.values())
    for each in topics:
        name, system = each.topic.name, _said(each.topic.name)
        kept = sum(queue.max_offset - queue.min_offset for queue in each.queues)
        found.add("rmq_messages", kept, name, system)
    names = {each.topic.topic_id: each.topic for each in topics}
    for (topic_id, kind), n in counts.sent.items():
        if (topic := names.get(topic_id)) is not None:
            labels = (topic.name, kind or topic.type, _said(topic.name))
            found.add("rocketmq_messages_in_total", n, *labels)
            size = counts.sent_bytes[topic_id, kind]
            found.add("rocketmq_throughput_in_total", size, *labels)
    out = counts.pulled.copy()
    totals: dict[Kind, int] = {}
    for (kind_, group_id, topic_id), n in counts.events.items():
        totals[kind_] = totals.get(kind_, 0) + n
        group, topic = state.groups.get(group_id), names.get(topic_id)
        if group is None or topic is None:
            continue
        labels = (group.name, topic.name, _said(topic.name))
        if kind_ == Kind.LEASE:
            out[group.name, topic.name] += n
        elif kind_ in OUTCOMES:
            found.add("rmq_deliveries_ended_total", n, *labels, OUTCOMES[kind_])
        if kind_ == Kind.DEAD_LETTER:
            found.add("rocketmq_send_to_dlq_messages_total", n, *labels)
    for pair, n in out.items():
        found.add("rocketmq_messages_out_total", n, *pair, _said(pair[1]))
    for pair, n in counts.read_bytes.items():
        found.add("rocketmq_throughput_out_total", n, *pair, _said(pair[1]))
    for name, kind_ in (
        ("rocketmq_commit_messages_total", Kind.HALF_COMMITTED),
        ("rocketmq_rollback_messages_total", Kind.HALF_ROLLED_BACK),
        ("rmq_scheduled_delivered_total", Kind.SCHEDULE_DELIVERED),
    ):
        found.add(name, totals.get(kind_, 0))


def _add_groups(found: Samples, state: State, *, looked: _Looked) -> None:
    """Add the gauges of consumer groups."""
    now_ms = looked.held.now_ms
    for (group_id, topic_id), each in looked.unsettled.items():
        group, topic = state.groups.get(group_id), state.topics.get(topic_id)
        if group is None or topic is None:
            continue
        labels = (group.name, topic.topic.name, _said(topic.topic.name))
        if not each.unknown:
            age_ms = max(0, now_ms - (each.oldest_ms or now_ms))
            found.add("rocketmq_consumer_lag_latency_milliseconds", age_ms, *labels)
        if not each.unknown_unread:
            age_ms = max(0, now_ms - (each.oldest_unread_ms or now_ms))
            found.add("rocketmq_consumer_queueing_latency_milliseconds", age_ms, *labels)
        for name, value in (
            ("rocketmq_consumer_lag_messages", each.lag()),
            ("rocketmq_consumer_inflight_messages", each.in_flight),
            ("rocketmq_consumer_ready_messages", each.unread + each.waiting + each.due),
            ("rmq_retrying_messages", each.retrying),
            ("rmq_parked_messages", each.parked),
            ("rmq_quarantined_message_groups", each.quarantined),
        ):
            found.add(name, value, *labels)
    for group in list(state.groups.values()):
        letters = looked.held.dead_letters.get(group.dead_letter_topic_id)
        if letters is not None:
            found.add("rmq_dead_letters_open", letters, group.name)


def _add_calls(found: Samples, counts: Counts) -> None:
    """Add the counters of endpoints and upkeep."""
    for job, n in counts.fallbacks.items():
        found.add("rmq_upkeep_fallbacks_total", n, job)
    for labels, n in counts.calls.items():
        found.add("rmq_calls_total", n, *labels)
    for (endpoint, verb), durations in counts.durations.items():
        found.add_histogram("rmq_call_seconds", durations, endpoint, verb)
