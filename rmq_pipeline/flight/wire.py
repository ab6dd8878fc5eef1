"""Encoding of calls: each is one ``do_exchange`` or one ``do_action`` of Arrow Flight.

Headers name the caller (``authorization``, or ``x-rmq-token``, the token of the home). A call can
therefore be refused before its first byte is read. The command of the descriptor is JSON:
``{"verb", "args", "parts"}``. Parts are names and lengths of tables, which follow as the body of
the call (see ``framing``). Each table is an Arrow IPC stream named after its argument
(``messages``, or ``publish/<topic>`` for a table in a mapping). A call can therefore also be
refused before its body is read.

An answer is a table in pieces, or JSON: a value, or a refusal. A refusal is sent as an answer,
because gRPC truncates long error texts. Before the body of a call is read completely, the status of
the call carries the refusal: a client that is still writing would lose an answer. A Flight error
without a refusal means that the connection was lost.
"""

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import pyarrow as pa

from rmq_pipeline import errors, limits
from rmq_pipeline.flight import framing
from rmq_pipeline.flight.framing import Part
from rmq_pipeline.tables import check_readable
from rmq_pipeline.verb import Verb
from rmq_pipeline.verbs import VERBS

#: Header of a caller that wants no answer of a standby.
LEADER_ONLY: Final = "x-rmq-leader-only"
#: Header with the token of the home's broker.
TOKEN: Final = "x-rmq-token"  # noqa: S105 - a name

#: Maximum characters of a value in an error text.
_SHOWN: Final = 200


@dataclass(frozen=True)
class Request:
    """A call: JSON arguments, and tables under their names on the wire."""

    verb: Verb
    args: Mapping[str, Any]
    tables: Mapping[str, pa.Table] = field(default_factory=dict)

    def command(self, parts: Iterable[Part] = ()) -> bytes:
        """Return the command of the exchange's descriptor, for a body of these parts.

        Raises:
            RequestError: an argument is not JSON, or the arguments are too long.
        """
        lengths = [(name, data.size) for name, data in parts]
        command = {"verb": self.verb.name, "args": self.args, "parts": lengths}
        try:
            said = json.dumps(command, separators=(",", ":"), default=_plain).encode()
        except TypeError as error:
            raise errors.RequestError(f"{self.verb.name}: {error}.") from error
        _check_length(said)
        return said

    def parts(self) -> list[Part]:
        """Serialize all tables."""
        return [(name, framing.pack(table)) for name, table in self.tables.items()]


def request(verb_name: str, args: Mapping[str, Any]) -> Request:
    """Build a call from the arguments of a verb.

    Raises:
        TableSchemaError: an argument that must be a table is not one.
        RequestError: the verb does not exist.
    """
    verb = find(verb_name)
    plain = dict(args)
    tables: dict[str, pa.Table] = {}
    for name in verb.tables:
        if (value := plain.pop(name, None)) is not None:
            tables[name] = as_table(name, value)
    for name in verb.table_maps:
        named = plain.pop(name, None) or {}
        if not isinstance(named, Mapping):
            raise errors.TableSchemaError(f"{name} maps names to tables, and is {named!r}.")
        for key, value in named.items():
            tables[f"{name}/{key}"] = as_table(f"{name} of {key!r}", value)
    return Request(verb, plain, tables)


class Command(NamedTuple):
    """Contents of the first message of a call."""

    verb: Verb
    #: Arguments in JSON.
    plain: dict[str, Any]
    #: Names and lengths of the tables.
    lengths: list[tuple[str, int]]


def read_command(command: bytes) -> Command:
    """Decode the command of a descriptor.

    Raises:
        RequestError: the command is invalid, or names an unknown verb.
    """
    _check_length(command)
    try:
        found = json.loads(command)
    except (ValueError, RecursionError) as error:
        said = f"{type(error).__name__}: {str(error)[:_SHOWN]}"
        raise errors.RequestError(
            f"The command of {len(command)} bytes is not JSON ({said}): send"
            ' {"verb": …, "args": {…}}.'
        ) from error
    fields = found if isinstance(found, dict) else {}
    if "token" in fields:
        raise errors.RequestError(
            "The client is of an older version than the broker: use the broker's version of"
            " rmq_pipeline."
        )
    verb, plain, lengths = fields.get("verb"), fields.get("args"), fields.get("parts", [])
    if not isinstance(verb, str):
        raise errors.RequestError(
            f'The command\'s "verb" must be the name of a verb, not {str(verb)[:_SHOWN]!r}.'
        )
    if not isinstance(plain, dict):
        raise errors.RequestError(
            f'The command\'s "args" must be an object of arguments, not {str(plain)[:_SHOWN]!r}.'
        )
    if not isinstance(lengths, list) or not all(map(_is_part, lengths)):
        raise errors.RequestError(
            'The command\'s "parts" must be pairs of name and length, not'
            f" {str(lengths)[:_SHOWN]!r}."
        )
    return Command(find(verb), plain, [(name, size) for name, size in lengths])


