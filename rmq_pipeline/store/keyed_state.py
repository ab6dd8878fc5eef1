"""Keyed state in DuckDB: one table for each (group, topic), with the consumer's own columns."""

from collections.abc import Callable
from typing import Final

import duckdb
import pyarrow as pa

from rmq_pipeline.message import Int64s
from rmq_pipeline.state_columns import converted, folded, newest, telling
from rmq_pipeline.store.statements import named, quoted

_TRIED: Final = "tried"


class KeyedState:
    """The tables of keyed state, as changed by dispatch inside its transactions."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        #: The views of all tables; None until they are first read.
        self._views: dict[tuple[int, int], str] | None = None
        #: Columns of each table by folded name, cached until a column changes.
        self._columns: dict[tuple[int, int], dict[str, pa.Field]] = {}

    def forget(self) -> None:
        """Discard cached names and columns, as after a rollback."""
        self._views = None
        self._columns.clear()

    def fold(self, rows: pa.Table, *, group_id: int, topic_id: int) -> None:
        """Apply rows of one schema in order: the last row of a message group is its state.

        If a column's type has changed, its values are converted; a value that cannot be converted
        becomes null.
        """
        table = qualified(group_id, topic_id)
        known = self._known(group_id, topic_id)
        rows = telling(rows, known)
        self._connection.register("staged_state", rows)
        self._connection.execute(named("fold_state"))
        if not known or newest(pa.schema(list(known.values())), rows.schema) != known:
            self._shape(rows.schema, group_id=group_id, topic_id=topic_id)
        self._connection.execute(named("delete_state", table=table))
        self._connection.execute(named("insert_state", table=table))
        self._connection.unregister("staged_state")

    def drop_deleted(self) -> None:
        """Drop the tables of the topics and groups that staged_events deletes."""
        rows = self._connection.sql(named("forgotten_state")).fetchall()
        for group_id, topic_id, view in rows:
            self._connection.execute(named("drop_state_view", view=quoted(view)))
            self._connection.execute(named("drop_state", table=qualified(group_id, topic_id)))
        if rows:
            self.forget()

    def _all_views(self) -> dict[tuple[int, int], str]:
        if self._views is None:
            rows = self._connection.sql(named("keyed_tables")).fetchall()
            self._views = {(group, topic): view for group, topic, view in rows}
        return self._views

    def _known(self, group_id: int, topic_id: int) -> dict[str, pa.Field]:
        """Return the columns of a table; empty if the table does not exist."""
        key = (group_id, topic_id)
        if key not in self._all_views():
            return {}
        if key not in self._columns:
            ids = {"group_id": group_id, "topic_id": topic_id}
            ((kept,),) = self._connection.sql(named("keyed_schema"), params=ids).fetchall()
            table = qualified(group_id, topic_id)
            found = self._connection.sql(named("columns_of_state", table=table)).to_arrow_table()
            # Older versions did not store the Arrow type of every column.
            self._columns[key] = {**newest(found.schema), **newest(_schema(kept))}
        return self._columns[key]

    def _shape(self, schema: pa.Schema, *, group_id: int, topic_id: int) -> None:
        """Create the table, or alter it so that it has the columns of net_state."""
        key = (group_id, topic_id)
        known, views = self._known(group_id, topic_id), self._all_views()
        table = qualified(group_id, topic_id)
        if key not in views:
            self._connection.execute(named("create_state", table=table))
            views[key] = self._register(group_id, topic_id)
        else:
            self._alter(group_id, topic_id)
        view = quoted(views[key])
        self._connection.execute(named("view_state", view=view, table=table))
        # Columns that this schema lacks keep their types.
        kept = newest(pa.schema(list(known.values())), schema.remove_metadata())
        data = pa.schema(list(kept.values())).serialize().to_pybytes()
        ids = {"group_id": group_id, "topic_id": topic_id}
        self._connection.execute(named("set_arrow_schema"), {**ids, "arrow_schema": data})
        self._columns[key] = kept

    def _register(self, group_id: int, topic_id: int) -> str:
        ids = {"group_id": group_id, "topic_id": topic_id}
        ((view,),) = self._connection.sql(named("free_view_name"), params=ids).fetchall()
        self._connection.execute(
            named("register_state"),
            {**ids, "table_name": _name(group_id, topic_id), "view_name": view},
        )
        return str(view)

    def _alter(self, group_id: int, topic_id: int) -> None:
        changed = self._connection.sql(
            named("changed_columns"), params={"table_name": _name(group_id, topic_id)}
        ).fetchall()
        table = qualified(group_id, topic_id)
        for column, of_type, before in changed:
            name = "add_column"
            if before is not None:
                name = "change_column" if self._is_cast(before, of_type) else "clear_column"
            self._connection.execute(named(name, table=table, column=quoted(column), type=of_type))

    def _is_cast(self, before: str, of_type: str) -> bool:
        """Return True if DuckDB has a cast from one type to the other."""
        with self._connection.cursor() as aside:  # an error would abort the transaction
            try:
                aside.execute(named("cast_nothing", before=before, type=of_type))
            except duckdb.Error:
                return False
            return True


class Trial:
    """In-memory database that tries to apply rows as dispatch would, and discards the result.

    Args:
        memory_bytes: memory limit of the database.
    """

    def __init__(self, memory_bytes: int) -> None:
        config: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": f"{memory_bytes}B",
            "threads": 1,
            "temp_directory": "",
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "python_enable_replacements": False,
        }
        self._connection = duckdb.connect(":memory:", config=config)

    def refusal(self, rows: pa.Table, *, known: pa.Schema) -> str | None:
        """Return why rows cannot be applied to a table with the known columns; None if they can.

        Args:
            rows: message_group, message_group_hash, removed, the consumer's columns.
            known: all columns that the table will have, in their newest types.
        """
        order = pa.array(range(rows.num_rows), pa.int64())
        staged = rows.append_column("staged_order", order)

        def fold_in() -> None:
            self._connection.register("net_state", known.empty_table())
            self._connection.execute(named("create_state", table=_TRIED))
            self._connection.unregister("net_state")
            self._connection.register("staged_state", staged)
            self._connection.execute(named("fold_state"))
            self._connection.execute(named("insert_state", table=_TRIED))

        return self._error_of(fold_in)

    def refusal_of_values(self, columns: pa.Table) -> str | None:
        """Return why DuckDB cannot read some value of the columns; None if it can read all."""

        def read_all() -> None:
            self._connection.register("staged_state", columns)
            self._connection.execute(named("scan_state"))

        return self._error_of(read_all)

    def _error_of(self, action: Callable[[], None]) -> str | None:
        """Run an action and roll it back; return the first line of DuckDB's error, or None."""
        self._connection.begin()
        try:
            action()
        except duckdb.Error as error:
            return str(error).partition("\n")[0]
        finally:
            self._connection.rollback()
            for name in ("net_state", "staged_state"):
                self._connection.unregister(name)
        return None


