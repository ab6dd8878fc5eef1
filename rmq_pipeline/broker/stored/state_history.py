"""History of keyed state: seal writes it to files; reads join the files and the unsealed log."""

import numpy as np
import pyarrow as pa

from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.queries import Offsets
from rmq_pipeline.broker.stored.placement import ends_at
from rmq_pipeline.broker.stored.sealed import segments_of
from rmq_pipeline.errors import TableSchemaError
from rmq_pipeline.message import hash64
from rmq_pipeline.sound_tables import sound
from rmq_pipeline.store import state_history
from rmq_pipeline.store.state_history import HISTORY, PLACES, Owner
from rmq_pipeline.tables import columns_of

#: Kind of a row in the answer: state before, state after, or start of a group without one.
BEFORE, AFTER, BEGINS = "before", "after", "begins"


def keep(engine: Engine, *, start: int, end: int) -> None:
    """Write the states of the log in [start, end), before it is sealed.

    States older than ``state_retention_ms`` are dropped, except the newest of each message group.

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
    """Return the keyed state of message groups before and after a range of offsets of each.

    Raises:
        TableSchemaError: ``places`` lacks a column, or has a null.
        StorageError: the history cannot be read.
    """
    owner = Owner(engine.state.group(group).group_id, engine.state.topic(topic).topic.topic_id)
    if missing := set(PLACES.names) - set(sound(places, "places").column_names):
        raise TableSchemaError(f"Column {min(missing)} is missing in the places.")
    places = pa.table(columns_of(places.select(PLACES.names), PLACES), schema=PLACES)
    if empty := [name for name in PLACES.names if places[name].null_count]:
        raise TableSchemaError(f"Column {empty[0]} of the places has a null.")
    hashes = hash64(pa.concat_arrays(places["message_group"].chunks or [pa.array([], pa.string())]))
    segments = segments_of(engine)
    bounds = engine.submit(Offsets(topic))[1]
    # A seal that ends meanwhile would drop the log that is read here.
    with segments.sealing:
        # The states come from the log; the starts of message groups come from DuckDB.
        engine.dispatched(ends_at(engine, topic_id=owner.topic_id, bounds=bounds))
        sealed_to = segments.sealed_to
        frames = engine.log.frames(sealed_to, engine.log.end)
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
