"""The format of a sink's log: Delta Lake's transaction log, so that any engine reads the sink.

A commit is one JSON file, ``_delta_log/<version>.json``, with one action a line. A checkpoint is
one Parquet file with all actions that count. Both are described by PROTOCOL.md of
https://github.com/delta-io/delta; this module writes the part of it that a sink needs:

* ``add``: a file of the sink; the tag ``offsets`` has the ranges of its messages.
* ``remove``: a file that was replaced.
* ``metaData``: the columns, and the table's version less the broker's.
* ``protocol``: what a reader and a writer must support. Other writers do not know the feature
  ``FEATURE``, so they refuse the table: the broker decides which files count.
* ``commitInfo``: for the history of the table; ``crc32`` is the checksum of the lines below it.
"""

import functools
import json
import logging
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import schema

logger = logging.getLogger(__name__)

FEATURE: Final = "rocketmqBroker"
_NTZ: Final = "timestampNtz"
#: Partition column of the table, unless the sink has a column of this name: then there is none.
HOUR: Final = "hour"
#: Tag of a file: its ranges of messages, a list of [queue_id, base, end].
_OFFSETS: Final = "offsets"
ENGINE: Final = "rmq_pipeline"
_CHECKSUM: Final = "crc32"
_INFO: Final = "commitInfo"
_METADATA_ACTION: Final = "metaData"
#: Characters of a path that stay as they are in a URL; a colon would end a scheme.
_PLAIN: Final = "/=@!$&'()*+,;~"
#: Key of the table's configuration: its version less the broker's.
_OFFSET: Final = "rocketmq.offset"

_NAMES: Final = {
    pa.bool_(): "boolean",
    pa.int8(): "byte",
    pa.int16(): "short",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.uint8(): "short",
    pa.uint16(): "integer",
    pa.uint32(): "long",
    pa.uint64(): "decimal(20,0)",
    pa.float16(): "float",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.large_string(): "string",
    pa.string_view(): "string",
    pa.binary(): "binary",
    pa.large_binary(): "binary",
    pa.binary_view(): "binary",
    pa.date32(): "date",
    pa.date64(): "date",
}
_MOST_DIGITS: Final = 38
_DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)")
#: Columns that are added later are null in the files before them.
_NULLABLE: Final = {"nullable": True, "metadata": {}}
#: Types of which the later reads the files of the earlier.
_WIDENED: Final = (("byte", "short", "integer", "long"), ("float", "double"))

_STRINGS: Final = pa.map_(pa.string(), pa.string())
_ADD: Final = pa.struct(
    [
        ("path", pa.string()),
        ("partitionValues", _STRINGS),
        ("size", pa.int64()),
        ("modificationTime", pa.int64()),
        ("dataChange", pa.bool_()),
        ("stats", pa.string()),
        ("tags", _STRINGS),
    ]
)
_METADATA: Final = pa.struct(
    [
        ("id", pa.string()),
        ("format", pa.struct([("provider", pa.string()), ("options", _STRINGS)])),
        ("schemaString", pa.string()),
        ("partitionColumns", pa.list_(pa.string())),
        ("configuration", _STRINGS),
        ("createdTime", pa.int64()),
    ]
)
_PROTOCOL: Final = pa.struct(
    [
        ("minReaderVersion", pa.int32()),
        ("minWriterVersion", pa.int32()),
        ("readerFeatures", pa.list_(pa.string())),
        ("writerFeatures", pa.list_(pa.string())),
    ]
)
#: Columns of a checkpoint; a row has one of them.
CHECKPOINT: Final = pa.schema([("protocol", _PROTOCOL), ("metaData", _METADATA), ("add", _ADD)])


def type_of(arrow: pa.DataType) -> Any:
    """Return Delta's name or description of an Arrow type; None if Delta has no such type."""
    if (name := _NAMES.get(arrow)) is not None:
        return name
    if isinstance(arrow, pa.BaseExtensionType):
        return type_of(arrow.storage_type)
    if pa.types.is_timestamp(arrow):
        if arrow.unit == "ns":
            return None
        return "timestamp_ntz" if arrow.tz is None else "timestamp"
    if pa.types.is_fixed_size_binary(arrow):
        return "binary"
    if pa.types.is_decimal(arrow):
        return (
            f"decimal({arrow.precision},{arrow.scale})" if arrow.precision <= _MOST_DIGITS else None
        )
    if pa.types.is_dictionary(arrow):
        return type_of(arrow.value_type)
    if pa.types.is_nested(arrow):
        return _nested(arrow)
    return None


