"""Keyed state as it was: kept by seal, and found again in its files and in the log after them."""

import numpy as np
import pyarrow as pa

from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.stored.sealed import segments_of
from rmq_pipeline.errors import TableSchemaError
from rmq_pipeline.message import hash64
from rmq_pipeline.store import state_history
from rmq_pipeline.store.state_history import HISTORY, PLACES, Owner

#: Which of the answer's rows are states before, and after; and where a group without one begins.
BEFORE, AFTER, BEGINS = "before", "after", "begins"


def keep(engine: Engine, *, start: int, end: int) -> None:
    """Write the states that the log has in [start, end), which is about to be sealed.

    Of those that are older than the setting says, only the newest of each message group stay.

    Raises:
        OSError: writing failed.
    """
    if not engine.database.has_keyed_state():
        return
    folder = engine.home.path / "state"
    groups, topics = engine.state.groups, engine.state.topics
    state_history.forget(folder, groups=groups.keys(), topics=topics.keys())
    retention_ms = engine.settings.state_retention_ms
    if retention_ms is not None:
        state_history.expire(folder, before_ms=engine.clock.now_ms() - retention_ms)
    found = state_history.of_frames(engine.log.frames(start, end))
    alive = {
        owner: tables
        for owner, tables in found.items()
        if owner.group_id in groups and owner.topic_id in topics
    }
    state_history.write(folder, alive, start=start, end=end)


def keyed_state_history(engine: Engine, group: str, *, topic: str, places: pa.Table) -> pa.Table:
    """The keyed state of message groups before and after a stretch of each.

    Raises:
        TableSchemaError: ``places`` lacks a column.
        StorageError: the history cannot be read.
    """
    owner = Owner(engine.state.group(group).group_id, engine.state.topic(topic).topic.topic_id)
    if missing := set(PLACES.names) - set(places.column_names):
        raise TableSchemaError(f"Column {min(missing)} is missing in the places.")
    places = places.select(PLACES.names).cast(PLACES).combine_chunks()
    hashes = hash64(pa.concat_arrays(places["message_group"].chunks or [pa.array([], pa.string())]))
    segments = segments_of(engine)
    # A seal that ends meanwhile would drop the log that is looked through here.
    with segments.sealing:
        engine.dispatched()
        sealed_to = segments.sealed_to
        frames = engine.log.frames(sealed_to, engine.log.synced)
        found = state_history.around(
            engine.home.path / "state",
            owner,
            sealed_to=sealed_to,
            unsealed=state_history.of_frames(frames).get(owner, []),
            places=places,
            hashes=hashes,
        )
    before, after = found or (HISTORY.empty_table(), HISTORY.empty_table())
    known = np.isin(hashes, before["message_group_hash"].to_numpy())
    begins = engine.database.first_of_groups(owner.topic_id, hashes=hashes[~known])
    named = dict(zip(hashes.tolist(), places["message_group"].to_pylist(), strict=True))
    begins = begins.add_column(
        0, "message_group", pa.array([named[h] for h in begins["message_group_hash"].to_pylist()])
    )
    parts = [
        table.add_column(0, "moment", pa.repeat(pa.scalar(moment), table.num_rows))
        for moment, table in ((BEFORE, before), (AFTER, after), (BEGINS, begins))
    ]
    return pa.concat_tables(parts, promote_options="permissive")
