"""Flight SQL: SELECT for ADBC, JDBC and the tools that use them, at the Flight endpoint.

Each query is a call of the verb ``sql``, with its rights and limits. A call is authenticated and
authorized by its headers, before its first byte is read. The broker keeps nothing between two
calls: a ticket and the handle of a prepared statement contain the statement, signed for the caller.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits
from rmq_pipeline.access import Principal
from rmq_pipeline.errors import NotFoundError, QueryError, RequestError, RocketMQError
from rmq_pipeline.flight import framing, sql_catalog, sql_messages
from rmq_pipeline.flight.service import (
    Caller,
    CancelledError,
    Room,
    SqlCall,
    UnsupportedError,
)
from rmq_pipeline.flight.sql_statement import Handles, Opened, Statement
from rmq_pipeline.tables import check_readable

_TICKET: Final = "ticket"
_PREPARED: Final = "prepared statement"
#: What a command changes that is refused.
_REFUSED: Final = {
    "CommandStatementUpdate": "statements other than SELECT",
    "CommandPreparedStatementUpdate": "statements other than SELECT",
    "CommandStatementIngest": "the writing of tables",
    "CommandStatementSubstraitPlan": "Substrait plans",
    "BeginTransaction": "transactions",
    "EndTransaction": "transactions",
    "BeginSavepoint": "transactions",
    "EndSavepoint": "transactions",
    "CreatePreparedSubstraitPlan": "Substrait plans",
    "CancelQuery": "this action, which Flight SQL has replaced by CancelFlightInfo",
    "SetSessionOptions": "session options",
    "GetSessionOptions": "session options",
    "CloseSession": "sessions: a connection has no state, so there is nothing to close",
}
#: States of a cancellation.
_CANCELLED: Final = 1


class Asked(Protocol):
    """The part of the Flight server that calls verbs."""

    def admit(self, call: Caller) -> Principal | None:
        """Return the caller, whose headers allow the verb ``sql``."""
        ...

    def ask(self, call: Caller, method: str, *, args: dict[str, Any]) -> Any:
        """Call a method of the broker with the rights of the verb ``sql``."""
        ...


class SqlEndpoint:
    """Answers the calls of Flight SQL."""

    def __init__(self, asked: Asked, room: Room, *, silent_s: float) -> None:
        """Create the endpoint.

        Args:
            asked: calls the verbs.
            room: counts the bytes of parameters and answers.
            silent_s: parameters are refused if nothing arrives for this long.
        """
        self._asked = asked
        self._room = room
        self._silent_s = silent_s
        self._handles = Handles()
        #: Queries under way by the ids of their tickets; set: cancelled.
        self._running: dict[bytes, threading.Event] = {}

    # ------------------------------------------------------------------------------ descriptors

    def info(self, call: SqlCall) -> Iterator[bytes]:
        """Answer GetFlightInfo: a ticket for a statement or for a question about the tables.

        Nothing runs before the ticket is used. So a statement's errors, and its columns, come then.
        """
        principal = self._asked.admit(call)
        caller = _name(principal)
        descriptor, name, command = self._described(call, _holder(call, principal))
        columns = b""
        if name in sql_catalog.COMMANDS:
            ticket = descriptor.cmd
            columns = _encoded(sql_catalog.schema(name, command))
        else:
            text = self._text(name, command, caller=caller)
            handle = self._handles.seal(_TICKET, text, caller=caller)
            found = sql_messages.new("TicketStatementQuery", statement_handle=handle)
            ticket = sql_messages.write_any(found)
        endpoint = sql_messages.new(
            "FlightEndpoint", ticket=sql_messages.new("Ticket", ticket=ticket)
        )
        yield _written(
            "FlightInfo",
            schema=columns,
            flight_descriptor=descriptor,
            endpoint=[endpoint],
            total_records=-1,
            total_bytes=-1,
        )

    def schema(self, call: SqlCall) -> Iterator[bytes]:
        """Answer GetSchema: the columns of an answer, with NULL in place of parameters."""
        principal = self._asked.admit(call)
        caller = _name(principal)
        _, name, command = self._described(call, _holder(call, principal))
        if name in sql_catalog.COMMANDS:
            columns = sql_catalog.schema(name, command)
        else:
            columns = self._columns(call, self._statement(name, command, caller=caller))
        yield _written("SchemaResult", schema=_encoded(columns))

    def _text(self, name: str, command: Any, *, caller: str) -> str:
        """Return the text to run: a query's own, or a prepared statement's with its values."""
        if name == "CommandPreparedStatementQuery":
            _, filled = self._prepared(command, caller=caller)
            if filled:
                return filled
        return self._statement(name, command, caller=caller).check_bound()

    def _statement(self, name: str, command: Any, *, caller: str) -> Statement:
        if name == "CommandStatementQuery":
            _check_no_transaction(command)
            return Statement.parse(command.query)
        if name == "CommandPreparedStatementQuery":
            return Statement.parse(self._prepared(command, caller=caller)[0])
        raise _unsupported(name)

    def _seal(self, text: str, filled: str = "", *, caller: str) -> bytes:
        """Return the handle of a prepared statement, whose values can be bound again."""
        return self._handles.seal(_PREPARED, f"{text}\0{filled}", caller=caller)

    def _prepared(self, command: Any, *, caller: str) -> tuple[str, str]:
        """Return the text of a prepared statement, and the text with its values, if it has any."""
        handle = command.prepared_statement_handle
        text, _, filled = self._handles.open(_PREPARED, handle, caller=caller).text.partition("\0")
        return text, filled

    def _columns(self, call: Caller, statement: Statement) -> pa.Schema:
        found = self._asked.ask(call, "sql_schema", args={"query": statement.without_values()})
        assert isinstance(found, pa.Schema)
        return _plain_schema(found)

    # ---------------------------------------------------------------------------------- answers

    def get(self, call: SqlCall) -> Iterator[bytes]:
        """Answer DoGet: run the query of a ticket, and yield its rows in messages."""
        principal = self._asked.admit(call)
        holder = _holder(call, principal)
        table = self._answer(call, caller=_name(principal), holder=holder)
        with self._room.hold(table.nbytes, caller=holder):
            yield from _messages(table)

    def _answer(self, call: SqlCall, *, caller: str, holder: str) -> pa.Table:
        name, command = self._ticket(self._next(call), holder)
        if name in sql_catalog.COMMANDS:
            return sql_catalog.answer(
                name, command, views=lambda: self._asked.ask(call, "sql_views", args={})
            )
        if name != "TicketStatementQuery":
            raise _unsupported(name)
        return self._run(call, self._handles.open(_TICKET, command.statement_handle, caller=caller))

    def _ticket(self, data: bytes, holder: str) -> tuple[str, Any]:
        with self._decoding(data, holder=holder):
            ticket = sql_messages.read("Ticket", data).ticket
            name, command = sql_messages.read_any(ticket)
        return name, command

    def _run(self, call: Caller, opened: Opened) -> pa.Table:
        cancelled = threading.Event()
        with self._cancellable(opened.id, cancelled):
            try:
                found = self._asked.ask(
                    _Cancellable(call, cancelled), "sql", args={"query": opened.text}
                )
            except QueryError as error:
                if cancelled.is_set():
                    raise CancelledError("The query was cancelled by CancelFlightInfo.") from error
                raise
        assert isinstance(found, pa.Table)
        return found

    @contextmanager
    def _cancellable(self, ticket: bytes, cancelled: threading.Event) -> Iterator[None]:
        """Register a query, so that a call of CancelFlightInfo ends it.

        Raises:
            RequestError: the ticket is being used already.
        """
        if self._running.setdefault(ticket, cancelled) is not cancelled:
            raise RequestError(
                "The ticket is being used.", remedy="Ask for a ticket for each execution."
            )
        try:
            yield
        finally:
            del self._running[ticket]

    # ------------------------------------------------------------------------------- parameters

    def put(self, call: SqlCall) -> Iterator[bytes]:
        """Answer DoPut: bind parameters to a prepared statement, and return its new handle."""
        principal = self._asked.admit(call)
        holder = _holder(call, principal)
        with self._room.hold(limits.FLIGHT_SQL_PARAMETERS_BYTES, caller=holder):
            handle = self._bound(call, caller=_name(principal), holder=holder)
        found = sql_messages.new("DoPutPreparedStatementResult", prepared_statement_handle=handle)
        yield _written("PutResult", app_metadata=found.SerializeToString())

    def _bound(self, call: SqlCall, *, caller: str, holder: str) -> bytes:
        """Read the parameters of a call, and return the handle of the statement with them."""
        stream = framing.Stream(limits.FLIGHT_SQL_PARAMETERS_BYTES)
        first = framing.read_data(self._next(call))
        stream.add(first)
        data = first.command or b""
        with self._decoding(data, holder=holder):
            name, command = sql_messages.read_any(data)
        if name != "CommandPreparedStatementQuery":
            raise _unsupported(name)
        statement = self._statement(name, command, caller=caller)
        del first, data  # the first message may be long
        while (message := self._message(call)) is not None:
            stream.add(framing.read_data(message))
            self._room.check_share(holder)
        values = framing.read("The table of parameters", stream.whole())
        check_readable(values, "The table of parameters")
        return self._seal(statement.text, statement.bind(values), caller=caller)

    def _described(self, call: SqlCall, holder: str) -> tuple[Any, str, Any]:
        """Read the descriptor of a call; return it, and name and message of its command."""
        data = self._next(call)
        with self._decoding(data, holder=holder):
            descriptor = sql_messages.read("FlightDescriptor", data)
            name, command = sql_messages.read_any(descriptor.cmd)
        return descriptor, name, command

    @contextmanager
    def _decoding(self, data: bytes, *, holder: str) -> Iterator[None]:
        """Reserve the memory that a message may take when it is decoded.

        A message that is too long is not counted: it is refused before it is decoded.
        """
        size = len(data) if len(data) <= limits.FLIGHT_SQL_MESSAGE_BYTES else 0
        with self._room.hold(limits.FLIGHT_SQL_DECODED * size, caller=holder):
            yield

    def _next(self, call: SqlCall) -> bytes:
        """Return the next message of a call, which must have one."""
        message = self._message(call)
        if message is None:
            raise RequestError("The call has no message.")
        return message

    def _message(self, call: SqlCall) -> bytes | None:
        try:
            return call.read(self._silent_s)
        except TimeoutError:
            raise RequestError(
                f"The call has sent nothing for {self._silent_s:g} s.", remedy="Call again."
            ) from None

    # ---------------------------------------------------------------------------------- actions

    def act(self, call: Caller, action: framing.ForeignAction) -> bytes:
        """Answer an action of Flight SQL.

        Raises:
            RocketMQError: it is refused, or none of Flight SQL that is supported.
        """
        principal = self._asked.admit(call)
        caller, holder = _name(principal), _holder(call, principal)
        if action.kind == "CreatePreparedStatement":
            return self._prepare(call, action.body, caller=caller, holder=holder)
        if action.kind == "ClosePreparedStatement":
            return b""  # the broker keeps nothing of it
        if action.kind == "CancelFlightInfo":
            return self._cancel(action.body, caller=caller, holder=holder)
        raise _unsupported(action.kind)

    def _prepare(self, call: Caller, body: bytes, *, caller: str, holder: str) -> bytes:
        with self._decoding(body, holder=holder):
            name, request = sql_messages.read_any(body)
        if name != "ActionCreatePreparedStatementRequest":
            raise RequestError(f"CreatePreparedStatement does not take {name}.")
        _check_no_transaction(request)
        statement = Statement.parse(request.query)
        columns = self._columns(call, statement)
        # Clients send the types that they have. JDBC's driver sends texts for texts only.
        parameters = pa.schema([(name, pa.string()) for name in statement.parameters])
        return sql_messages.write_any(
            sql_messages.new(
                "ActionCreatePreparedStatementResult",
                prepared_statement_handle=self._seal(statement.text, caller=caller),
                dataset_schema=_encoded(columns),
                parameter_schema=_encoded(parameters) if statement.parameters else b"",
            )
        )

    def _cancel(self, body: bytes, *, caller: str, holder: str) -> bytes:
        with self._decoding(body, holder=holder):
            info = sql_messages.read("CancelFlightInfoRequest", body).info
            if len(info.endpoint) != 1:
                raise RequestError("The flight to cancel must have one endpoint.")
            name, command = sql_messages.read_any(info.endpoint[0].ticket.ticket)
        if name != "TicketStatementQuery":
            raise _unsupported(f"CancelFlightInfo of {name}")
        opened = self._handles.open(_TICKET, command.statement_handle, caller=caller)
        running = self._running.get(opened.id)
        if running is None:
            raise NotFoundError("The query is not running.", remedy="It may have ended already.")
        running.set()
        return bytes(
            sql_messages.new("CancelFlightInfoResult", status=_CANCELLED).SerializeToString()
        )


class _Cancellable:
    """A call that another call can end."""

    def __init__(self, call: Caller, cancelled: threading.Event) -> None:
        self._call = call
        self._cancelled = cancelled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def is_active(self) -> bool:
        return not self._cancelled.is_set() and self._call.is_active()


def _name(principal: Principal | None) -> str:
    return "" if principal is None else principal.name


def _holder(call: Caller, principal: Principal | None) -> str:
    """Return the name under which a caller's memory is counted."""
    return call.peer if principal is None else principal.name


