"""The state tables as a model has them: dicts, changed event by event."""

import json
from dataclasses import dataclass, field
from typing import Any

from rmq_pipeline.store.database import Database
from rmq_pipeline.store.events import CONSUMPTION, REMOVES_ROW, Kind
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID
from tests.store.rows import Row, rows_of

#: Kinds that end the wait of a scheduled message.
ENDS_WAIT = [Kind.SCHEDULE_DELIVERED, Kind.SCHEDULE_DROPPED, Kind.SCHEDULE_RECALLED]
LEASE_COLUMNS = ("attempt", "visible_at_ms", "delivery", "epoch", "message_group_hash", "client_id")


@dataclass
class Model:
    """The state tables as dicts, changed event by event."""

    topics: dict[int, str] = field(default_factory=dict)
    groups: dict[int, str] = field(default_factory=dict)
    leases: dict[tuple[int, ...], tuple[Any, ...]] = field(default_factory=dict)
    cursors: dict[tuple[int, ...], int] = field(default_factory=dict)
    behind: dict[tuple[int, ...], int] = field(default_factory=dict)
    condemned: dict[tuple[int, ...], tuple[int, str | None]] = field(default_factory=dict)
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
        key = (*queue, row["queue_offset"])
        if kind in REMOVES_ROW:
            self.leases.pop(key, None)
        elif kind in CONSUMPTION:
            before = self.leases.get(key, (None,))[-1]
            state = (row[name] for name in LEASE_COLUMNS)
            self.leases[key] = (*state, row["detail"] or before)
        if kind in (Kind.LEASE, Kind.CURSOR, Kind.OFFSET_UPDATED):
            reached = row["queue_offset"] + (kind == Kind.LEASE)
            self.cursors[queue] = max(self.cursors.get(queue, 0), reached)
        elif kind == Kind.BEHIND:
            self.behind[(*queue, row["message_group_hash"])] = row["queue_offset"]
        elif kind == Kind.CAUGHT_UP:
            self.behind.pop((*queue, row["message_group_hash"]), None)
        elif kind == Kind.CONDEMN:
            given_up = (row["queue_offset"], row["detail"])
            self.condemned[(*queue, row["message_group_hash"])] = given_up
        elif kind == Kind.PARDON:
            self.condemned.pop((*queue, row["message_group_hash"]), None)
        elif kind == Kind.RESET:
            self.cursors[queue] = row["queue_offset"]
            self.forget(lambda key: key[:3] == queue, leases=True)
        elif kind in ENDS_WAIT:
            place = (row["queue_id"], row["queue_offset"])
            return self.scheduled.pop(place, None) is not None
        elif kind == Kind.SETTLED:
            return self.take_settled(json.loads(row["detail"]))
        else:
            self.take_other(kind, row)
        return True

    def take_settled(self, said: Row) -> bool:
        kept = self.windows.get(said["window"])
        if kept is not None:
            self.windows[said["window"]] = (*kept[:3], said["settle_id"], said["answer"])
        return kept is not None

    def take_other(self, kind: Kind, row: Row) -> None:
        if kind == Kind.TOPIC:
            self.topics[row["topic_id"]] = row["detail"]
        elif kind == Kind.GROUP:
            self.groups[row["group_id"]] = row["detail"]
        elif kind == Kind.TOPIC_DELETED:
            self.dead.add(("topic", row["topic_id"]))
        elif kind == Kind.GROUP_DELETED:
            self.dead.add(("group", row["group_id"]))
        elif kind in (Kind.WINDOW, Kind.WINDOW_CLOSED):
            owner, _, _, *settled = self.windows.get(row["detail"], ("", 0, 0, "", ""))
            expires = row["visible_at_ms"] if kind == Kind.WINDOW else 0
            window = (row["client_id"] or owner, row["epoch"], expires, *settled)
            self.windows[row["detail"]] = window

    def forget(self, condition: Any, *, leases: bool = False, cursors: bool = False) -> None:
        tables: list[dict[Any, Any]] = [self.behind, self.condemned]
        tables += [self.leases] if leases else []
        tables += [self.cursors] if cursors else []
        for table in tables:
            for key in [key for key in table if condition(key)]:
                del table[key]

    def end(self) -> None:
        """What is dead is gone."""
        for what, number in self.dead:
            place = 0 if what == "group" else 1
            self.forget(lambda key, n=number, p=place: key[p] == n, leases=True, cursors=True)
            (self.groups if what == "group" else self.topics).pop(number, None)
            if what == "topic":
                self.heads = {key: v for key, v in self.heads.items() if key[0] != number}


def state_of(database: Database) -> Model:
    """The state tables as a model."""
    stored = database.load_state()
    n = len(LEASE_COLUMNS) + 1  # and the last failure
    windows = {
        name: (*kept, settle_id, json.loads(answer) if answer else "")
        for name, *kept, settle_id, answer in rows_of(stored.windows)
    }
    return Model(
        topics=dict(rows_of(stored.topics)),
        groups=dict(rows_of(stored.groups)),
        leases={row[:-n]: row[-n:] for row in rows_of(stored.leases)},
        cursors={row[:-1]: row[-1] for row in rows_of(stored.cursors)},
        behind={row[:-1]: row[-1] for row in rows_of(stored.behind)},
        condemned={row[:-2]: row[-2:] for row in rows_of(stored.condemned)},
        scheduled={row[:2]: row[2] for row in rows_of(stored.scheduled)},
        heads={row[:2]: row[2:] for row in rows_of(stored.heads)},
        windows=windows,
    )
