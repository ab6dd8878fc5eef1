"""Calling back scheduled messages before they are delivered."""

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class FindScheduled(Request):
    """A question: which of these places hold a message that still waits."""

    keys: Int64s

    def decide(self, state: State, now_ms: int) -> Decision:
        """Nothing is stored; the answer is (rows, which of the places they are)."""
        return Decision(state.schedule.find(self.keys))


@dataclass(frozen=True, slots=True)
class Recall(Request):
    """The end of the wait of messages that are not to be delivered."""

    rows: Scheduled

    def decide(self, state: State, now_ms: int) -> Decision:
        """All of them still wait, or none is called back."""
        _refuse(~state.schedule.open(self.rows.keys()))
        return Decision(events=ended_events(Kind.SCHEDULE_RECALLED, self.rows, now_ms=now_ms))


def recall(engine: Engine, topic: str, *, handles: pa.Table) -> pa.Table:
    """Call back scheduled messages of a topic, all of them or none.

    Returns:
        schema.RECALLED, in the order of the handles.

    Raises:
        RecallError: one was delivered or called back before, is of another topic, or unknown.
    """
    texts = columns_of(handles, schema.RECALL)["recall_handle"]
    wanted = recall_handle.decode(texts)
    topic_id = engine.state.topic(topic).topic.topic_id
    if not len(wanted):
        return schema.RECALLED.empty_table()
    _refuse(wanted.topic_id != topic_id, what=f"it is none of topic {topic}")
    keys = keys_of(wanted.queue_id, wanted.queue_offset)
    _refuse(_repeated(keys), what="it is there twice")
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
    _refuse(other | (rows.target_topic_id != topic_id), what="no such message waits here")
    engine.submit(Recall(rows))
    return pa.Table.from_arrays([texts, message_id], schema=schema.RECALLED)


def _refuse(
    wrong: npt.NDArray[np.bool_], *, what: str = "the message was delivered or called back before"
) -> None:
    if wrong.any():
        raise RecallError(f"Row {int(np.argmax(wrong))} cannot be called back: {what}.")


def _repeated(keys: Int64s) -> npt.NDArray[np.bool_]:
    repeated = np.ones(len(keys), dtype=np.bool_)
    repeated[np.unique(keys, return_index=True)[1]] = False
    return repeated
