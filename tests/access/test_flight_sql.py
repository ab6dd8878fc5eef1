"""Flight SQL with users: the right of the verb ``sql``, asked before anything is read."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import adbc_driver_flightsql.dbapi as adbc
import adbc_driver_manager
import grpc
import pytest
from adbc_driver_flightsql import DatabaseOptions
from pyarrow import flight

from rmq_pipeline.access import credentials
from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.broker import Broker
from rmq_pipeline.flight import sql_messages
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.limits import FlightLimits
from tests.access.conftest import PASSWORDS, TOKEN
from tests.access.verb_rights import CLUSTER

Allow = Callable[..., None]
SERVICE = "/arrow.flight.protocol.FlightService"
GET = f"{CLUSTER} get"


def connect(address: str, **options: str) -> adbc.Connection:
    uri = address if "://" in address else f"grpc://{address}"
    return adbc.connect(uri, db_kwargs=options, autocommit=True)


def one(connection: adbc.Connection) -> Any:
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT 1 AS one")
        return cursor.fetchone()


def as_user(user: str) -> dict[str, str]:
    return {"username": user, "password": PASSWORDS[user]}


def header(value: str) -> dict[str, str]:
    return {DatabaseOptions.AUTHORIZATION_HEADER.value: value}


@pytest.fixture
def client(endpoint: FlightServer) -> Iterator[flight.FlightClient]:
    with flight.connect(f"grpc://{endpoint.address}") as client:
        yield client


def options(user: str) -> flight.FlightCallOptions:
    authorization = credentials.basic(user, PASSWORDS[user])
    return flight.FlightCallOptions(headers=[(b"authorization", authorization.encode())])


def of_query(sql: str) -> flight.FlightDescriptor:
    command = sql_messages.new("CommandStatementQuery", query=sql)
    return flight.FlightDescriptor.for_command(sql_messages.write_any(command))


def test_the_right_of_the_verb_is_needed(endpoint: FlightServer, allow: Allow) -> None:
    with pytest.raises(adbc_driver_manager.ProgrammingError, match="may not get") as caught:
        one(connect(endpoint.address, **as_user("ann")))
    assert caught.value.status_code == adbc_driver_manager.AdbcStatusCode.UNAUTHORIZED

    allow(GET)
    assert one(connect(endpoint.address, **as_user("ann"))) == (1,)


def test_each_way_to_sign_in_is_accepted(endpoint: FlightServer, broker: Broker) -> None:
    principal = broker.access.authenticate(credentials.basic("root", PASSWORDS["root"]))
    assert principal is not None
    token = broker.access.token(principal)
    owner = {f"{DatabaseOptions.RPC_CALL_HEADER_PREFIX.value}x-rmq-token": TOKEN}

    assert one(connect(endpoint.address, **as_user("root"))) == (1,)
    for sent in (
        header(credentials.basic("root", PASSWORDS["root"])),
        header(f"Bearer {token}"),
        owner,
    ):
        assert one(connect(endpoint.address, **sent)) == (1,)


@pytest.mark.parametrize("length", range(8, 12))
def test_passwords_of_any_length_are_accepted(
    endpoint: FlightServer, broker: Broker, length: int
) -> None:
    """The driver sends base64 without padding."""
    name = f"of{length}"
    broker.create_user(name, password="p" * length, type="super")

    assert one(connect(endpoint.address, username=name, password="p" * length)) == (1,)
    broker.delete_user(name)


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"username": "root", "password": "wrong"},
        {"username": "nobody", "password": "root-password"},
        header("Basic ????"),
        header("Bearer root:1:00"),
        header("nonsense"),
    ],
)
def test_others_are_refused(endpoint: FlightServer, sent: dict[str, str]) -> None:
    with pytest.raises(adbc_driver_manager.ProgrammingError, match=r"user and password|Sign in"):
        one(connect(endpoint.address, **sent))


def test_tickets_and_prepared_statements_belong_to_their_user(
    client: flight.FlightClient, allow: Allow
) -> None:
    allow(GET)
    info = client.get_flight_info(of_query("SELECT 1 AS one"), options("root"))
    ticket = info.endpoints[0].ticket
    request = sql_messages.new("ActionCreatePreparedStatementRequest", query="SELECT ?")
    action = flight.Action("CreatePreparedStatement", sql_messages.write_any(request))
    (answer,) = client.do_action(action, options("root"))
    _, made = sql_messages.read_any(answer.body.to_pybytes())
    command = sql_messages.new(
        "CommandPreparedStatementQuery", prepared_statement_handle=made.prepared_statement_handle
    )
    prepared = flight.FlightDescriptor.for_command(sql_messages.write_any(command))

    with pytest.raises(flight.FlightUnauthorizedError, match="belongs to another user"):
        client.do_get(ticket, options("ann")).read_all()
    for ask in (client.get_flight_info, client.get_schema):
        with pytest.raises((flight.FlightError, OSError), match="belongs to another user"):
            ask(prepared, options("ann"))
    assert client.do_get(ticket, options("root")).read_all().num_rows == 1


def test_a_ticket_is_worth_nothing_once_its_user_lost_the_right(
    client: flight.FlightClient, allow: Allow
) -> None:
    allow(GET)
    info = client.get_flight_info(of_query("SELECT 1"), options("ann"))
    allow()

    with pytest.raises(flight.FlightUnauthorizedError, match="may not get"):
        client.do_get(info.endpoints[0].ticket, options("ann")).read_all()


@pytest.mark.parametrize(
    ("method", "user"),
    [
        *((each, "") for each in ("GetFlightInfo", "GetSchema", "DoGet", "DoPut", "DoAction")),
        # The rights of an action follow from its type, which is in its message.
        *((each, "ann") for each in ("GetFlightInfo", "GetSchema", "DoGet", "DoPut")),
    ],
)
def test_nothing_is_read_from_who_lacks_the_right(
    endpoint: FlightServer, allow: Allow, method: str, user: str
) -> None:
    allow("topic:orders get")
    metadata = (("authorization", credentials.basic(user, PASSWORDS[user])),) if user else ()

    call = silent_call(endpoint.address, method, metadata=metadata)

    refused = grpc.StatusCode.PERMISSION_DENIED if user else grpc.StatusCode.UNAUTHENTICATED
    assert call.code() == refused


def test_a_caller_that_sends_nothing_is_refused(broker: Broker) -> None:
    metadata = (("authorization", credentials.basic("root", PASSWORDS["root"])),)
    allowed = FlightLimits(silent_s=0.2)
    with FlightServer(broker, access=broker.access, allowed=allowed) as server:
        for method in ("GetFlightInfo", "DoGet", "DoPut"):
            call = silent_call(server.address, method, metadata=metadata)

            assert "sent nothing" in call.details()


def silent_call(address: str, method: str, *, metadata: Any) -> Any:
    """A call that sends no message, once the endpoint has ended it."""
    ended = threading.Event()

    def never() -> Iterator[bytes]:
        ended.wait(60)
        yield from ()

    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(f"{SERVICE}/{method}")(never(), metadata=metadata)
        with pytest.raises(grpc.RpcError):
            next(call)
        ended.set()
        return call


def test_a_connection_is_encrypted(broker: Broker, tmp_path: Path) -> None:
    made = Certificate.self_made(tmp_path)
    trusted = (tmp_path / "tls" / "certificate.pem").read_text()
    with FlightServer(broker, access=broker.access, certificate=made) as server:
        found = one(
            connect(
                f"grpc+tls://{server.address}",
                **as_user("root"),
                **{DatabaseOptions.TLS_ROOT_CERTS.value: trusted},
            )
        )

    assert found == (1,)
