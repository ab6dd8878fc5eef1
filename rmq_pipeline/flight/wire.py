"""How a call crosses the table door: one ``do_exchange`` a call.

The command of the descriptor is JSON: ``{"verb", "args", "token"}``; who calls is in the header
``authorization``. Tables go as pieces: record
batches of one value, an Arrow IPC stream of some rows, with the name of the argument as metadata
(``messages``, or ``publish/<topic>`` for a table in a mapping). An answer that is no table is JSON
metadata without a batch: ``{"value": ...}`` or ``{"error", "message", "details"}``; a table comes
in pieces. A refusal is an answer, not a Flight error, because gRPC cuts long error texts: so any
Flight error means that the connection was lost.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import errors, limits

#: The schema of a piece: large, because a message of 2 GiB must not break the offset.
PIECE: Final = pa.schema([("table", pa.large_binary())])
#: Rows of a piece are counted to stay near this, so that no gRPC message grows without bound.
PIECE_BYTES: Final = 32 * limits.MIB
#: The name of the only table of an answer.
ANSWER: Final = "answer"

WRITE: Final = pa.ipc.IpcWriteOptions(use_threads=False)
# gRPC hands out buffers at odd addresses: numbers are moved to where they belong, bodies stay.
_READ: Final = pa.ipc.IpcReadOptions(
    use_threads=False, ensure_alignment=pa.ipc.Alignment.DataTypeSpecific
)

Piece = tuple[str, pa.RecordBatch]


@dataclass(frozen=True)
class Verb:
    """A verb of the broker, as far as the door must know it."""

    name: str
    #: Arguments that are tables, or None; a list of receipt handles becomes a table.
    tables: tuple[str, ...] = ()
    #: Arguments that are mappings of names to tables.
    table_maps: tuple[str, ...] = ()
    #: Carrying it out twice is as good as once, so a lost answer may be asked for again.
    repeatable: bool = False
    #: The same, but only when all of these arguments are given.
    repeatable_with: tuple[str, ...] = ()
    #: Its ``wait_ms`` may be long: the server waits in slices, to notice that nobody listens.
    long_poll: bool = False
    #: What of the broker takes the same arguments and waits on, after the first slice; without it
    #: the verb does. And what is told group and client_id when nobody listens any more.
    waits_with: str = ""
    tells_of_loss: str = ""

    def may_repeat(self, args: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments may be made again after a lost connection."""
        with_these = bool(self.repeatable_with) and all(map(args.get, self.repeatable_with))
        return self.repeatable or with_these


