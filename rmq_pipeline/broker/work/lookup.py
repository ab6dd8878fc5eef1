"""Reading messages without a lease: by key, id or time, or from offsets on.

A search by key, id or time reads an index in segments and asks DuckDB for the log. It takes the
first ``limit`` matches of each queue, and sorts all of them by stored_at_ms. Bodies are read last,
of the messages that it returns. A pull reads several queues by offset in one long poll.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits, schema
from rmq_pipeline.broker.decide.group_offsets import Offsets
from rmq_pipeline.broker.decide.queue_index import FindStretches, Stretch
from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.filtering import matching
from rmq_pipeline.broker.work.queries import span_of
from rmq_pipeline.broker.work.reading import ends_at, fetch, locate, places_of, segments_of
from rmq_pipeline.broker.work.waiting import LongPoll
from rmq_pipeline.errors import RequestError
from rmq_pipeline.filter.expression import Filter, SqlFilter
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.consume_queue import Search
from rmq_pipeline.topic import Topic
from rmq_pipeline.verb import PullResult

#: Columns that a search reads.
_FOUND: Final = [name for name in schema.READ.names if name not in {"queue_id", "body"}]
_ORDER: Final = [(name, "ascending") for name in ("stored_at_ms", "queue_id", "queue_offset")]
#: Most offsets that one look evaluates for a filter, in all queues together.
SCAN_ROWS = 65_536
#: Messages read first, while their size is unknown.
_FIRST_ROWS = 64
#: Most bodies that a search reads at a time.
_MOST_ROWS = 256


@dataclass(frozen=True, slots=True)
class Wanted:
    """Search conditions; None: no condition."""

    key: str | None
    message_id: str | None
    #: Range of stored_at_ms: [from_ms, to_ms).
    from_ms: int | None
    to_ms: int | None
    limit: int
    with_body: bool

    def check(self) -> None:
        """Check the conditions.

        Raises:
            RequestError: there is no condition, or limit is out of range.
        """
        asked = (self.key, self.message_id, self.from_ms, self.to_ms)
        if all(each is None for each in asked):
            raise RequestError("Say what to find: key, message_id, from_ms or to_ms.")
        if not 0 <= self.limit <= limits.FIND_ROWS:
            raise RequestError(f"limit must be 0 to {limits.FIND_ROWS}, not {self.limit!r}.")

    def matches(self, rows: pa.Table) -> pa.Array:
        """Return the mask of matching rows."""
        found = pa.array(np.ones(rows.num_rows, dtype=np.bool_))
        if self.message_id is not None:
            found = pc.and_(found, pc.equal(rows["message_id"], self.message_id))
        if self.from_ms is not None:
            found = pc.and_(found, pc.greater_equal(rows["stored_at_ms"], self.from_ms))
        if self.to_ms is not None:
            found = pc.and_(found, pc.less(rows["stored_at_ms"], self.to_ms))
        if self.key is not None:
            found = pc.and_(found, _has_key(rows["keys"].combine_chunks(), self.key))
        return found


def find(engine: Engine, topic: str, *, wanted: Wanted) -> pa.Table:
    """Return the first matching messages of a topic, in the order of storing.

    Returns:
        schema.READ; body is null unless requested. With bodies, the answer ends before
        limits.FIND_BYTES are exceeded, after one message at least.
    """
    wanted.check()
    described: Topic
    bounds: list[tuple[int, int]]
    described, bounds = engine.submit(Offsets(topic))
    parts = [schema.READ.empty_table()]
    topic_id = described.topic_id
    engine.dispatched(ends_at(engine, topic_id=topic_id, bounds=bounds))
    for queue_id, (low, high) in enumerate(bounds):
        from_ms = wanted.from_ms if wanted.from_ms is not None else 0
        start, _ = span_of(engine, topic_id, queue_id=queue_id, at_ms=from_ms, bounds=(low, high))
        search = Search(
            topic_id=topic_id,
            queue_id=queue_id,
            start=start,
            stop=high,
            limit=wanted.limit,
            key=wanted.key,
            message_id=wanted.message_id,
            from_ms=wanted.from_ms,
            to_ms=wanted.to_ms,
        )
        parts.append(_of_queue(engine, search, wanted=wanted))
    found = pa.concat_tables(parts).sort_by(_ORDER).slice(0, wanted.limit).combine_chunks()
    if not wanted.with_body or not found.num_rows:
        return found
    return _with_bodies(engine, found, topic_id=topic_id)


def _with_bodies(engine: Engine, found: pa.Table, *, topic_id: int) -> pa.Table:
    """Return the first of the messages with their bodies: as many as limits.FIND_BYTES allow."""
    queue_id, offset = found["queue_id"].to_numpy(), found["queue_offset"].to_numpy()
    places = places_of(engine, topic_id=topic_id, queue_id=queue_id, offset=offset)
    parts: list[pa.ChunkedArray] = []
    done, size, step = 0, 0, _FIRST_ROWS
    while done < len(offset):
        rows = slice(done, done + step)
        bodies = fetch(
            engine,
            Places(places.position[rows], places.row[rows]),
            columns=("body",),
            topic_id=topic_id,
            queue_id=queue_id[rows],
            offset=offset[rows],
        )
        sizes = _sizes(bodies)
        taken = _fitting(sizes, before=size, most=limits.FIND_BYTES)
        parts.append(bodies["body"].slice(0, taken))
        done += taken
        size += int(sizes[:taken].sum())
        if taken < len(sizes):
            break
        # Any body that follows may have the size limit of a body.
        step = min(2 * step, _MOST_ROWS)
    body = pa.chunked_array([chunk for part in parts for chunk in part.chunks], pa.binary())
    place = schema.READ.get_field_index("body")
    return found.slice(0, done).set_column(place, schema.READ.field(place), body).combine_chunks()


def _fitting(sizes: Int64s, *, before: int, most: int) -> int:
    """Return how many messages fit after ``before`` bytes; the first of all at any size."""
    ends = before + np.cumsum(sizes)
    return int(np.count_nonzero((ends <= most) | (ends == sizes)))


def _of_queue(engine: Engine, search: Search, *, wanted: Wanted) -> pa.Table:
    if search.start >= search.stop or not search.limit:
        return schema.READ.empty_table()
    if search.key is None and search.message_id is None:
        # A search by time alone: DuckDB has the times of all messages, in order.
        return _read(engine, search, offsets=engine.database.find(search))
    segments = segments_of(engine).of_queue(search.topic_id, search.queue_id)
    parts, left, sealed_to = [schema.READ.empty_table()], search.limit, search.start
    for segment in segments:
        sealed_to = max(sealed_to, segment.end)
        if left <= 0:
            break
        if segment.end <= search.start:
            continue
        for rows in engine.segments.search(
            segment,
            key=search.key,
            message_id=search.message_id,
            wanted=wanted.matches,
            columns=_FOUND,
        ):
            parts.append(_as_read(rows.slice(0, left), search.queue_id))
            left -= parts[-1].num_rows
            if left <= 0:
                break
    if left > 0 and sealed_to < search.stop:
        rest = replace(search, start=sealed_to, limit=left)
        parts.append(_read(engine, rest, offsets=engine.database.find(rest)))
    return pa.concat_tables(parts)


def _read(engine: Engine, search: Search, *, offsets: Int64s) -> pa.Table:
    """Return the messages at these offsets, from the log or from segments."""
    n = len(offsets)
    if not n:
        return schema.READ.empty_table()
    queue_id = np.full(n, search.queue_id, dtype=np.int32)
    unknown = Places(np.full(n, -1, np.int64), np.zeros(n, np.int32))
    places = locate(
        engine, topic_id=search.topic_id, queue_id=queue_id, offset=offsets, places=unknown
    )
    rows = fetch(
        engine,
        places,
        columns=_FOUND,
        topic_id=search.topic_id,
        queue_id=queue_id,
        offset=offsets,
    )
    return _as_read(rows, search.queue_id)


def _as_read(rows: pa.Table, queue_id: int) -> pa.Table:
    """Return the rows as schema.READ; columns that were not read are null."""
    n = rows.num_rows
    columns = {
        "queue_id": pa.array(np.full(n, queue_id, dtype=np.int32)),
        "body": pa.nulls(n, pa.binary()),
        **dict(_columns(rows)),
    }
    return pa.table([columns[name] for name in schema.READ.names], schema=schema.READ)


def _columns(rows: pa.Table) -> Iterator[tuple[str, pa.ChunkedArray]]:
    for name in rows.column_names:
        yield name, rows[name].cast(schema.READ.field(name).type)


def _has_key(keys: pa.ListArray, key: str) -> pa.Array:
    """Return the mask of lists that contain the key."""
    rows = pc.list_parent_indices(keys).to_numpy()
    texts = pc.list_flatten(keys)
    found = np.zeros(len(keys), dtype=np.bool_)
    found[rows[pc.equal(texts, key).fill_null(False).to_numpy(zero_copy_only=False)]] = True
    return pa.array(found)


@dataclass(slots=True)
class Pull:
    """State of one pull; each ``look`` continues where the last one ended."""

    topic: str
    positions: dict[int, int]
    limit: int
    max_bytes: int
    filter: Filter
    #: Messages, with their queue and the offset of the first.
    _parts: list[tuple[int, int, pa.Table]] = field(default_factory=list)
    _rows: int = 0
    _bytes: int = 0
    #: True if the next message would exceed max_bytes.
    _full: bool = False
    #: Queues that had more at the last look; None: no look yet.
    _open: list[int] | None = None

    @property
    def filters(self) -> bool:
        """Return True if the filter may drop messages."""
        return isinstance(self.filter, SqlFilter) or bool(self.filter.columns)

    @property
    def is_done(self) -> bool:
        """Return True if the pull has enough messages, or all that one look returns."""
        some = self._rows >= self.limit or bool(self._rows and self.filters)
        return some or self._full or bool(self._rows and not self._open)

    def pulled(self) -> PullResult:
        """Return the messages and the next positions."""
        parts = [part for *_, part in sorted(self._parts, key=lambda part: part[:2])]
        found = pa.concat_tables(parts) if parts else schema.READ.empty_table()
        return PullResult(found, dict(self.positions))

    def look(self, engine: Engine) -> bool:
        """Read messages up to the limits; return True if there may be more."""
        queues = list(self.positions) if self._open is None else self._open
        rows = SCAN_ROWS if self.filters else self.limit - self._rows
        asked = {queue_id: self.positions[queue_id] for queue_id in queues}
        request = FindStretches(self.topic, asked, max(1, -(-rows // max(1, len(asked)))))
        topic_id, stretches = engine.submit(request)
        self.positions.update((each.queue_id, each.start) for each in stretches)
        stretches = [each for each in stretches if len(each)]
        self._open = [each.queue_id for each in stretches]
        # The first queue changes from look to look, so that no queue is always last.
        turn = engine.new_delivery() % max(1, len(stretches))
        for each in (*stretches[turn:], *stretches[:turn]):
            if self._rows < self.limit and not self._full:
                self._take(engine, each, topic_id=topic_id)
        return bool(stretches)

    def look_everywhere(self) -> None:
        """Let the next look read all queues again."""
        self._open = None

    def _take(self, engine: Engine, stretch: Stretch, *, topic_id: int) -> None:
        try:
            offsets, places = self._wanted(engine, stretch, topic_id=topic_id)
            queue_id = stretch.queue_id
            done = self._read(engine, places, topic_id=topic_id, queue_id=queue_id, offsets=offsets)
        except LookupError:
            _, bounds = engine.submit(Offsets(self.topic))
            if bounds[stretch.queue_id][0] <= stretch.start:
                raise
            return  # It has expired meanwhile: the next look begins after it.
        whole = done == len(offsets)
        self.positions[stretch.queue_id] = stretch.stop if whole else int(offsets[done])

    def _wanted(self, engine: Engine, stretch: Stretch, *, topic_id: int) -> tuple[Int64s, Places]:
        """Return the offsets that match the filter, and their places."""
        offsets = stretch.offsets
        queue_ids = np.full(len(offsets), stretch.queue_id, dtype=np.int32)
        places = locate(
            engine, topic_id=topic_id, queue_id=queue_ids, offset=offsets, places=stretch.places
        )
        if not self.filters:
            return offsets, places
        chosen = matching(
            engine,
            self.filter,
            places=places,
            topic_id=topic_id,
            queue_id=queue_ids,
            offset=offsets,
        )
        return offsets[chosen], Places(places.position[chosen], places.row[chosen])

    def _read(
        self, engine: Engine, places: Places, *, topic_id: int, queue_id: int, offsets: Int64s
    ) -> int:
        """Read messages until there are enough; return how many were read."""
        done, step = 0, _FIRST_ROWS
        while done < len(offsets) and self._rows < self.limit and not self._full:
            stop = min(len(offsets), done + step, done + self.limit - self._rows)
            found = fetch(
                engine,
                Places(places.position[done:stop], places.row[done:stop]),
                columns=schema.READ.names,
                topic_id=topic_id,
                queue_id=np.full(stop - done, queue_id, dtype=np.int32),
                offset=offsets[done:stop],
            ).cast(schema.READ)
            sizes = _sizes(found)
            taken = _fitting(sizes, before=self._bytes, most=self.max_bytes)
            if taken:
                self._parts.append((queue_id, int(offsets[done]), found.slice(0, taken)))
                self._bytes += int(sizes[:taken].sum())
            done += taken
            self._rows += taken
            self._full = taken < len(sizes) or self._bytes >= self.max_bytes
            step = max(_FIRST_ROWS, (self.max_bytes - self._bytes) // max(1, int(sizes.mean())))
        return done


def _sizes(messages: pa.Table) -> Int64s:
    """Return the size of each body in bytes."""
    sizes: Int64s = pc.binary_length(messages["body"]).to_numpy().astype(np.int64)
    return sizes


def pull(engine: Engine, pull: Pull, *, wait_ms: int) -> PullResult:
    """Pull until there is a message, or until ``wait_ms`` have passed."""
    poll = LongPoll(engine.wakeups, wait_ms=wait_ms)
    while True:
        topic_id = engine.state.topic(pull.topic).topic.topic_id
        poll.look(topic_id)
        more = pull.look(engine)
        if pull.is_done:
            return _counted(engine, pull)
        if more and not pull.filters:
            continue
        if poll.is_over:
            return _counted(engine, pull)
        if not more:
            pull.look_everywhere()
            # The topic may have been deleted and created again before its version was read.
            if engine.state.topic(pull.topic).topic.topic_id == topic_id:
                poll.wait()


def _counted(engine: Engine, pull: Pull) -> PullResult:
    """Return what was pulled, and count it; a pull names no consumer group."""
    found = pull.pulled()
    bodies = found.messages["body"]
    engine.meter.delivered("", pull.topic, size=bodies, pulled=len(bodies))
    return found
