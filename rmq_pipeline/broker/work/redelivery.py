"""Redelivery: revive of ended leases, unpark of parked messages, redrive of dead letters."""

from typing import Any, Final

import numpy as np
import pyarrow as pa

from rmq_pipeline import limits, schema
from rmq_pipeline.broker.decide.redeliver import Revive
from rmq_pipeline.broker.decide.redrive import Origins, Redrive, Unpark, Unparked
from rmq_pipeline.broker.work.dead_letter import AT_ONCE, dead_letter_exhausted, told
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.queries import asked_groups
from rmq_pipeline.broker.work.reading import held
from rmq_pipeline.broker.work.waiting import LongPoll
from rmq_pipeline.errors import IllegalOffsetError, RequestError, TableSchemaError
from rmq_pipeline.message import Int32s, Int64s, hash64
from rmq_pipeline.tables import columns_of

#: No topic has this id, so no message wakes the wait: only its timeout does.
_NO_TOPIC = -1
OUTCOMES: Final = pa.array(["redriven", "already", "gone"])


def revive(
    engine: Engine, *, wait_ms: int, limit: int, window: tuple[str, int] | None
) -> dict[str, Any]:
    """Revive leases that have ended or end within ``wait_ms``.

    Returns:
        revived, parked, dead_lettered, next_visible_ms; dead_letter_failures: number of messages
        that cannot be dead-lettered because reading or copying them fails.

    Raises:
        OperatorError, LookupError: a message cannot be dead-lettered and no call has reported it
            yet. All other work is done.
    """
    poll = LongPoll(engine.wakeups, wait_ms=wait_ms)
    failures, revived, parked, dead_lettered = engine.dead_letter_failures, 0, 0, 0
    while True:
        now_ms = poll.look(_NO_TOPIC)
        some, held, exhausted, next_visible = engine.submit(Revive(limit - revived, window))
        revived += some
        parked += held
        if exhausted or failures:
            again = failures.take_time(now_ms)
            dead_lettered += dead_letter_exhausted(engine, None, limit=AT_ONCE, again=again).n
        if revived >= limit or poll.is_over:
            _tell(failures.take_untold())
            return {
                "revived": revived,
                "parked": parked,
                "dead_lettered": dead_lettered,
                "next_visible_ms": next_visible,
                "dead_letter_failures": len(failures),
                "unburied": len(failures),  # the earlier name, for one release
            }
        # A new lease wakes no waiter. Look again after one second, the precision the job promises.
        again_ms = now_ms + 1000
        poll.wait(until_ms=again_ms if next_visible is None else min(again_ms, next_visible))


def _tell(error: Exception | None) -> None:
    """Raise the error, if any; each failed message is reported by one call only."""
    if error is not None:
        raise told(error)


def redrive(engine: Engine, group: str, *, dead_letters: pa.Table, redrive_id: str) -> pa.Table:
    """Find the origins of dead letters and redrive them; return schema.REDRIVEN.

    Raises:
        IllegalOffsetError: one of the places is no dead letter of the group.
        RequestError: the id is empty or too long, or the table has more than limits.REDRIVE_ROWS
            rows.
    """
    checked_id(redrive_id)
    dead_topic_id = engine.state.group(group).dead_letter_topic_id
    columns = columns_of(dead_letters, schema.DEAD_LETTER)
    if len(columns["queue_id"]) > limits.REDRIVE_ROWS:
        raise RequestError(f"One redrive may take {limits.REDRIVE_ROWS} dead letters at most.")
    for name, column in columns.items():
        if column.null_count:
            raise TableSchemaError(f"Column {name} of the dead letters has a null.")
    queue_id = columns["queue_id"].to_numpy()
    offset = columns["queue_offset"].to_numpy()
    # Dispatch stores a dead letter's origin in DuckDB before the dead letter itself.
    letters = held(engine, topic_id=dead_topic_id, queue_id=queue_id, offset=offset)
    engine.dispatched(int(letters.position.max(initial=-1)))
    found = engine.database.dead_letter_origins(
        dead_topic_id, queue_id=queue_id, queue_offset=offset
    )
    _check_all_found(found, queue_id, group=group, offset=offset)
    origins = Origins(
        queue_id,
        offset,
        found.column("topic_id").fill_null(0).to_numpy(),
        found.column("queue_id").fill_null(-1).to_numpy(),
        found.column("queue_offset").fill_null(-1).to_numpy(),
        found.column("message_group_hash").fill_null(0).to_numpy(),
        found.column("topic").to_pylist(),
        found.column("message_id").to_pylist(),
    )
    codes = engine.submit(Redrive(group, redrive_id, origins)) if len(origins) else []
    outcome = OUTCOMES.take(pa.array(codes, pa.int8()))
    return pa.table([queue_id, offset, outcome], schema=schema.REDRIVEN)


def checked_id(redrive_id: object) -> None:
    """Check a redrive_id.

    Raises:
        RequestError: it is not a text of 1 to 127 printable characters.
    """
    if not isinstance(redrive_id, str) or not redrive_id.isprintable():
        raise RequestError(f"A redrive_id must be a printable text, not {redrive_id!r}.")
    if not 1 <= len(redrive_id) <= limits.REDRIVE_ID_LENGTH:
        raise RequestError(f"A redrive_id must have 1 to {limits.REDRIVE_ID_LENGTH} characters.")


def _check_all_found(found: pa.Table, queue_id: Int32s, *, group: str, offset: Int64s) -> None:
    if found.num_rows == len(offset):
        return
    missing = np.setdiff1d(np.arange(len(offset)), found.column("ordinal").to_numpy())
    row = int(missing[0])
    raise IllegalOffsetError(
        f"{len(missing)} of {len(offset)} places are not dead letters of group {group}, the first"
        f" in row {row} (queue {queue_id[row]}, offset {offset[row]}).",
        remedy="Take places from the view dead_letters, or `rmq dead-letters list`.",
    )


def unpark(
    engine: Engine,
    group: str,
    *,
    topic: str | None,
    message_groups: pa.Table | None,
    skip: bool,
) -> dict[str, int]:
    """Unpark, and dead-letter the skipped messages at once."""
    hashes = None if message_groups is None else _hashes(message_groups)
    unparked: Unparked = engine.submit(Unpark(group, topic, hashes, skip))
    if unparked.exhausted:
        dead_letter_exhausted(engine, unparked.exhausted)
    return {
        "unparked": unparked.unparked,
        "skipped": unparked.skipped,
        "lifted": unparked.lifted,
        "pardoned": unparked.lifted,  # the earlier name, for one release
    }


def _hashes(message_groups: pa.Table) -> Int64s:
    names = asked_groups(message_groups)
    if not len(names):
        return np.zeros(0, dtype=np.int64)
    return np.unique(hash64(names.drop_null()))
