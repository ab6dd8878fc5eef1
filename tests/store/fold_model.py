"""The state tables as a model has them: dicts, changed event by event."""

import json
from dataclasses import dataclass, field
from typing import Any

from rmq_pipeline.store.database import Database
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.state_tables import STATE_TABLES, StateTable
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID
from tests.store.rows import Row, rows_of

#: Kinds that end the wait of a scheduled message.
ENDS_WAIT = [Kind.SCHEDULE_DELIVERED, Kind.SCHEDULE_DROPPED, Kind.SCHEDULE_RECALLED]
#: Values of a row that is not kept, by table: the conditions of the declarations.
NOT_KEPT = {"lite_subscriptions": ("[]",)}
REGULAR = [table for table in STATE_TABLES if table.is_regular]


@dataclass
class Model:
    """The state tables as dicts, changed event by event."""

    #: Of each regular table, by its key: the values that recovery reads.
    regular: dict[str, dict[tuple[Any, ...], tuple[Any, ...]]] = field(
        default_factory=lambda: {table.name: {} for table in REGULAR}
    )
    cursors: dict[tuple[int, ...], int] = field(default_factory=dict)
    scheduled: dict[tuple[int, ...], int] = field(default_factory=dict)
    heads: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    windows: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    #: Forgotten at the end of a transaction as it is at once: their ids are never used again.
    dead: set[tuple[str, int]] = field(default_factory=set)

    def take_message(self, row: Row) -> None:
        queue = (row["topic_id"], row["queue_id"])
        low, _ = self.heads.get(queue, (row["queue_offset"], 0))
        self.heads[queue] = (low, row["queue_offset"] + 1)
        if row["topic_id"] == SCHEDULE_TOPIC_ID:
            self.scheduled[(row["queue_id"], row["queue_offset"])] = row["deliver_at_ms"]

    def take_event(self, row: Row) -> bool:
        """Whether a broker could say this now; if so, it is taken in."""
        kind = Kind(row["kind"])
        queue = (row["group_id"], row["topic_id"], row["queue_id"])
        for table in REGULAR:
            self.take_last(table, kind, row)
        if kind in (Kind.LEASE, Kind.CURSOR, Kind.OFFSET_UPDATED):
            reached = row["queue_offset"] + (kind == Kind.LEASE)
            self.cursors[queue] = max(self.cursors.get(queue, 0), reached)
        elif kind == Kind.RESET:
            self.cursors[queue] = row["queue_offset"]
            for table in REGULAR:
                if table.is_reset:
                    forget(self.regular[table.name], lambda key: key[:3] == queue)
        elif kind in ENDS_WAIT:
            place = (row["queue_id"], row["queue_offset"])
            return self.scheduled.pop(place, None) is not None
        elif kind == Kind.SETTLED:
            return self.take_settled(json.loads(row["detail"]))
        else:
            self.take_other(kind, row)
        return True

    def take_last(self, table: StateTable, kind: Kind, row: Row) -> None:
        rows = self.regular[table.name]
        key = tuple(row[name] for name in table.key_names)
        if kind in table.removes:
            rows.pop(key, None)
        elif kind in table.sets:
            loaded = [column for column in table.columns if column.is_loaded]
            before = rows.get(key, (None,) * len(loaded))
            rows[key] = tuple(
                (row[column.of_event] or old) if column.is_kept else row[column.of_event]
                for column, old in zip(loaded, before, strict=True)
            )
            if rows[key] == NOT_KEPT.get(table.name):
                del rows[key]

    def take_settled(self, said: Row) -> bool:
        kept = self.windows.get(said["window"])
        if kept is not None:
            self.windows[said["window"]] = (*kept[:3], said["settle_id"], said["answer"])
        return kept is not None

    def take_other(self, kind: Kind, row: Row) -> None:
        if kind == Kind.TOPIC_DELETED:
            self.dead.add(("topic_id", row["topic_id"]))
        elif kind == Kind.GROUP_DELETED:
            self.dead.add(("group_id", row["group_id"]))
        elif kind in (Kind.WINDOW, Kind.WINDOW_CLOSED):
            owner, _, _, *settled = self.windows.get(row["detail"], ("", 0, 0, "", ""))
            expires = row["visible_at_ms"] if kind == Kind.WINDOW else 0
            window = (row["client_id"] or owner, row["epoch"], expires, *settled)
            self.windows[row["detail"]] = window

    def end(self) -> None:
        """What is dead is gone."""
        for what, number in self.dead:
            for table in REGULAR:
                if what in table.key_names:
                    place = table.key_names.index(what)
                    forget(self.regular[table.name], lambda key, n=number, p=place: key[p] == n)
            place = ("group_id", "topic_id").index(what)
            forget(self.cursors, lambda key, n=number, p=place: key[p] == n)
            if what == "topic_id":
                forget(self.heads, lambda key, n=number: key[0] == n)


def forget(table: dict[Any, Any], condition: Any) -> None:
    """Delete the rows whose keys are meant."""
    for key in [key for key in table if condition(key)]:
        del table[key]


def state_of(database: Database) -> Model:
    """The state tables as a model."""
    stored = database.load_state()
    windows = {
        name: (*kept, settle_id, json.loads(answer) if answer else "")
        for name, *kept, settle_id, answer in rows_of(stored.windows)
    }
    regular = {}
    for table in REGULAR:
        n = len(table.key)
        regular[table.name] = {row[:n]: row[n:] for row in rows_of(getattr(stored, table.name))}
    return Model(
        regular=regular,
        cursors={row[:-1]: row[-1] for row in rows_of(stored.cursors)},
        scheduled={row[:2]: row[2] for row in rows_of(stored.scheduled)},
        heads={row[:2]: row[2:] for row in rows_of(stored.heads)},
        windows=windows,
    )
