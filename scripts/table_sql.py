"""The SQL that follows from the declared state tables: ``rmq_pipeline/store/sql/tables``."""

import textwrap
from collections.abc import Iterable
from typing import Final

from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.state_tables import STATE_TABLES, Column, StateTable, quoted

_HEAD: Final = "-- Generated from store/state_tables.py by `make sql`; do not edit.\n"
_WIDTH: Final = 100
_QUEUE: Final = ("group_id", "topic_id", "queue_id")
#: Columns of a snapshot, and their types: those of an event, and two of other tables.
_SNAPSHOT: Final = {
    "at_ms": "BIGINT",
    "group_id": "INTEGER",
    "topic_id": "INTEGER",
    "queue_id": "INTEGER",
    "queue_offset": "BIGINT",
    "attempt": "INTEGER",
    "visible_at_ms": "BIGINT",
    "delivery": "BIGINT",
    "epoch": "BIGINT",
    "message_group_hash": "BIGINT",
    "client_id": "VARCHAR",
    "detail": "VARCHAR",
    "min_offset": "BIGINT",
    "target_topic_id": "INTEGER",
}


def files() -> dict[str, str]:
    """Return the text of each generated file by its name."""
    found = {f"{table.name}.sql": _file(table) for table in STATE_TABLES}
    found["snapshot.sql"] = _HEAD + "\n" + _snapshot()
    return found


def _file(table: StateTable) -> str:
    parts = [_create(table)]
    if table.is_regular:
        parts += [_fold(table), *(_fold_kept(table, each) for each in table.kept_columns)]
        parts += [_delete(table), _insert(table)]
        if table.is_reset:
            parts.append(_reset(table))
    parts.append(_load(table))
    if table.is_regular and table.in_snapshots:
        parts.append(_at(table))
        parts += [_kept_at(table, each) for each in table.kept_columns]
        parts += [_with_kept_at(table, each) for each in table.kept_columns]
    return _HEAD + "\n" + "\n".join(parts)


def _create(table: StateTable) -> str:
    columns = [f"{name} {of_type}" for name, of_type in table.key]
    columns += [f"{quoted(column.name)} {column.type}" for column in table.columns]
    notes = [table.notes] if table.notes else []
    return _statement(
        f"create_{table.name}",
        "In: nothing. Out: the table.",
        *notes,
        f"A row: {table.row}",
        f"Written by: {table.written_by or _names(table.sets) + ': the last one of a key.'}",
        f"Goes: {table.goes or _goes(table)}",
        sql=f"CREATE TABLE IF NOT EXISTS store.{table.name} (\n{_listed(columns)}\n)",
    )


def _goes(table: StateTable) -> str:
    ends = sorted(kind.name for kind in table.removes)
    ends += ["RESET"] * table.is_reset
    ends += ["TOPIC_DELETED"] * table.belongs_to("topic_id")
    ends += ["GROUP_DELETED"] * table.belongs_to("group_id")
    unless = f", or without {table.condition}" if table.condition else ""
    return f"with {', '.join(ends)}{unless}."


def _fold(table: StateTable) -> str:
    columns = ["kind", *table.key_names]
    columns += [_as(each.of_event, each.name) for each in table.columns if not each.is_kept]
    key = ", ".join(table.key_names)
    return _statement(
        f"fold_{table.name}",
        f"In: staged_events. Out: net_{table.name}, the last event of each key.",
        sql=(
            f"CREATE OR REPLACE TEMP TABLE net_{table.name} AS\n"
            f"{_select(columns)}\n"
            "FROM staged_events\n"
            "WHERE seq IN (\n"
            f"    SELECT max(seq) FROM staged_events WHERE {_among(table.kinds)}\n"
            f"    GROUP BY {key}\n"
            ")"
        ),
    )


def _fold_kept(table: StateTable, column: Column) -> str:
    key = ", ".join(table.key_names)
    return _statement(
        f"fold_{table.name}_{column.name}",
        f"In: staged_events, net_{table.name}. Out: net_{table.name}_{column.name}: of each row "
        "that stays, the last value after which the row was not removed.",
        sql=(
            f"CREATE OR REPLACE TEMP TABLE net_{table.name}_{column.name} AS\n"
            f"SELECT {key}, nullif(arg_max({column.name}, seq), '') AS {column.name}\n"
            "FROM (\n"
            f"{textwrap.indent(_said(table, column, 'staged_events'), '    ')}\n"
            "    UNION ALL\n"
            f"    SELECT {key}, -1, {column.name}\n"
            f"    FROM store.{table.name} WHERE {column.name} IS NOT NULL\n"
            ")\n"
            "SEMI JOIN (\n"
            f"    SELECT {key}\n"
            f"    FROM net_{table.name} WHERE {_among(table.removes, negated=True)}\n"
            f") USING ({key})\n"
            f"GROUP BY {key}"
        ),
    )


