"""Recalling scheduled messages before their delivery."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline import recall_handle, schema
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.scheduling.delivering import ended_events
from rmq_pipeline.broker.scheduling.schedule import Scheduled, keys_of
from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.stored.bodies import Places
from rmq_pipeline.broker.stored.sealed import fetch
from rmq_pipeline.broker.writer import Decision, Request
from rmq_pipeline.errors import RecallError
from rmq_pipeline.message import Int64s, hash64
from rmq_pipeline.store.events import Kind
from rmq_pipeline.tables import columns_of
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID

_FOREIGN: Final = "Use the recall_handle of a send to this topic, at this broker."


@dataclass(frozen=True, slots=True)
class FindScheduled(Request):
    """Query for the messages at these places that still wait."""

    keys: Int64s

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return (rows, mask of the places) as the answer; store nothing."""
        return Decision(state.schedule.find(self.keys))


@dataclass(frozen=True, slots=True)
class Recall(Request):
    """Request that ends the wait of recalled messages."""

    rows: Scheduled

    def decide(self, state: State, now_ms: int) -> Decision:
        """Recall all of them, or none if one no longer waits."""
        _refuse(~state.schedule.open(self.rows.keys()))
        return Decision(events=ended_events(Kind.SCHEDULE_RECALLED, self.rows, now_ms=now_ms))


def recall(engine: Engine, topic: str, *, handles: pa.Table) -> pa.Table:
    """Recall scheduled messages of a topic, all of them or none.

    Returns:
        schema.RECALLED, in the order of the handles.

    Raises:
        RecallError: a message was delivered or recalled before, is of another topic, or is unknown.
    """
    texts = columns_of(handles, schema.RECALL)["recall_handle"]
    wanted = recall_handle.decode(texts)
    topic_id = engine.state.topic(topic).topic.topic_id
    if not len(wanted):
        return schema.RECALLED.empty_table()
    _refuse(wanted.topic_id != topic_id, what=f"it is none of topic {topic}", remedy=_FOREIGN)
    keys = keys_of(wanted.queue_id, wanted.queue_offset)
    _refuse(_repeated(keys), what="it is there twice", remedy="Give each handle once.")
    found: tuple[Scheduled, npt.NDArray[np.bool_]] = engine.submit(FindScheduled(keys))
    rows, still = found
    _refuse(~still)
    ids = fetch(
        engine,
        Places(rows.position, rows.row),
        columns=("message_id",),
        topic_id=SCHEDULE_TOPIC_ID,
        queue_id=rows.queue_id,
        offset=rows.queue_offset,
    ).column("message_id")
    message_id = pa.concat_arrays(ids.chunks)
    other = hash64(message_id) != wanted.message_id_hash
    _refuse(
        other | (rows.target_topic_id != topic_id),
        what="no such message waits here",
        remedy=_FOREIGN,
    )
    engine.submit(Recall(rows))
    return pa.Table.from_arrays([texts, message_id], schema=schema.RECALLED)


def _refuse(
    wrong: npt.NDArray[np.bool_],
    *,
    what: str = "the message was delivered or called back before",
    remedy: str = "Nothing was called back. Only another message can answer what was delivered.",
) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise RecallError(f"Row {row} cannot be called back: {what}.", remedy=remedy)


def _repeated(keys: Int64s) -> npt.NDArray[np.bool_]:
    repeated = np.ones(len(keys), dtype=np.bool_)
    repeated[np.unique(keys, return_index=True)[1]] = False
    return repeated