def _plain(value: object) -> object:
    """Convert a collection to a JSON type."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Collection) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"A {type(value).__name__} is not JSON serializable")


def _is_part(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    name, size = value
    return isinstance(name, str) and type(size) is int and size >= 0


def _check_length(command: bytes) -> None:
    if len(command) > limits.FLIGHT_COMMAND_BYTES:
        raise errors.RequestError(
            f"The command has {len(command)} bytes; the limit is {limits.FLIGHT_COMMAND_BYTES}."
        )


def arguments(verb: Verb, plain: Mapping[str, Any], *, parts: Iterable[Part]) -> dict[str, Any]:
    """Return the arguments of a call as the verb takes them in process."""
    # JSON has no tuples, which the verbs take for pairs and sequences.
    args: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()
    }
    for name, table in framing.unpack(parts).items():
        owner, _, key = name.partition("/")
        if key and owner in verb.table_maps:
            args.setdefault(owner, {})[key] = table
        elif owner in verb.tables and not key:
            args[owner] = table
        else:
            raise errors.RequestError(f"{verb.name} takes no table {name!r}.")
    return args


def find(verb_name: str) -> Verb:
    """Return the verb of this name.

    Raises:
        RequestError: the verb does not exist.
    """
    if verb_name not in VERBS:
        raise errors.RequestError(f"There is no verb {verb_name[:_SHOWN]!r}.")
    return VERBS[verb_name]


#: Arguments of the type ``verb.Receipts``.
_RECEIPTS: Final = ("receipts", "ack")


def as_table(name: str, value: object) -> pa.Table:
    """Return the value as a table.

    Raises:
        TableSchemaError: the value is not a table.
    """
    if isinstance(value, pa.RecordBatch):
        value = pa.Table.from_batches([value])
    if isinstance(value, pa.Table):
        if name in _RECEIPTS and value.column_names.count("receipt_handle") == 1:
            return value.select(["receipt_handle"])  # the bodies of the messages stay here
        return value
    if name in _RECEIPTS and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if not all(isinstance(handle, str) for handle in value):
            raise errors.TableSchemaError(
                f"{name} must be receipt handles, which are texts, not {value!r}."
            )
        return pa.table({"receipt_handle": pa.array(value, pa.string())})
    raise errors.TableSchemaError(f"{name} is a {type(value).__name__}, not a pyarrow.Table.")


#: Target size of a piece of a table.
PIECE_BYTES: Final = 16 * limits.MIB
#: First byte of a piece of a table; JSON begins with a brace.
_TABLE: Final = b"T"
#: Prefix of a status text that contains a refusal, and maximum characters of each text in it.
_REFUSAL: Final = "rmq refused "
_STATUS_CHARS: Final = 500
#: A client drops the connection if a status exceeds gRPC's 8 KiB of metadata.
_STATUS_BYTES: Final = 4096
#: The error text of gRPC's server when it runs as many calls as FlightLimits allow.
_TOO_MANY_CALLS: Final = "Concurrent RPC limit exceeded"


class TooManyCallsError(errors.BusyError):
    """The broker has not looked at a call, because it runs as many as it accepts."""


def pieces(table: pa.Table, *, whole: bool = False) -> Iterator[bytes]:
    """Yield a table in pieces of about PIECE_BYTES; at least one piece, for the schema.

    Args:
        whole: yield one piece.
    """
    if any(column.num_chunks > 1 for column in table.columns):
        table = table.combine_chunks()
    count = 1 if whole else max(1, -(-table.nbytes // PIECE_BYTES))
    rows = max(1, -(-table.num_rows // count))
    for start in range(0, max(1, table.num_rows), rows):
        yield b"".join((_TABLE, memoryview(framing.pack(table.slice(start, rows)))))


def value(value: object) -> bytes:
    """Encode the answer of a verb that returns no table."""
    return json.dumps({"value": value}, separators=(",", ":")).encode()


def refusal(error: errors.RocketMQError) -> bytes:
    """Encode a refusal; the client raises the same class with the same message."""
    answer = _said(error, error.message, details=_details(error))
    return json.dumps(answer, separators=(",", ":")).encode()


def refusal_status(error: errors.RocketMQError) -> str:
    """Return the status text of a refusal; long texts are truncated to _STATUS_BYTES.

    Who is refused by the headers may be a foreign client, so the text for people comes first.
    """
    if isinstance(error, errors.AccessError) and len(quote(str(error))) < _STATUS_BYTES // 3:
        return f"{error} {_short_refusal(error, _STATUS_CHARS)}"
    characters = _STATUS_CHARS
    said = _short_refusal(error, characters)
    while characters and _bytes_of_status(said) > _STATUS_BYTES:
        characters //= 2
        said = _short_refusal(error, characters)
    return said


def short(error: errors.RocketMQError) -> str:
    """Return the status text of a refusal for foreign clients, which show it to people."""
    characters = len(str(error))
    said = str(error)
    while len(quote(said)) > _STATUS_BYTES:  # gRPC quotes less
        characters //= 2
        said = f"{error.message[:characters]}… {error.remedy[:characters]}"
    return said


def _short_refusal(error: errors.RocketMQError, characters: int) -> str:
    details = {
        key: value[:characters] if isinstance(value, str) else value
        for key, value in _details(error).items()
        if characters or not isinstance(value, str)
    }
    answer = _said(error, error.message[:characters], details=details)
    return _REFUSAL + json.dumps(answer, separators=(",", ":"))


def _bytes_of_status(said: str) -> int:
    """Return the length of an ASCII text in gRPC's metadata, which encodes % as %25."""
    return len(said) + 2 * said.count("%")