def _said(table: StateTable, column: Column, events: str) -> str:
    """Select the values that events give a kept column; empty where an event removed the row."""
    removed = _among(table.removes)
    return (
        f"SELECT {', '.join(table.key_names)}, seq,\n"
        f"       CASE WHEN {removed} THEN '' ELSE {column.of_event} END AS {column.name}\n"
        f"FROM {events}\n"
        f"WHERE {_among(table.kinds)}\n"
        f"  AND ({column.of_event} IS NOT NULL OR {removed})"
    )


def _delete(table: StateTable) -> str:
    return _statement(
        f"delete_{table.name}",
        f"In: net_{table.name}. Out: the rows that it replaces or removes are deleted.",
        sql=(
            f"DELETE FROM store.{table.name} AS t USING net_{table.name} AS n\n"
            f"WHERE {_same(table.key_names)}"
        ),
    )


def _insert(table: StateTable) -> str:
    columns = [*table.key_names, *(quoted(column.name) for column in table.columns)]
    key = ", ".join(table.key_names)
    kept = [f"net_{table.name}_{column.name}" for column in table.kept_columns]
    joined = "".join(f" LEFT JOIN {each} USING ({key})" for each in kept)
    staying = [_among(table.removes, negated=True)] if table.removes else []
    staying += [table.condition] if table.condition else []
    where = f"\nWHERE {' AND '.join(staying)}" if staying else ""
    return _statement(
        f"insert_{table.name}",
        f"In: {', '.join((f'net_{table.name}', *kept))}. Out: the rows that stay.",
        sql=(
            f"INSERT INTO store.{table.name} BY NAME\n"
            f"{_select(columns)}\n"
            f"FROM net_{table.name}{joined}{where}"
        ),
    )


def _reset(table: StateTable) -> str:
    return _statement(
        f"reset_{table.name}",
        "In: staged_events, all RESET. Out: no rows of those queues.",
        sql=(
            f"DELETE FROM store.{table.name} AS t USING staged_events AS n\nWHERE {_same(_QUEUE)}"
        ),
    )


def _load(table: StateTable) -> str:
    columns = [*table.key_names]
    columns += [quoted(column.name) for column in table.columns if column.is_loaded]
    order = ", ".join(table.order or table.key_names)
    return _statement(
        f"state_{table.name}",
        "In: nothing. Out: what recovery reads.",
        sql=f"{_select(columns)}\nFROM store.{table.name} ORDER BY {order}",
    )


def _at(table: StateTable) -> str:
    columns = [column for column in table.columns if not column.is_kept]
    said = ["seq", "kind", *table.key_names, *(_as(each.of_event, each.name) for each in columns)]
    kept = [f"${min(table.sets).name} AS kind", *table.key_names]
    kept += [_as(each.of_snapshot, each.name) for each in columns]
    key = ", ".join(table.key_names)
    reset = ""
    if table.is_reset:
        reset = (
            "\nANTI JOIN store.resets_at(ms) AS r\n"
            f"    ON {_equal('r', 's', _QUEUE)}\n"
            "   AND r.seq > s.seq"
        )
    return _statement(
        f"at_{table.name}",
        f"In: nothing. Out: the macro store.{table.name}_at: the rows as of a moment.",
        sql=(
            f"CREATE OR REPLACE MACRO store.{table.name}_at(ms) AS TABLE\n"
            "WITH said AS (\n"
            f"{textwrap.indent(_select(said), '    ')}\n"
            f"    FROM store.events_at(ms) WHERE {_among(table.kinds)}\n"
            "    UNION ALL\n"
            f"{textwrap.indent(_select(['-1 AS seq', *kept]), '    ')}\n"
            f"    FROM store.snapshot_at(ms) WHERE what = '{table.in_snapshots}'\n"
            "),\n"
            "latest AS (\n"
            f"    SELECT {key}, max(seq) AS seq\n"
            f"    FROM said GROUP BY {key}\n"
            f"    HAVING arg_max({_among(table.removes, negated=True, of='kind, seq)')}\n"
            ")\n"
            "SELECT s.* EXCLUDE (kind)\n"
            "FROM said AS s\n"
            f"SEMI JOIN latest AS l\n    ON {_equal('l', 's', ('seq', *table.key_names))}{reset}"
        ),
    )


