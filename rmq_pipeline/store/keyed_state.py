"""Keyed state in DuckDB: one table for each (group, topic), with the consumer's own columns."""

import duckdb
import pyarrow as pa

from rmq_pipeline.message import Int64s
from rmq_pipeline.store.statements import named, quoted


class KeyedState:
    """The tables of keyed state, as dispatch changes them inside its transactions."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self._views: dict[tuple[int, int], str] = {}
        #: The columns of the last rows folded in, so that a table is looked at only on a change.
        self._schemas: dict[tuple[int, int], pa.Schema] = {}
        self.reload()

    def reload(self) -> None:
        """Forget what is known of the tables, as after a rollback, and look again."""
        rows = self._connection.sql(named("keyed_tables")).fetchall()
        self._views = {(group, topic): view for group, topic, view in rows}
        self._schemas.clear()

    def fold(self, rows: pa.Table, *, group_id: int, topic_id: int) -> None:
        """Take in rows of one schema, in order: the last of a message group is its state.

        A column whose type has changed is converted; a value without such a form becomes null.
        """
        table = qualified(group_id, topic_id)
        self._connection.register("staged_state", rows)
        self._connection.execute(named("fold_state"))
        self._shape(rows.schema, group_id=group_id, topic_id=topic_id)
        self._connection.execute(named("delete_state", table=table))
        self._connection.execute(named("insert_state", table=table))
        self._connection.unregister("staged_state")

    def forget(self) -> None:
        """Drop the tables of the topics and groups that staged_events deletes."""
        rows = self._connection.sql(named("forgotten_state")).fetchall()
        for group_id, topic_id, view in rows:
            self._connection.execute(named("drop_state_view", view=quoted(view)))
            self._connection.execute(named("drop_state", table=qualified(group_id, topic_id)))
            self._views.pop((group_id, topic_id), None)
            self._schemas.pop((group_id, topic_id), None)

    def _shape(self, schema: pa.Schema, *, group_id: int, topic_id: int) -> None:
        """See to it that the table is there with the columns of net_state."""
        key = (group_id, topic_id)
        if self._schemas.get(key) == schema:
            return
        table = qualified(group_id, topic_id)
        if key not in self._views:
            self._connection.execute(named("create_state", table=table))
            self._views[key] = self._register(group_id, topic_id)
        else:
            self._alter(group_id, topic_id)
        view = quoted(self._views[key])
        self._connection.execute(named("view_state", view=view, table=table))
        self._keep_schema(schema, group_id=group_id, topic_id=topic_id)
        self._schemas[key] = schema

    def _keep_schema(self, schema: pa.Schema, *, group_id: int, topic_id: int) -> None:
        """Types of columns that this schema lacks stay as they were."""
        ids = {"group_id": group_id, "topic_id": topic_id}
        ((before,),) = self._connection.sql(named("keyed_schema"), params=ids).fetchall()
        types = {**_types(before), **{field.name: field.type for field in schema}}
        data = pa.schema(list(types.items())).serialize().to_pybytes()
        self._connection.execute(named("set_arrow_schema"), {**ids, "arrow_schema": data})

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
        for column, type_, is_new in changed:
            self._connection.execute(
                named(
                    "add_column" if is_new else "change_column",
                    table=qualified(group_id, topic_id),
                    column=quoted(column),
                    type=type_,
                )
            )


def read(
    cursor: duckdb.DuckDBPyConnection, *, group_id: int, topic_id: int, hashes: Int64s | None
) -> pa.Table | None:
    """The state of these message groups, or of all; None when there never was any."""
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
    types = _types(known[0][0])
    return found.cast(
        pa.schema([(field.name, types.get(field.name, field.type)) for field in found.schema])
    )


def first_of_groups(
    cursor: duckdb.DuckDBPyConnection, *, topic_id: int, hashes: Int64s
) -> pa.Table:
    """Where message groups begin; see Database.first_of_groups."""
    cursor.register("asked", pa.table({"message_group_hash": hashes}))
    found = cursor.sql(named("first_of_groups"), params={"topic_id": topic_id}).to_arrow_table()
    cursor.unregister("asked")
    return found


def _types(arrow_schema: bytes | None) -> dict[str, pa.DataType]:
    if arrow_schema is None:
        return {}
    fields = pa.ipc.read_schema(pa.py_buffer(arrow_schema))
    return {field.name: field.type for field in fields}


def qualified(group_id: int, topic_id: int) -> str:
    """The table of a (group, topic), with its schema, quoted."""
    return f"keyed.{quoted(_name(group_id, topic_id))}"


def _name(group_id: int, topic_id: int) -> str:
    return f"state_{group_id}_{topic_id}"
