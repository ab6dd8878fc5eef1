"""Bodies and properties of messages for a query, from the log and from segments.

The query has told the places of the messages in a transaction, which has ended. Meanwhile messages
may expire, and topics may be deleted and created again. Such a message has no body.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits, schema
from rmq_pipeline.access.policy import Resource
from rmq_pipeline.access.rights import check_rights
from rmq_pipeline.broker.decide.group_offsets import Offsets
from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import fetch, whatever_log
from rmq_pipeline.errors import StorageError, TopicNotFoundError

_PLACE: Final = ["topic", "queue_id", "queue_offset"]
#: Messages that are read first, while their size is unknown, and most messages of one read.
_FIRST_ROWS: Final = 16
_MOST_ROWS: Final = 256
#: Most times that messages are read again because some have expired.
_TRIES: Final = 5


class Bodies:
    """Reads bodies for the caller of the running verb."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def check(self, topics: Sequence[str]) -> None:
        """Check that the caller may look up and read messages of these topics.

        Raises:
            ForbiddenError: the caller lacks ``get`` or ``sub`` on one of them.
        """
        for topic in topics:
            resource = Resource("topic", topic)
            check_rights(((resource, "get"), (resource, "sub")))

    def read(self, places: pa.Table, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield topic, queue_id and queue_offset of the places, with columns of their messages.

        A column is null if the message has expired, or if another one is at its place.

        Args:
            places: topic, queue_id, queue_offset, topic_id, message_id, position and row; by
                topic_id, queue and offset.
            columns: of schema.MESSAGE.
        """
        for topic_id in places["topic_id"].unique().to_pylist():
            rows = places.filter(pc.equal(places["topic_id"], topic_id))
            done, step = 0, _FIRST_ROWS
            while done < rows.num_rows:
                part = rows.slice(done, step)
                found = self._found(part, topic_id=topic_id, columns=columns)
                yield found
                done += step
                # Any body that follows may have the size limit of a body.
                mean = max(1, found.nbytes // found.num_rows)
                step = min(2 * step, _MOST_ROWS, max(_FIRST_ROWS, limits.STEP_BYTES // mean))

    def _found(self, part: pa.Table, *, topic_id: int, columns: Sequence[str]) -> pa.Table:
        names = ["message_id", *columns]
        rows = np.arange(part.num_rows)
        for _ in range(_TRIES):
            try:
                there = part.take(rows)
                read = whatever_log(
                    self._engine,
                    partial(_fetched, self._engine, there, topic_id=topic_id, names=names),
                )
                break
            except LookupError:
                rows = rows[self._retained(part, topic_id)[rows]]
        else:
            raise StorageError(f"Messages of topic {part['topic'][0]} cannot be found.")
        is_same = pc.equal(read["message_id"], there["message_id"]).fill_null(False)
        same = is_same.to_numpy().astype(np.bool_)
        # The row that each place has in what was read; null: there is none.
        at = np.full(part.num_rows, -1)
        at[rows[same]] = np.flatnonzero(same)
        chosen = read.select(list(columns))
        if len(same) < part.num_rows or not same.all():
            chosen = chosen.take(pa.array(at, mask=at < 0))
        found = part.select(_PLACE)
        for name in columns:
            found = found.append_column(schema.MESSAGE.field(name), chosen[name])
        return found

    def _retained(
        self, part: pa.Table, topic_id: int
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return the mask of messages that have not expired."""
        bounds: list[tuple[int, int]] = []
        try:
            described, bounds = self._engine.submit(Offsets(part["topic"][0].as_py()))
        except TopicNotFoundError:
            return np.zeros(part.num_rows, dtype=np.bool_)
        if described.topic_id != topic_id:  # it was deleted and created again
            return np.zeros(part.num_rows, dtype=np.bool_)
        lows = np.array([low for low, _ in bounds], dtype=np.int64)
        mask: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
            part["queue_offset"].to_numpy() >= lows[part["queue_id"].to_numpy()]
        )
        return mask


def _fetched(engine: Engine, part: pa.Table, *, topic_id: int, names: Sequence[str]) -> pa.Table:
    if not part.num_rows:
        return pa.schema([schema.MESSAGE.field(name) for name in names]).empty_table()
    places = Places(part["position"].to_numpy(), part["row"].to_numpy())
    return fetch(
        engine,
        places,
        columns=names,
        topic_id=topic_id,
        queue_id=part["queue_id"].to_numpy(),
        offset=part["queue_offset"].to_numpy(),
    )