#: Every verb of the door. Results are told apart by what they are: a table, or JSON.
VERBS: Final[Mapping[str, Verb]] = {
    verb.name: verb
    for verb in (
        Verb("ping", repeatable=True),
        Verb("create_topic"),
        Verb("ensure_topic", repeatable=True),
        Verb("alter_topic"),
        Verb("delete_topic"),
        Verb("list_topics", repeatable=True),
        Verb("describe_topic", repeatable=True),
        Verb("create_group"),
        Verb("ensure_group", repeatable=True),
        Verb("alter_group"),
        Verb("delete_group"),
        Verb("list_groups", repeatable=True),
        Verb("describe_group", repeatable=True),
        Verb("subscribe", repeatable=True),
        Verb("send", tables=("messages",)),
        Verb("recall", tables=("handles",)),
        Verb("receive", long_poll=True),
        Verb("sync_lite_subscription", repeatable=True),
        Verb("lite_subscriptions", repeatable=True),
        Verb("ack", tables=("receipts",)),
        Verb("release", tables=("receipts",)),
        Verb("change_invisible_duration", tables=("receipts",)),
        Verb("forward_to_dead_letter_queue", tables=("receipts",)),
        Verb(
            "settle",
            tables=("outcomes", "sink_files", "state"),
            table_maps=("publish",),
            # It is the window that remembers the last settle.
            repeatable_with=("settle_id", "window"),
        ),
        Verb("unpark", tables=("message_groups",)),
        Verb("redrive", tables=("dead_letters",), repeatable=True),
        Verb("seen_before", tables=("keys",), repeatable=True),
        Verb("send_half", tables=("messages",)),
        Verb("end_transactions", tables=("resolutions",), repeatable=True),
        Verb("fetch_checks", long_poll=True),
        Verb("check_transactions", repeatable=True),
        Verb("read", repeatable=True),
        Verb("offset_at", repeatable=True),
        Verb("reset_offset"),
        Verb("update_offsets", repeatable=True),
        Verb("commit_offsets", repeatable=True),
        Verb("committed_offsets", repeatable=True),
        Verb("start_offsets", repeatable=True),
        Verb("clone_offsets"),
        Verb("pull", repeatable=True, long_poll=True),
        Verb(
            "heartbeat",
            repeatable=True,
            long_poll=True,
            waits_with="await_change",
            tells_of_loss="cut_off",
        ),
        Verb("leave", repeatable=True),
        Verb("lock_queues", repeatable=True),
        Verb("unlock_queues", repeatable=True),
        Verb("keyed_state", tables=("message_groups",), repeatable=True),
        Verb("keyed_state_history", tables=("places",), repeatable=True),
        Verb("sink_files", repeatable=True),
        Verb("replace_sink_files", tables=("add",), repeatable=True),
        Verb("sql", repeatable=True),
        Verb("due", repeatable=True),
        Verb("open_window", repeatable=True),
        Verb("renew_window", repeatable=True),
        Verb("close_window", repeatable=True),
        Verb("deliver_scheduled", repeatable=True),
        Verb("revive", repeatable=True),
        Verb("seal", repeatable=True),
        Verb("compact", repeatable=True),
        Verb("plan_compaction", repeatable=True),
        Verb("replace_segments", repeatable=True),
        Verb("expire", repeatable=True),
        Verb("find", repeatable=True),
        Verb("archive", repeatable=True),
        Verb("status", repeatable=True),
        Verb("create_user"),
        Verb("alter_user"),
        Verb("delete_user"),
        Verb("list_users", repeatable=True),
        Verb("put_policy", repeatable=True),
        Verb("delete_policy"),
        Verb("list_policies", repeatable=True),
        Verb("explain_access", repeatable=True),
    )
}


@dataclass(frozen=True)
class Request:
    """A call, taken apart: JSON-able arguments and tables under their names on the wire."""

    verb: Verb
    args: Mapping[str, Any]
    tables: Mapping[str, pa.Table] = field(default_factory=dict)

    def command(self, token: str | None) -> bytes:
        """The command of the exchange's descriptor."""
        command = {"verb": self.verb.name, "args": self.args, "token": token}
        try:
            return json.dumps(command, separators=(",", ":")).encode()
        except TypeError as error:
            raise errors.RequestError(f"{self.verb.name}: {error}.") from error

    def pieces(self) -> list[Piece]:
        """All tables, ready to be written."""
        return [piece for name, table in self.tables.items() for piece in pack(name, table)]


def request(verb_name: str, args: Mapping[str, Any]) -> Request:
    """A call, from the arguments the verb takes in process.

    Raises:
        TableSchemaError: an argument that must be a table is none.
        RequestError: there is no such verb.
    """
    verb = find(verb_name)
    plain = dict(args)
    tables: dict[str, pa.Table] = {}
    for name in verb.tables:
        if (value := plain.pop(name, None)) is not None:
            tables[name] = as_table(name, value)
    for name in verb.table_maps:
        for key, value in (plain.pop(name, None) or {}).items():
            tables[f"{name}/{key}"] = as_table(f"{name} of {key!r}", value)
    return Request(verb, plain, tables)


def read_command(command: bytes) -> tuple[Verb, dict[str, Any], str | None]:
    """Verb, JSON arguments and token of a descriptor's command.

    Raises:
        RequestError: it is no command, or names no verb.
    """
    try:
        found = json.loads(command)
        verb, plain, token = found["verb"], dict(found["args"]), found.get("token")
    except (ValueError, KeyError, TypeError) as error:
        raise errors.RequestError(f"The command is not one of this door: {error!r}.") from error
    return find(verb), plain, token


