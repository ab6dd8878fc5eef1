"""Encoding of answers: tables in pieces, other values as JSON, and refusals, which are JSON too.

A refusal is sent as an answer, because gRPC truncates long error texts. Before the body of a call
is read completely, the status of the call carries the refusal: a client that is still writing would
lose an answer.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import errors, limits
from rmq_pipeline.flight import streams
from rmq_pipeline.sound_tables import check_readable

#: Target size of a piece of a table.
PIECE_BYTES: Final = 16 * limits.MIB
#: First byte of a piece of a table; JSON begins with a brace.
_TABLE: Final = b"T"
#: Prefix of a status text that contains a refusal, and maximum characters of each text in it.
_REFUSAL: Final = "rmq refused "
_STATUS_CHARS: Final = 500
#: A client drops the connection if a status exceeds gRPC's 8 KiB of metadata.
_STATUS_BYTES: Final = 4096
#: The error text of gRPC's server when FLIGHT_CALLS calls are running.
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
        yield b"".join((_TABLE, memoryview(streams.pack(table.slice(start, rows)))))


def value(value: object) -> bytes:
    """Encode the answer of a verb that returns no table."""
    return json.dumps({"value": value}, separators=(",", ":")).encode()


def refusal(error: errors.RocketMQError) -> bytes:
    """Encode a refusal; the client raises the same class with the same message."""
    answer = _said(error, error.message, details=_details(error))
    return json.dumps(answer, separators=(",", ":")).encode()


def refusal_status(error: errors.RocketMQError) -> str:
    """Return the status text of a refusal; long texts are truncated to _STATUS_BYTES."""
    characters = _STATUS_CHARS
    said = _short_refusal(error, characters)
    while characters and _bytes_of_status(said) > _STATUS_BYTES:
        characters //= 2
        said = _short_refusal(error, characters)
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
        raise TooManyCallsError(f"The broker has {limits.FLIGHT_CALLS} calls under way.")
    _, is_refusal, rest = said.partition(_REFUSAL)
    if is_refusal:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            answer, _ = json.JSONDecoder().raw_decode(rest)
            raise _raised(answer)


def read(messages: Sequence[pa.Buffer]) -> Any:
    """Decode the table or value of an answer.

    Raises:
        RocketMQError: the answer is a refusal; the class that the broker raised.
    """
    if messages[0][:1].to_pybytes() == _TABLE:
        return _table([piece.slice(1) for piece in messages])
    return read_value(messages[0].to_pybytes())


def _table(pieces: Sequence[pa.Buffer]) -> pa.Table:
    try:
        table = streams.together([streams.read("The answer", piece) for piece in pieces])
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
