"""The state tables as a model has them: dicts, changed event by event."""

import json
from dataclasses import dataclass, field
from typing import Any

from rmq_pipeline.store.database import Database
from rmq_pipeline.store.events import Kind
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID
from tests.store.rows import Row, rows_of

#: Kinds that end the wait of a scheduled message.
ENDS_WAIT = [Kind.SCHEDULE_DELIVERED, Kind.SCHEDULE_DROPPED, Kind.SCHEDULE_RECALLED]
QUEUE = ("group_id", "topic_id", "queue_id")


@dataclass(frozen=True)
class Rule:
    """What events do to a regular table, written down apart from the table's declaration."""

    key: tuple[str, ...]
    #: Columns of the event that has the row's values, in the order in which recovery reads them.
    values: tuple[str, ...]
    sets: tuple[Kind, ...]
    removes: tuple[Kind, ...] = ()
    is_reset: bool = False
    #: A column whose value stays when an event has none.
    kept: str = ""
    #: Values with which there is no row.
    none: tuple[str, ...] = ()


REGULAR = {
    "topics": Rule(("topic_id",), ("detail",), (Kind.TOPIC,)),
    "groups": Rule(("group_id",), ("detail",), (Kind.GROUP,)),
    "leases": Rule(
        (*QUEUE, "queue_offset"),
        (
            *("attempt", "visible_at_ms", "delivery", "epoch", "message_group_hash"),
            *("client_id", "detail"),
        ),
        (
            *(Kind.LEASE, Kind.RETRY, Kind.RELEASE, Kind.EXPIRE, Kind.INVISIBLE, Kind.PARK),
            Kind.ACK_AHEAD,
        ),
        (Kind.ACK, Kind.DEAD_LETTER),
        is_reset=True,
        kept="detail",
    ),
    "behind": Rule(
        (*QUEUE, "message_group_hash"),
        ("queue_offset",),
        (Kind.BEHIND,),
        (Kind.CAUGHT_UP,),
        is_reset=True,
    ),
    "quarantined_groups": Rule(
        (*QUEUE, "message_group_hash"),
        ("queue_offset", "detail"),
        (Kind.QUARANTINE,),
        (Kind.LIFT,),
        is_reset=True,
    ),
    "lite_subscriptions": Rule(
        ("group_id", "topic_id", "client_id"),
        ("detail",),
        (Kind.LITE_SUBSCRIPTION,),
        none=("[]",),
    ),
    "queue_locks": Rule(
        QUEUE,
        ("client_id", "visible_at_ms", "epoch", "at_ms"),
        (Kind.QUEUE_LOCKED,),
        (Kind.QUEUE_UNLOCKED,),
    ),
}


@dataclass
class Model:
    """The state tables as dicts, changed event by event."""

    #: Of each regular table, by its key: the values that recovery reads.
    regular: dict[str, dict[tuple[Any, ...], tuple[Any, ...]]] = field(
        default_factory=lambda: {name: {} for name in REGULAR}
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
        for name, rule in REGULAR.items():
            take_last(self.regular[name], rule, kind, row)
        if kind in (Kind.LEASE, Kind.CURSOR, Kind.OFFSET_UPDATED):
            reached = row["queue_offset"] + (kind == Kind.LEASE)
            self.cursors[queue] = max(self.cursors.get(queue, 0), reached)
        elif kind == Kind.RESET:
            self.cursors[queue] = row["queue_offset"]
            for name, rule in REGULAR.items():
                if rule.is_reset:
                    forget(self.regular[name], lambda key: key[:3] == queue)
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
            for name, rule in REGULAR.items():
                if what in rule.key:
                    place = rule.key.index(what)
                    forget(self.regular[name], lambda key, n=number, p=place: key[p] == n)
            place = ("group_id", "topic_id").index(what)
            forget(self.cursors, lambda key, n=number, p=place: key[p] == n)
            if what == "topic_id":
                forget(self.heads, lambda key, n=number: key[0] == n)


def take_last(
    rows: dict[tuple[Any, ...], tuple[Any, ...]], rule: Rule, kind: Kind, row: Row
) -> None:
    """Take an event into a table whose rows are the last events of their keys."""
    key = tuple(row[name] for name in rule.key)
    if kind in rule.removes:
        rows.pop(key, None)
    elif kind in rule.sets:
        before = rows.get(key, (None,) * len(rule.values))
        rows[key] = tuple(
            (row[name] or old) if name == rule.kept else row[name]
            for name, old in zip(rule.values, before, strict=True)
        )
        if rows[key] == rule.none:
            del rows[key]


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
    for name, rule in REGULAR.items():
        n = len(rule.key)
        regular[name] = {row[:n]: row[n:] for row in rows_of(getattr(stored, name))}
    return Model(
        regular=regular,
        cursors={row[:-1]: row[-1] for row in rows_of(stored.cursors)},
        scheduled={row[:2]: row[2] for row in rows_of(stored.scheduled)},
        heads={row[:2]: row[2:] for row in rows_of(stored.heads)},
        windows=windows,
    )
