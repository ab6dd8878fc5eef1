"""Official clients, their brokers, and what they saw."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from rmq_pipeline.flight.client import Client
from tests.conformance import brokers
from tests.conformance.brokers import Facts, Official, Served

Seen = Callable[[str], Facts]

#: Client, and what its topics and groups begin with.
PREFIXES: Final = {"python": "py", "node": "js"}
BOTH: Final = (
    "normal",
    "fifo",
    "delay",
    "recall",
    "priority",
    "transaction",
    "send_async",
    "refusals",
    "namespaces",
    "over_tls",
    "access",
    "filters",
    "invisible",
    "push_concurrent",
    "push_fifo",
    "lite",
)
#: What only this client has.
OWN: Final = {"python": ("receive_async", "push_queue", "queue_order"), "node": ()}
TOPICS: Final = {
    "normal": "normal",
    "fifo": "fifo",
    "delay": "delay",
    "recall": "delay",
    "priority": "priority",
    "transaction": "transaction",
    "send-async": "normal",
    "receipts": "normal",
    "tls": "normal",
    "filters": "normal",
    "invisible": "normal",
    "push": "normal",
    "push-fifo": "fifo",
    "lite": "lite",
    "receive-async": "normal",
}


@dataclass(frozen=True)
class Secured:
    """A broker that asks who calls, and the secrets of its users."""

    served: Served
    users: dict[str, str]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The broker of the official clients, with both ports."""
    home = tmp_path_factory.mktemp("conformance") / "home"
    flags = ("--grpc-tls", brokers.ANY_PORT, "--tls", "self-made")
    # Longer than the clients take between a half and its end: only the orphan is asked about.
    with brokers.serving(home, *flags, transaction_immunity_ms=15_000) as served:
        with Client(home=served.home) as client:
            for prefix in PREFIXES.values():
                _declare(client, prefix)
        yield served


def _declare(client: Client, prefix: str) -> None:
    for name, kind in TOPICS.items():
        # The queues of a topic of priorities are the priorities that it knows.
        queues = 10 if kind == "priority" else 4
        client.ensure_topic(f"{prefix}-{name}", type=kind, queues=queues)
    for namespace in ("north", "south"):
        client.ensure_topic(f"{namespace}%{prefix}-shared-name", queues=2)
    client.ensure_group(f"{prefix}-push-group", backoff_ms=[1000])
    client.ensure_group(
        f"{prefix}-push-fifo-group", order="message_group", max_attempts=3, backoff_ms=[1000]
    )
    client.ensure_group(f"{prefix}-fifo-group", order="message_group")
    for name in ("push-queue", "queue-order"):
        client.ensure_topic(f"{prefix}-{name}", type="fifo", queues=1)
        client.ensure_group(
            f"{prefix}-{name}-group", order="queue", max_attempts=3, backoff_ms=[1000]
        )


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[Client]:
    """The other endpoint of the same broker: what happened, as the broker knows it."""
    with Client(home=served.home) as client:
        yield client


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A broker that asks who calls."""
    with brokers.serving(tmp_path_factory.mktemp("secured") / "home") as served:
        for prefix in PREFIXES.values():
            brokers.rmq(served, "topic", "create", f"{prefix}-access")
            brokers.rmq(served, "topic", "create", f"{prefix}-forbidden")
        made = brokers.rmq(served, "user", "create", "writer")
        for prefix in PREFIXES.values():
            what = (f"topic:{prefix}-access", "--actions", "pub")
            brokers.rmq(served, "acl", "allow", "writer", *what)
        yield Secured(served, {"writer": made["password"]})


@pytest.fixture(scope="session")
def started(served: Served, secured: Secured) -> Iterator[dict[str, Official]]:
    """Both clients, at work on all scenarios at once."""
    roots = str(certificate(served.home))
    found: dict[str, Official] = {}
    for name, prefix in PREFIXES.items():
        place = {
            "endpoints": served.grpc,
            "tls_endpoints": tls_address(served),
            "secured_endpoints": secured.served.grpc,
            "users": secured.users,
            "prefix": prefix,
        }
        todo = {"scenarios": [*BOTH, *OWN[name]], "place": place}
        environment = {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": roots}
        if name == "python":
            environment["TZ"] = "CST-8"  # its clock is 8 h ahead, and it signs what that shows
            found[name] = brokers.python("python_client", todo, **environment)
        elif shutil.which("node"):
            found[name] = brokers.node("client.js", todo, **environment)
    yield found
    for official in found.values():
        official.end()


def certificate(home: Path) -> Path:
    """The certificate that the broker has made for itself."""
    return home / "tls" / "certificate.pem"


def tls_address(served: Served) -> str:
    """Where the endpoint for TLS is; the certificate is for names, too."""
    address: str = brokers.rmq(served, "status")["grpc_tls"]
    return address


@pytest.fixture(scope="session")
def known() -> dict[str, Facts]:
    """What each client saw, once it has ended."""
    return {}


@pytest.fixture
def seen(started: dict[str, Official], known: dict[str, Facts]) -> Callable[[str, str], Facts]:
    """``seen("node", "fifo")``: what a client saw in a scenario."""

    def find(name: str, scenario: str) -> Facts:
        if name not in started:
            pytest.skip("node is not installed: nothing runs the Node client")
        if name not in known:
            known[name] = started[name].facts()
        facts: Facts = known[name][scenario]
        assert "error" not in facts, facts["error"]
        return facts

    return find


@pytest.fixture(params=PREFIXES)
def both(request: pytest.FixtureRequest, seen: Callable[[str, str], Facts]) -> Seen:
    """``both("fifo")``: what each client in turn saw in a scenario."""
    return lambda scenario: seen(request.param, scenario)


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """What the topics and groups of this client begin with."""
    return PREFIXES[request.node.callspec.params["both"]]