def check_status(said: str) -> None:
    """Raise the refusal that a status contains, if any.

    Raises:
        TooManyCallsError: the broker runs as many calls as it accepts.
        RocketMQError: the class that the broker raised.
    """
    if _TOO_MANY_CALLS in said and _REFUSAL not in said:
        raise TooManyCallsError("The broker has as many calls under way as it accepts.")
    _, is_refusal, rest = said.partition(_REFUSAL)
    if is_refusal:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            answer, _ = json.JSONDecoder().raw_decode(rest)
            raise _raised(answer)


def read_answer(messages: Sequence[pa.Buffer]) -> Any:
    """Decode the table or value of an answer.

    Raises:
        RocketMQError: the answer is a refusal; the class that the broker raised.
    """
    if messages[0][:1].to_pybytes() == _TABLE:
        return _table([piece.slice(1) for piece in messages])
    return read_value(messages[0].to_pybytes())


def _table(pieces: Sequence[pa.Buffer]) -> pa.Table:
    try:
        table = framing.together([framing.read("The answer", piece) for piece in pieces])
        # A damaged table could crash this process later. A text that is not UTF-8 could not: older
        # logs contain such texts, and the messages next to them must be delivered. Times and
        # decimals out of range could not either, and SQL may return them.
        table.validate()
        others = [n for n, field in enumerate(table.schema) if not _is_number(field.type)]
        check_readable(table.select(others), "it")
    except (pa.ArrowException, errors.TableSchemaError) as error:
        raise errors.TableSchemaError(
            f"The broker's answer is damaged: {error}", remedy="Look at the broker's log."
        ) from error
    return table


def _is_number(of_type: pa.DataType) -> bool:
    return bool(pa.types.is_primitive(of_type) or pa.types.is_decimal(of_type))


def read_value(metadata: bytes) -> Any:
    """Decode the value of an answer without a table.

    Raises:
        RocketMQError: the answer is a refusal; the class that the broker raised.
    """
    answer = json.loads(metadata)
    if "error" not in answer:
        return answer["value"]
    raise _raised(answer)


def _raised(answer: Mapping[str, Any]) -> errors.RocketMQError:
    error = errors.by_name(answer["error"])(answer["message"])
    vars(error).update(answer.get("details", {}))
    return error


def _said(
    error: errors.RocketMQError, message: str, *, details: Mapping[str, Any]
) -> dict[str, Any]:
    return {"error": type(error).__name__, "message": message, "details": details}


def _details(error: errors.RocketMQError) -> dict[str, Any]:
    return {k: v for k, v in vars(error).items() if isinstance(v, str | int | float | None)}
