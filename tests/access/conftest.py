"""A broker with users behind a table endpoint, and something in it to ask for."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.access.policy import Policy
from rmq_pipeline.broker import Broker
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.settings import Settings

SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)
PASSWORDS = {"root": "root-password", "ann": "ann-password"}
TOKEN = "token-of-the-home"

#: ``sign_in("ann")``: a client that calls as she.
SignIn = Callable[..., Client]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    home: Path = tmp_path_factory.mktemp("access") / "home"
    with Broker.open(home, upkeep="none", settings=SMALL) as broker:
        broker.create_user("root", password=PASSWORDS["root"], type="super")
        broker.create_user("ann", password=PASSWORDS["ann"])
        broker.create_topic("orders", queues=1)
        broker.create_topic("pays", type="transaction", queues=1)
        broker.create_group("billing")
        yield broker


@pytest.fixture(scope="module")
def endpoint(broker: Broker) -> Iterator[FlightServer]:
    server = FlightServer(broker, token=TOKEN, access=broker.access)
    yield server
    server.shutdown()


@pytest.fixture(scope="module")
def sign_in(endpoint: FlightServer) -> Iterator[SignIn]:
    clients: list[Client] = []

    def connect(user: str | None = None, *, token: str | None = None, **more: str) -> Client:
        password = more.get("password") or (PASSWORDS.get(user) if user else None)
        client = Client(endpoint.address, user=user, password=password, token=token, retry_s=0)
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def allow(broker: Broker) -> Iterator[Callable[..., None]]:
    """``allow("topic:orders pub", …)``: all that ann may do."""

    def put(*rights: str, effect: str = "allow", sources: tuple[str, ...] = ()) -> None:
        broker.access.delete_policies("ann", where=lambda _: True)
        together: dict[str, list[str]] = {}
        for right in rights:
            resource, _, action = right.rpartition(" ")
            together.setdefault(resource, []).append(action)
        for resource, actions in together.items():
            broker.access.put_policy(
                Policy.make(
                    "ann", resource=resource, effect=effect, actions=actions, sources=sources
                )
            )

    yield put
    broker.access.delete_policies("ann", where=lambda _: True)


def messages(n: int = 1) -> pa.Table:
    return pa.table({"body": [b"hello"] * n})
