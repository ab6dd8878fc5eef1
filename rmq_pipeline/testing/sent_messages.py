"""Messages as tests write them: bodies, or columns of a message, as a table for ``send``."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.errors import RequestError

#: A body, or a mapping of columns of schema.SEND with the key ``body``.
Message: TypeAlias = bytes | str | Mapping[str, Any]

_FORMS: Final = (
    'Give bytes, a text, a dict that becomes JSON, or a dict of columns such as {"body": "paid",'
    ' "message_group": "order-1"}.'
)


def table_of(messages: pa.Table | Sequence[Message], *, deliver_at_ms: int | None) -> pa.Table:
    """Return messages as a table with columns of schema.SEND.

    Args:
        messages: a table, which is taken as it is, or a list.
        deliver_at_ms: delivery time of the messages that have none; None: deliver now.

    Raises:
        RequestError: names the message that is invalid.
    """
    if isinstance(messages, pa.Table):
        return messages if deliver_at_ms is None else _scheduled(messages, deliver_at_ms)
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"The messages are a {type(messages).__name__}, not a list.",
            remedy="Give a list, also for one message, or a pyarrow Table.",
        )
    rows = [_row(each, number) for number, each in enumerate(messages)]
    used = {"body", *(name for row in rows for name in row)}
    found = pa.table(
        [_column(rows, field) for field in schema.SEND if field.name in used],
        names=[name for name in schema.SEND.names if name in used],
    )
    return found if deliver_at_ms is None else _scheduled(found, deliver_at_ms)


def _row(message: Any, number: int) -> dict[str, Any]:
    """Return the columns of a message, with its body as bytes."""
    if not isinstance(message, Mapping) or "body" not in message:
        return {"body": _body(message, number)}
    if unknown := [str(name) for name in message if name not in schema.SEND.names]:
        raise RequestError(
            f"Message {number} has the key body, so its keys are columns of a message, and"
            f" {', '.join(unknown)} is no such column.",
            remedy=f"Columns are {', '.join(schema.SEND.names)}. If the dict itself is the body,"
            ' write {"body": {…}}.',
        )
    return {**message, "body": _body(message["body"], number)}


def _body(body: Any, number: int) -> bytes:
    if isinstance(body, bytes):
        return body
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, Mapping):
        try:
            return json.dumps(body).encode()
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"The body of message {number} cannot be JSON: {error}.", remedy=_FORMS
            ) from error
    raise RequestError(f"Message {number} has the body {body!r}.", remedy=_FORMS)


def _column(rows: Sequence[Mapping[str, Any]], field: pa.Field) -> pa.Array:
    values = [row.get(field.name) for row in rows]
    if field.name == "properties":
        values = [list(each.items()) if isinstance(each, Mapping) else each for each in values]
    try:
        return pa.array(values, field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise RequestError(
            f"Column {field.name} of the messages is not {field.type}: {error}.",
            remedy="Give each message a value of this type, or leave the column out.",
        ) from error


def _scheduled(messages: pa.Table, deliver_at_ms: int) -> pa.Table:
    """Return the messages with this delivery time, where they have none."""
    name, kind = "deliver_at_ms", schema.SEND.field("deliver_at_ms").type
    times = pa.repeat(pa.scalar(deliver_at_ms, kind), messages.num_rows)
    if name not in messages.column_names:
        return messages.append_column(name, times)
    own = messages[name].cast(kind).fill_null(deliver_at_ms)
    return messages.set_column(messages.column_names.index(name), name, own)