def read(
    cursor: duckdb.DuckDBPyConnection, *, group_id: int, topic_id: int, hashes: Int64s | None
) -> pa.Table | None:
    """Return the state of these message groups, or of all; None if there never was any."""
    ids = {"group_id": group_id, "topic_id": topic_id}
    known = cursor.sql(named("keyed_schema"), params=ids).fetchall()
    if not known:
        return None
    name = "read_state"
    if hashes is not None:
        cursor.register("asked", pa.table({"message_group_hash": hashes}))
        name = "read_some_state"
    table = qualified(group_id, topic_id)
    found = cursor.sql(named(name, table=table)).to_arrow_table()
    kept = {**newest(found.schema), **newest(_schema(known[0][0]))}
    fields = [kept[folded(name)] for name in found.column_names]
    columns = zip(found.columns, fields, strict=True)
    return pa.table(
        [converted(column, field.type) for column, field in columns], schema=pa.schema(fields)
    )


def is_kept(cursor: duckdb.DuckDBPyConnection) -> bool:
    """Return True if any consumer group keeps state."""
    return bool(cursor.sql(named("keyed_tables")).fetchall())


def first_of_groups(
    cursor: duckdb.DuckDBPyConnection, *, topic_id: int, hashes: Int64s
) -> pa.Table:
    """Return the first message of each message group; see Database.first_of_groups."""
    cursor.register("asked", pa.table({"message_group_hash": hashes}))
    found = cursor.sql(named("first_of_groups"), params={"topic_id": topic_id}).to_arrow_table()
    cursor.unregister("asked")
    return found


def _schema(arrow_schema: bytes | None) -> pa.Schema:
    if arrow_schema is None:
        return pa.schema([])
    return pa.ipc.read_schema(pa.py_buffer(arrow_schema))


def qualified(group_id: int, topic_id: int) -> str:
    """Return the quoted, schema-qualified table name of a (group, topic)."""
    return f"keyed.{quoted(_name(group_id, topic_id))}"


def _name(group_id: int, topic_id: int) -> str:
    return f"state_{group_id}_{topic_id}"
