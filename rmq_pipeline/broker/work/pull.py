"""Pulling: messages of several queues by offset, without a lease, in one long poll."""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import schema
from rmq_pipeline.broker.decide.group_offsets import Offsets
from rmq_pipeline.broker.decide.queue_index import FindStretches, Stretch
from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.filtering import matching
from rmq_pipeline.broker.work.reading import fetch, locate
from rmq_pipeline.broker.work.waiting import LongPoll
from rmq_pipeline.filter.expression import Filter, SqlFilter
from rmq_pipeline.message import Int64s
from rmq_pipeline.verb import PullResult

#: Most offsets that one look evaluates for a filter, in all queues together.
SCAN_ROWS = 65_536
#: Messages read first, while their size is unknown.
_FIRST_ROWS = 64


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
            ends = self._bytes + np.cumsum(sizes)
            # The first message is returned at any size.
            taken = int(np.count_nonzero((ends <= self.max_bytes) | (ends == sizes)))
            if taken:
                self._parts.append((queue_id, int(offsets[done]), found.slice(0, taken)))
                self._bytes = int(ends[taken - 1])
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
            return pull.pulled()
        if more and not pull.filters:
            continue
        if poll.is_over:
            return pull.pulled()
        if not more:
            pull.look_everywhere()
            # The topic may have been deleted and created again before its version was read.
            if engine.state.topic(pull.topic).topic.topic_id == topic_id:
                poll.wait()
