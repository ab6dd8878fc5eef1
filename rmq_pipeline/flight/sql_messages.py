"""The protobuf messages of Flight and Flight SQL that foreign clients send and receive.

The messages are described here and built at import, in a pool of their own: the files of the
protocol are not part of any package that the broker needs. Field numbers are those of Flight.proto
and FlightSql.proto of Apache Arrow. A field that is not listed is skipped, as protobuf prescribes.
"""

from typing import Any, Final

from google.protobuf import any_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from rmq_pipeline import limits
from rmq_pipeline.errors import MessageBodyTooLargeError, RequestError

#: Package of Flight's messages, and of Flight SQL's messages; an Any names these.
_FLIGHT: Final = "arrow.flight.protocol"
_SQL: Final = f"{_FLIGHT}.sql"
_URL: Final = f"type.googleapis.com/{_SQL}."
#: A field is ``name kind number``. A kind may be the name of a message, ``[]`` means repeated,
#: and ``?`` that an absent value differs from an empty one.
_FIELDS: Final = {
    _FLIGHT: {
        "FlightDescriptor": "type int32 1, cmd bytes 2",
        "Ticket": "ticket bytes 1",
        "FlightEndpoint": "ticket Ticket 1",
        "FlightInfo": "schema bytes 1, flight_descriptor FlightDescriptor 2,"
        " endpoint FlightEndpoint[] 3, total_records int64 4, total_bytes int64 5, ordered bool 6",
        "SchemaResult": "schema bytes 1",
        "PutResult": "app_metadata bytes 1",
        "CancelFlightInfoRequest": "info FlightInfo 1",
        "CancelFlightInfoResult": "status int32 1",
    },
    _SQL: {
        "CommandStatementQuery": "query string 1, transaction_id bytes? 2",
        "CommandPreparedStatementQuery": "prepared_statement_handle bytes 1",
        "TicketStatementQuery": "statement_handle bytes 1",
        "CommandGetSqlInfo": "info uint32[] 1",
        "CommandGetXdbcTypeInfo": "data_type int32? 1",
        "CommandGetCatalogs": "",
        "CommandGetDbSchemas": "catalog string? 1, db_schema_filter_pattern string? 2",
        "CommandGetTables": "catalog string? 1, db_schema_filter_pattern string? 2,"
        " table_name_filter_pattern string? 3, table_types string[] 4, include_schema bool 5",
        "CommandGetTableTypes": "",
        "CommandGetPrimaryKeys": "",
        "CommandGetExportedKeys": "",
        "CommandGetImportedKeys": "",
        "CommandGetCrossReference": "",
        "ActionCreatePreparedStatementRequest": "query string 1, transaction_id bytes? 2",
        "ActionCreatePreparedStatementResult": "prepared_statement_handle bytes 1,"
        " dataset_schema bytes 2, parameter_schema bytes 3",
        "DoPutPreparedStatementResult": "prepared_statement_handle bytes? 1",
    },
}
#: Maximum characters of a name in an error text.
_SHOWN: Final = 100


def _file() -> FileDescriptorProto:
    """Describe all messages in one file of the package of Flight SQL.

    Flight's own messages are in it, too: their names do not appear in any encoded message.
    """
    file = FileDescriptorProto(name="rmq/flight_sql.proto", package=_SQL, syntax="proto3")
    for messages in _FIELDS.values():
        for name, fields in messages.items():
            message = file.message_type.add(name=name)
            for field in filter(None, fields.split(", ")):
                name_of, kind, number = field.split()
                _add(message, name_of, kind=kind, number=int(number))
    return file


def _add(message: DescriptorProto, name: str, *, kind: str, number: int) -> None:
    plain = kind.removesuffix("[]").removesuffix("?")
    field = message.field.add(name=name, number=number)
    field.label = FieldDescriptorProto.LABEL_OPTIONAL
    if kind.endswith("[]"):
        field.label = FieldDescriptorProto.LABEL_REPEATED
    if kind.endswith("?"):
        field.oneof_index = len(message.oneof_decl)
        field.proto3_optional = True
        message.oneof_decl.add(name=f"_{name}")
    if plain[0].islower():
        field.type = getattr(FieldDescriptorProto, f"TYPE_{plain.upper()}")
    else:
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{_SQL}.{plain}"


def _classes() -> dict[str, Any]:
    pool = DescriptorPool()
    pool.Add(_file())
    names = (name for messages in _FIELDS.values() for name in messages)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{_SQL}.{name}")) for name in names}


_CLASSES: Final = _classes()


def new(name: str, **fields: Any) -> Any:
    """Return a message with these fields."""
    return _CLASSES[name](**fields)


def read(name: str, data: bytes) -> Any:
    """Decode a message.

    Raises:
        RequestError: the bytes are not such a message, or a text in it is not UTF-8.
        MessageBodyTooLargeError: they are too many.
    """
    return _parsed(_CLASSES[name](), data, name=name)


def read_any(data: bytes) -> tuple[str, Any]:
    """Decode an Any; return the name of the message in it, without its package, and the message.

    The message is None if it is none of those described here. An Any within the Any is not
    decoded.

    Raises:
        RequestError: the bytes are not an Any of a message of Flight SQL.
    """
    whole = _parsed(any_pb2.Any(), data, name="command of Flight SQL")
    if not whole.type_url.startswith(_URL):
        raise RequestError(
            f"The command is not one of Flight SQL: its type is {whole.type_url[:_SHOWN]!r}."
        )
    name: str = whole.type_url.removeprefix(_URL)
    found = read(name, whole.value) if name in _FIELDS[_SQL] else None
    return name[:_SHOWN], found


def write_any(message: Message) -> bytes:
    """Encode a message of Flight SQL in an Any."""
    found = any_pb2.Any(type_url=_URL + message.DESCRIPTOR.name, value=message.SerializeToString())
    return bytes(found.SerializeToString())


def _parsed(message: Any, data: bytes, *, name: str) -> Any:
    if len(data) > limits.FLIGHT_SQL_MESSAGE_BYTES:
        raise MessageBodyTooLargeError(
            f"A message of the call has {len(data)} bytes; the limit is"
            f" {limits.FLIGHT_SQL_MESSAGE_BYTES}.",
            remedy="Send a shorter statement.",
        )
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise RequestError(f"A message of the call is not a {name}.") from error
    return message