def arguments(verb: Verb, plain: Mapping[str, Any], *, pieces: Iterable[Piece]) -> dict[str, Any]:
    """The arguments of a call, as the verb takes them in process."""
    # JSON has no tuples, which is what the verbs' pairs and series are.
    args: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()
    }
    for name, table in unpack(pieces).items():
        owner, _, key = name.partition("/")
        if key and owner in verb.table_maps:
            args.setdefault(owner, {})[key] = table
        elif owner in verb.tables and not key:
            args[owner] = table
        else:
            raise errors.RequestError(f"{verb.name} takes no table {name!r}.")
    return args


def find(verb_name: str) -> Verb:
    """The verb of this name.

    Raises:
        RequestError: there is none.
    """
    if verb_name not in VERBS:
        raise errors.RequestError(f"There is no verb {verb_name!r}.")
    return VERBS[verb_name]


def as_table(name: str, value: object) -> pa.Table:
    """The value as a table.

    Raises:
        TableSchemaError: it is none.
    """
    if isinstance(value, pa.Table):
        return value
    if isinstance(value, pa.RecordBatch):
        return pa.Table.from_batches([value])
    if name == "receipts" and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return pa.table({"receipt_handle": pa.array(value, pa.string())})
    raise errors.TableSchemaError(f"{name} is a {type(value).__name__}, not a pyarrow.Table.")


# ------------------------------------------------------------------------------------------ tables


def pack(name: str, table: pa.Table) -> Iterator[Piece]:
    """A table in pieces of about PIECE_BYTES; at least one, which carries the schema."""
    if any(column.num_chunks > 1 for column in table.columns):
        # Many small batches cost the broker more than the copy costs here.
        table = table.combine_chunks()
    count = max(1, -(-table.nbytes // PIECE_BYTES))
    rows = max(1, -(-table.num_rows // count))
    for start in range(0, max(1, table.num_rows), rows):
        yield name, _piece(table.slice(start, rows))


def _piece(rows: pa.Table) -> pa.RecordBatch:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=WRITE) as writer:
        writer.write_table(rows)
    data = sink.getvalue()
    offsets = pa.py_buffer(bytes(8) + data.size.to_bytes(8, "little"))
    value = pa.Array.from_buffers(PIECE.field(0).type, 1, [None, offsets, data])
    return pa.record_batch([value], schema=PIECE)


def read_pieces(reader: Any) -> Iterator[Piece]:
    """What is left on an exchange's reader, of either side."""
    while True:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return
        if chunk.data is not None:
            yield chunk.app_metadata.to_pybytes().decode(), chunk.data


def unpack(pieces: Iterable[Piece]) -> dict[str, pa.Table]:
    """The tables of these pieces by name; the buffers stay where gRPC put them."""
    parts: dict[str, list[pa.Table]] = defaultdict(list)
    for name, piece in pieces:
        data = piece.column(0).buffers()[2]
        parts[name].append(pa.ipc.open_stream(data, options=_READ).read_all())
    return {name: pa.concat_tables(tables) for name, tables in parts.items()}


# ----------------------------------------------------------------------------------------- answers


def value_answer(value: object) -> bytes:
    """What the metadata of an answer says when a verb gives no table."""
    return json.dumps({"value": value}, separators=(",", ":")).encode()


def error_answer(error: errors.RocketMQError) -> bytes:
    """A refusal; the client raises the same class with the same message."""
    details = {k: v for k, v in vars(error).items() if isinstance(v, str | int | float | None)}
    answer = {"error": type(error).__name__, "message": error.message, "details": details}
    return json.dumps(answer, separators=(",", ":")).encode()


def read_answer(metadata: bytes) -> Any:
    """The value of an answer without a table.

    Raises:
        RocketMQError: the answer is a refusal; the class the broker raised.
    """
    answer = json.loads(metadata)
    if "error" not in answer:
        return answer["value"]
    error = errors.by_name(answer["error"])(answer["message"])
    vars(error).update(answer.get("details", {}))
    raise error