def _nested(arrow: pa.DataType) -> dict[str, Any] | None:
    if pa.types.is_map(arrow):
        key, value = type_of(arrow.key_type), type_of(arrow.item_type)
        if key is None or value is None:
            return None
        return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
    if pa.types.is_struct(arrow):
        fields = [_field(field.name, type_of(field.type)) for field in arrow]
        known = all(field["type"] is not None for field in fields)
        return {"type": "struct", "fields": fields} if known else None
    if pa.types.is_union(arrow) or pa.types.is_run_end_encoded(arrow):
        return None
    element = type_of(arrow.value_type)
    if element is None:
        return None
    return {"type": "array", "elementType": element, "containsNull": True}


def _field(name: str, type_: Any) -> dict[str, Any]:
    return {"name": name, "type": type_, **_NULLABLE}


@dataclass(frozen=True, slots=True)
class Metadata:
    """A table's identity and columns, as each commit and each checkpoint of it has them."""

    id: str
    created_at_ms: int
    #: The table's version less the broker's: 0, unless the group was deleted and created again.
    offset: int = 0
    #: Fields as in Delta's schemaString, the partition column among them.
    fields: tuple[dict[str, Any], ...] = ({"name": HOUR, "type": "string", **_NULLABLE},)
    partition_columns: tuple[str, ...] = (HOUR,)

    @classmethod
    def of(cls, action: Mapping[str, Any]) -> Self:
        """Return what the value of a ``metaData`` says."""
        return cls(
            action["id"],
            action["createdTime"],
            int(action["configuration"][_OFFSET]),
            tuple(json.loads(action["schemaString"])["fields"]),
            tuple(action["partitionColumns"]),
        )

    def with_columns(self, rows: pa.Schema) -> "Metadata":
        """Return it with the columns of rows to be added as well; itself if it has them.

        Columns of types that Delta does not have are left out: its readers do not see them. So are
        those whose names differ from another one only by case.
        """
        fields = {field["name"].lower(): field for field in self.fields}
        partitions = self.partition_columns
        hour = None if len(fields) > 1 or not partitions else fields.pop(HOUR)
        columns = _fields_of(rows)
        if hour is not None and any(field["name"].lower() == HOUR for field in columns):
            partitions, hour = (), None
        for field in columns:
            name = field["name"].lower()
            known = fields.get(name)
            if known is None:
                fields[name] = field
            elif known["name"] == field["name"] and name not in partitions:
                fields[name] = {**field, "type": _wider(known["type"], field["type"])}
        ordered = (*fields.values(), *([hour] if hour is not None else []))
        if (ordered, partitions) == (self.fields, self.partition_columns):
            return self
        names = {field["name"] for field in ordered}.difference(partitions)
        for name in set(rows.names).difference(names):
            logger.warning("not in the Delta table column=%s type=%s", name, rows.field(name).type)
        return replace(self, fields=ordered, partition_columns=partitions)

    @property
    def action(self) -> dict[str, Any]:
        """The value of ``metaData``."""
        return {
            "id": self.id,
            "format": {"provider": "parquet", "options": {}},
            "schemaString": json.dumps({"type": "struct", "fields": list(self.fields)}),
            "partitionColumns": list(self.partition_columns),
            "configuration": {_OFFSET: str(self.offset)},
            "createdTime": self.created_at_ms,
        }

    @property
    def protocol(self) -> dict[str, Any]:
        """The value of ``protocol``."""
        if "timestamp_ntz" not in json.dumps(self.fields):
            return {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": [FEATURE]}
        return {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": [_NTZ],
            "writerFeatures": [_NTZ, FEATURE],
        }


@functools.lru_cache(maxsize=64)
def _fields_of(rows: pa.Schema) -> list[dict[str, Any]]:
    fields = [_field(column.name, type_of(column.type)) for column in rows]
    return [field for field in fields if field["type"] is not None]


def _wider(known: Any, new: Any) -> Any:
    """Return a type that reads the files of both; the new one if there is no such type."""
    if isinstance(known, dict) and isinstance(new, dict) and known["type"] == new["type"]:
        if known["type"] != "struct":
            return {name: _wider(known[name], value) for name, value in new.items()}
        fields = {field["name"]: field for field in known["fields"]}
        for field in new["fields"]:
            before = fields.get(field["name"], field)
            fields[field["name"]] = {**field, "type": _wider(before["type"], field["type"])}
        return {"type": "struct", "fields": list(fields.values())}
    if not isinstance(known, str) or not isinstance(new, str):
        return new
    if {known, new} == {"timestamp", "timestamp_ntz"}:
        # A table's protocol does not go down.
        return known
    for types in _WIDENED:
        if known in types and new in types:
            return max(known, new, key=types.index)
    decimals = [_DECIMAL.fullmatch(each) for each in (known, new)]
    if not all(decimals):
        return new
    sizes = [tuple(map(int, each.groups())) for each in decimals if each]
    scale = max(scale for _, scale in sizes)
    whole = max(precision - scale for precision, scale in sizes)
    return f"decimal({min(whole + scale, _MOST_DIGITS)},{scale})"


def commit(
    add: pa.Table,
    remove: Iterable[str],
    *,
    at_ms: int,
    table: Metadata,
    with_protocol: bool,
    is_rearranged: bool,
) -> bytes:
    """Return the content of a commit.

    Args:
        add: schema.SINK_FILE.
        remove: paths of the files that the commit removes.
        at_ms: time of the commit.
        table: the table that the files belong to. Each commit repeats it, so that the next writer
            reads it from one file.
        with_protocol: no commit before this one has the table's protocol.
        is_rearranged: the same rows lie in other files, as after a compaction.
    """
    actions: list[dict[str, Any]] = [{"protocol": table.protocol}] if with_protocol else []
    actions.append({_METADATA_ACTION: table.action})
    removed = list(remove)
    actions += [
        {
            "remove": {
                "path": quote(path, safe=_PLAIN),
                "deletionTimestamp": at_ms,
                "dataChange": not is_rearranged,
            }
        }
        for path in removed
    ]
    adds = _adds(add, at_ms=at_ms, table=table)
    actions += [{"add": {**each, "dataChange": not is_rearranged}} for each in adds]
    lines = b"".join(_line(action) for action in actions)
    operation = "OPTIMIZE" if is_rearranged else "OVERWRITE" if removed else "WRITE"
    info = {
        "timestamp": at_ms,
        "operation": operation,
        "operationParameters": {},
        "engineInfo": ENGINE,
        _CHECKSUM: f"{zlib.crc32(lines):08x}",
    }
    return _line({_INFO: info}) + lines


def _line(action: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(action, separators=(',', ':'))}\n".encode()


def _adds(files: pa.Table, *, at_ms: int, table: Metadata) -> list[dict[str, Any]]:
    adds = []
    for file in files.to_pylist():
        tags = {}
        if file["offsets"] is not None:
            ranges = [[each["queue_id"], each["base"], each["end"]] for each in file["offsets"]]
            tags[_OFFSETS] = json.dumps(ranges, separators=(",", ":"))
        partition = {HOUR: file["partition"]}
        if not table.partition_columns:
            # The column of this name is one of the rows'.
            tags |= {name: value for name, value in partition.items() if value is not None}
            partition = {}
        rows = file["rows"]
        add = {
            "path": quote(file["path"], safe=_PLAIN),
            "partitionValues": partition,
            # No Parquet file is empty: 0 stands for the size of a file that is not there.
            "size": file["bytes"] or 0,
            "modificationTime": at_ms,
            "dataChange": True,
            "tags": tags,
        }
        adds.append(add if rows is None else {**add, "stats": f'{{"numRecords":{rows}}}'})
    return adds


@dataclass(frozen=True, slots=True)
class Changes:
    """What a commit says."""

    table: Metadata
    #: Rows of schema.SINK_FILE.
    add: list[dict[str, Any]]
    #: Paths.
    remove: list[str]


def changes_in(content: bytes) -> Changes:
    """Return what a commit says.

    Raises:
        ValueError: it is damaged.
    """
    first, _, rest = content.partition(b"\n")
    info = _action(first).get(_INFO, {})
    if info.get(_CHECKSUM, "") not in {"", f"{zlib.crc32(rest):08x}"}:
        raise ValueError("it does not match its checksum")
    actions = [_action(line) for line in rest.splitlines()]
    (table,) = (action[_METADATA_ACTION] for action in actions if _METADATA_ACTION in action)
    return Changes(
        Metadata.of(table),
        [_file(action["add"]) for action in actions if "add" in action],
        [unquote(action["remove"]["path"]) for action in actions if "remove" in action],
    )


def _action(line: bytes) -> dict[str, Any]:
    action = json.loads(line)
    if not isinstance(action, dict):
        raise ValueError("a line of it is not a JSON object")  # noqa: TRY004 - a file's fault
    return action


def _file(add: Mapping[str, Any]) -> dict[str, Any]:
    partition, tags = dict(add["partitionValues"]), dict(add.get("tags") or {})
    ranges = tags.get(_OFFSETS)
    return {
        "path": unquote(add["path"]),
        "rows": json.loads(add["stats"])["numRecords"] if add.get("stats") else None,
        "bytes": add["size"] or None,
        "partition": partition[HOUR] if HOUR in partition else tags.get(HOUR),
        "offsets": None if ranges is None else _ranges(json.loads(ranges)),
    }


def checkpoint(files: pa.Table, *, at_ms: int, table: Metadata) -> pa.Table:
    """Return a checkpoint: CHECKPOINT, with these files (schema.SINK_FILE) as the current ones."""
    head = [{"protocol": table.protocol}, {_METADATA_ACTION: table.action}]
    adds = pa.array(_adds(files, at_ms=at_ms, table=table), _ADD)
    columns = [pa.nulls(len(adds), kind.type) for kind in CHECKPOINT][:-1]
    body = pa.table([*columns, adds], schema=CHECKPOINT)
    return pa.concat_tables([pa.Table.from_pylist(head, schema=CHECKPOINT), body])


def table_in(found: pa.Table) -> Metadata:
    """Return the table of a checkpoint."""
    (action,) = found[_METADATA_ACTION].drop_null().to_pylist(maps_as_pydicts="strict")
    return Metadata.of(action)


def files_in(found: pa.Table) -> pa.Table:
    """Return the files of a checkpoint as schema.SINK_FILE, in the order of its rows."""
    adds = found["add"].combine_chunks().drop_null()
    field = dict(zip((each.name for each in adds.type), adds.flatten(), strict=True))
    tags, partitions = field["tags"], field["partitionValues"]
    path = pc.cast(field["path"], pa.string())
    if pc.any(pc.match_substring(path, "%")).as_py():
        path = pa.array([unquote(each) for each in path.to_pylist()], pa.string())
    columns = {
        "path": path,
        "rows": [stats and stats["numRecords"] for stats in _values(field["stats"])],
        "bytes": pc.if_else(pc.equal(field["size"], 0), None, field["size"]),
        "partition": pc.coalesce(_look_up(partitions, HOUR), _look_up(tags, HOUR)),
        "offsets": [_ranges(each) for each in _values(_look_up(tags, _OFFSETS))],
    }
    return pa.table(columns, schema=schema.SINK_FILE)


def _look_up(maps: pa.Array, key: str) -> pa.Array:
    return pc.map_lookup(maps, pa.scalar(key), "first")


def _values(texts: pa.Array) -> list[Any]:
    """Return the values of JSON texts; None for null. One call of the parser for all."""
    joined = ",".join("null" if text is None else text for text in texts.to_pylist())
    values: list[Any] = json.loads(f"[{joined}]")
    return values


def _ranges(told: list[list[int]] | None) -> list[dict[str, int]] | None:
    if told is None:
        return None
    return [{"queue_id": queue, "base": base, "end": end} for queue, base, end in told]