def _check_no_transaction(command: Any) -> None:
    if command.transaction_id:
        raise _unsupported("BeginTransaction")


def _unsupported(name: str) -> RocketMQError:
    what = _REFUSED.get(name, name)
    return UnsupportedError(
        f"The Flight SQL endpoint does not support {what}.",
        remedy="It reads: send one SELECT. Messages are sent with the client of rmq_pipeline or"
        " with RocketMQ's clients.",
    )


def _written(name: str, **fields: Any) -> bytes:
    return bytes(sql_messages.new(name, **fields).SerializeToString())


def _encoded(schema: pa.Schema) -> bytes:
    return bytes(schema.serialize().to_pybytes())


# ---------------------------------------------------------------------------------------- tables


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(_plain_type(field.type)) for field in schema])


def _plain_type(of_type: pa.DataType) -> pa.DataType:
    return of_type.value_type if pa.types.is_dictionary(of_type) else of_type


def _messages(table: pa.Table) -> Iterator[bytes]:
    """Yield a table as messages of about FLIGHT_SQL_PIECE_BYTES, and its schema first.

    Readers differ in how they take dictionaries, so enums are sent as texts. Their texts are larger
    than what was counted: never more than a piece of the table is converted.
    """
    schema = _plain_schema(table.schema)
    # No row of the texts may be longer than this.
    longest = sum(map(_longest, table.columns))
    rows = table.num_rows * limits.FLIGHT_SQL_PIECE_BYTES // max(1, table.nbytes)
    rows = max(1, min(rows, limits.FLIGHT_SQL_PIECE_BYTES // max(1, longest)))
    for start in range(0, max(1, table.num_rows), rows):
        piece = table.slice(start, rows)
        if schema != table.schema:
            piece = piece.cast(schema)
        for n, half in enumerate(_halved(piece)):
            yield from framing.write_data(half, with_schema=start == n == 0)


def _longest(column: pa.ChunkedArray) -> int:
    """Return the bytes of the longest value of an enum; 0 for another type."""
    if not pa.types.is_dictionary(column.type):
        return 0
    dictionaries = [chunk.dictionary for chunk in column.chunks if len(chunk.dictionary)]
    return max((_most_bytes(each) for each in dictionaries), default=0)


def _most_bytes(values: pa.Array) -> int:
    longest = pc.max(pc.binary_length(values.cast(pa.string()))).as_py()
    return longest or 0


def _halved(table: pa.Table) -> Iterator[pa.Table]:
    """Yield the rows in pieces that are not much larger than FLIGHT_SQL_PIECE_BYTES."""
    if table.num_rows < 2 or table.nbytes <= 2 * limits.FLIGHT_SQL_PIECE_BYTES:
        yield table
        return
    half = table.num_rows // 2
    yield from _halved(table.slice(0, half))
    yield from _halved(table.slice(half))
