"""A call made byte by byte: what our client would never send."""

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyarrow import flight

from rmq_pipeline import errors
from rmq_pipeline.flight import framing, wire

Pieces = Iterable[tuple[str, bytes]]


def exchange(
    address: str,
    command: bytes | dict[str, Any],
    pieces: Pieces = (),
    *,
    headers: Any = (),
    timeout_s: float = 30.0,
) -> Any:
    """The value, or the table, that a call is answered.

    Raises:
        RocketMQError: what it was refused with.
        FlightError: it was not answered at all.
    """
    token = None
    parts = [(name, pa.py_buffer(data)) for name, data in pieces]
    if isinstance(command, dict):
        lengths = [(name, data.size) for name, data in parts]
        command = {"parts": lengths, **command}
        token = command.pop("token", None)
        command = json.dumps(command).encode()
    given = dict(headers)
    if token is not None:
        given[wire.TOKEN] = token
    options = flight.FlightCallOptions(
        timeout=timeout_s, headers=[(key.encode(), value.encode()) for key, value in given.items()]
    )
    descriptor = flight.FlightDescriptor.for_command(command)
    found = []
    try:
        with flight.FlightClient(f"grpc://{address}") as client:
            writer, reader = client.do_exchange(descriptor, options)
            # A call that is refused ends before all is written: what is read then says why.
            with suppress(flight.FlightError, pa.ArrowException), writer:
                for data in framing.body(parts):
                    writer.write_metadata(data)
                writer.done_writing()
                found = [chunk.app_metadata for chunk in reader]
            found = found or [chunk.app_metadata for chunk in reader]
    except (flight.FlightError, pa.ArrowException) as error:
        wire.check_status(str(error))
        raise
    return wire.read_answer(found)


def refusal(
    address: str, command: bytes | dict[str, Any], pieces: Pieces = (), **how: Any
) -> errors.RocketMQError | None:
    """What a call was refused with; None: it was carried out."""
    try:
        exchange(address, command, pieces, **how)
    except errors.RocketMQError as error:
        return error
    return None


def message(command: bytes) -> bytes:
    """A Flight message whose descriptor has this command."""
    descriptor = b"\x12" + _length(command) + command
    return b"\x0a" + _length(descriptor) + descriptor


def action(body: bytes) -> bytes:
    """A Flight action with this body."""
    kind = framing.CALL.encode()
    return b"\x0a" + _length(kind) + kind + b"\x12" + _length(body) + body


def _length(of: bytes) -> bytes:
    return bytes([len(of) & 0x7F | 0x80, len(of) >> 7])
