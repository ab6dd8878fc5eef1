"""Encoding of calls: each is one ``do_exchange`` or one ``do_action`` of Arrow Flight.

Headers name the caller (``authorization``, or ``x-rmq-token``, the token of the home). A call can
therefore be refused before its first byte is read. The command of the descriptor is JSON:
``{"verb", "args", "parts"}``. Parts are names and lengths of tables, which follow as the body of
the call (see ``framing``). Each table is an Arrow IPC stream named after its argument
(``messages``, or ``publish/<topic>`` for a table in a mapping). A call can therefore also be
refused before its body is read. See ``answers`` for the answers. A Flight error without a refusal
means that the connection was lost.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pyarrow as pa

from rmq_pipeline import errors, limits
from rmq_pipeline.flight import streams
from rmq_pipeline.flight.framing import Part
from rmq_pipeline.verb import Verb
from rmq_pipeline.verbs import VERBS

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
        return [(name, streams.pack(table)) for name, table in self.tables.items()]


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
    for name, table in streams.unpack(parts).items():
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


def as_table(name: str, value: object) -> pa.Table:
    """Return the value as a table.

    Raises:
        TableSchemaError: the value is not a table.
    """
    if isinstance(value, pa.Table):
        return value
    if isinstance(value, pa.RecordBatch):
        return pa.Table.from_batches([value])
    if name == "receipts" and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if not all(isinstance(handle, str) for handle in value):
            raise errors.TableSchemaError(
                f"receipts must be receipt handles, which are texts, not {value!r}."
            )
        return pa.table({"receipt_handle": pa.array(value, pa.string())})
    raise errors.TableSchemaError(f"{name} is a {type(value).__name__}, not a pyarrow.Table.")