def _kept_at(table: StateTable, column: Column) -> str:
    key = ", ".join(table.key_names)
    said = _said(table, column, "store.events_at(ms)")
    return _statement(
        f"at_{table.name}_{column.name}",
        f"In: nothing. Out: the macro store.{table.name}_{column.name}_at: the last value of each "
        "row, as of a moment.",
        sql=(
            f"CREATE OR REPLACE MACRO store.{table.name}_{column.name}_at(ms) AS TABLE\n"
            f"SELECT {key}, nullif(arg_max({column.name}, seq), '') AS {column.name}\n"
            "FROM (\n"
            f"{textwrap.indent(said, '    ')}\n"
            "    UNION ALL\n"
            f"    SELECT {key}, -1, {column.of_snapshot}\n"
            f"    FROM store.snapshot_at(ms)\n"
            f"    WHERE what = '{table.in_snapshots}' AND {column.of_snapshot} IS NOT NULL\n"
            ") AS s\n"
            "ANTI JOIN store.resets_at(ms) AS r\n"
            f"    ON {_equal('r', 's', _QUEUE)}\n"
            "   AND r.seq > s.seq\n"
            f"GROUP BY {key}"
        ),
    )


def _with_kept_at(table: StateTable, column: Column) -> str:
    key = ", ".join(table.key_names)
    return _statement(
        f"at_{table.name}_with_{column.name}",
        f"In: nothing. Out: the macro store.{table.name}_with_{column.name}_at: both.",
        sql=(
            f"CREATE OR REPLACE MACRO store.{table.name}_with_{column.name}_at(ms) AS TABLE\n"
            f"SELECT t.*, k.{column.name}\n"
            f"FROM store.{table.name}_at(ms) AS t\n"
            f"LEFT JOIN store.{table.name}_{column.name}_at(ms) AS k\n"
            f"    USING ({key})"
        ),
    )


def _snapshot() -> str:
    """Return the statement that reads all tables as rows of a snapshot."""
    types = ["$position::BIGINT AS position", "NULL::VARCHAR AS what"]
    types += [f"NULL::{of_type} AS {name}" for name, of_type in _SNAPSHOT.items()]
    parts = [f"{_select(types)}\nWHERE false"]
    for table in STATE_TABLES:
        if table.in_snapshots:
            columns = ["$position AS position", f"'{table.in_snapshots}' AS what"]
            columns += [f"{value} AS {name}" for name, value in table.snapshot_constants]
            columns += table.key_names
            columns += [
                _as(each.name, each.of_snapshot)
                for each in table.columns
                if each.of_snapshot != "-"
            ]
            parts.append(f"{_select(columns)}\nFROM store.{table.name}")
    return _statement(
        "snapshot_rows",
        "In: $position, that of store.reached. Out: the state at this position, a row for each row "
        "of its tables, as an event that says the same would fill it; what is the table.",
        sql="\nUNION ALL BY NAME\n".join(parts),
    )


def _statement(name: str, *comments: str, sql: str) -> str:
    lines = [
        line
        for comment in comments
        for line in textwrap.wrap(
            comment, _WIDTH, initial_indent="-- ", subsequent_indent="-- ", break_long_words=False
        )
    ]
    return "\n".join([f"-- name: {name}", *lines, f"{sql};"]) + "\n"


def _select(columns: Iterable[str]) -> str:
    return "SELECT " + _listed(columns).strip().replace("\n", "\n   ")


def _listed(columns: Iterable[str]) -> str:
    """Return columns with commas, in lines that leave room for an indent."""
    # Blanks inside of a column must not break: "queue_id INTEGER" stays in one line.
    text = ", ".join(column.replace(" ", "\0") for column in columns)
    lines = textwrap.wrap(text, _WIDTH - 12, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent("\n".join(lines).replace("\0", " "), "    ")


def _as(source: str, name: str) -> str:
    name = quoted(name)
    return name if source == name else f"{source} AS {name}"


def _same(names: Iterable[str]) -> str:
    return _equal("t", "n", names, indent="  ")


def _equal(left: str, right: str, names: Iterable[str], indent: str = "   ") -> str:
    terms = " AND ".join(f"{left}.{name}\0=\0{right}.{name}" for name in names)
    lines = textwrap.wrap(terms.replace(" AND ", " AND\0"), _WIDTH - 12)
    joined = "\n".join(lines).replace("\0", " ")
    return joined.replace("\nAND ", f"\n{indent}AND ")


def _among(kinds: Iterable[Kind], *, negated: bool = False, of: str = "kind") -> str:
    numbers = sorted(map(int, kinds))
    if not negated and len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{of} BETWEEN ${Kind(numbers[0]).name} AND ${Kind(numbers[-1]).name}"
    if len(numbers) == 1:
        return f"{of} {'<>' if negated else '='} {_listing(kinds)}"
    return f"{of} {'NOT ' if negated else ''}IN ({_listing(kinds)})"


def _listing(kinds: Iterable[Kind]) -> str:
    return ", ".join(f"${kind.name}" for kind in sorted(kinds))


def _names(kinds: Iterable[Kind]) -> str:
    return ", ".join(kind.name for kind in sorted(kinds))
