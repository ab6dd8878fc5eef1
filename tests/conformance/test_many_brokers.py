"""Unmodified clients use a topic of three brokers through the route of any of them.

One broker stops and comes back while they send.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline.flight.client import Client
from tests.conformance import brokers
from tests.free_address import free_address

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

NAMES = ("a", "b", "c")
TYPES = {"": "normal", "-fifo": "fifo", "-half": "transaction", "-delay": "delay"}
#: Client, and what its topics begin with.
PREFIXES = {"python": "py", "node": "js"}
TOPICS = {
    f"{prefix}-routed{suffix}": kind
    for prefix in PREFIXES.values()
    for suffix, kind in TYPES.items()
}
#: Of broker c alone.
LITE = f"{PREFIXES['python']}-routed-lite"


@dataclass
class Homes:
    """Three brokers of one route table."""

    folder: Path
    addresses: dict[str, str]

    def __post_init__(self) -> None:
        self.served: dict[str, brokers.Served] = {}
        lines = [f'{name} = {{grpc = "{at}"}}' for name, at in self.addresses.items()]
        everywhere = ", ".join(f"{name} = 2" for name in self.addresses)
        for topic, kind in TOPICS.items():
            lines += [f"[topics.{topic}]", f'type = "{kind}"', f"queues = {{{everywhere}}}"]
        lines += [f"[topics.{LITE}]", 'type = "lite"', "queues = {c = 2}"]
        self.table.write_text("\n".join(["[brokers]", *lines]), "utf-8")

    @property
    def table(self) -> Path:
        return self.folder / "routes.toml"

    def start(self, name: str) -> None:
        flags = ("--set", f"route_table={self.table}", "--set", f"broker_name={name}")
        at = self.addresses[name]
        self.served[name] = brokers.serve(self.folder / name, *flags, grpc=at)

    def create_topics(self, name: str) -> None:
        with Client(self.served[name].flight) as client:
            for topic, kind in TOPICS.items():
                client.ensure_topic(topic, type=kind, queues=2)
            if name == "c":
                client.ensure_topic(LITE, type="lite", queues=2)

    def stored(self, name: str, topic: str) -> int:
        with Client(self.served[name].flight) as client:
            offsets = client.describe_topic(topic)["offsets"]
        return sum(row["max_offset"] for row in offsets)

    def port(self, name: str) -> int:
        return int(self.addresses[name].rpartition(":")[2])

    def end(self) -> None:
        for served in self.served.values():
            served.end()


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Homes]:
    homes = Homes(tmp_path_factory.mktemp("routes"), {name: free_address() for name in NAMES})
    try:
        for name in NAMES:
            homes.start(name)
            homes.create_topics(name)
        yield homes
    finally:
        homes.end()


@pytest.fixture(scope="module")
def known(homes: Homes) -> dict[str, brokers.Facts]:
    """What the clients saw; they dial broker a, and c is stopped for a while."""
    officials: dict[str, brokers.Official] = {}
    try:
        for name, prefix in PREFIXES.items():
            todo: dict[str, Any] = {"place": {"endpoints": homes.addresses["a"], "prefix": prefix}}
            if name == "python":
                todo["lite_endpoints"] = [homes.addresses["c"], homes.addresses["a"]]
                officials[name] = brokers.python("python_routes", todo)
            elif shutil.which("node"):
                officials[name] = brokers.node("routes.js", todo)
        assert {each.phase() for each in officials.values()} == {"all brokers"}
        homes.served["c"].end()
        for each in officials.values():
            each.go_on()
        assert {each.phase() for each in officials.values()} == {"without one"}
        homes.start("c")
        for each in officials.values():
            each.go_on()
        return {name: each.facts() for name, each in officials.items()}
    finally:
        for each in officials.values():
            each.end()


@pytest.fixture(params=PREFIXES)
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def seen(client: str, known: dict[str, brokers.Facts]) -> brokers.Facts:
    if client not in known:
        pytest.skip("node is not installed: nothing runs the Node client")
    return known[client]


def by_group(bodies: list[str]) -> dict[str, list[int]]:
    """Return the numbers of each message group, in order, each once."""
    found: dict[str, list[int]] = {}
    for body in bodies:
        group, number = body.split("-")
        numbers = found.setdefault(group, [])
        if int(number) not in numbers:
            numbers.append(int(number))
    return found


def test_message_groups_of_three_brokers_are_heard_in_order(
    homes: Homes, seen: brokers.Facts, client: str
) -> None:
    order = by_group(seen["order"])

    assert len(seen["order"]) == 300
    assert len(order) == 30
    assert all(numbers == list(range(10)) for numbers in order.values())
    assert all(homes.stored(name, f"{PREFIXES[client]}-routed-fifo") for name in NAMES)


def test_sends_without_a_message_group_go_round_a_stopped_broker(
    homes: Homes, seen: brokers.Facts
) -> None:
    before, without, after = seen["plain"]

    assert set(before["ports"]) == {homes.port(name) for name in NAMES}
    assert len(without["bodies"]) == 30
    assert set(without["ports"]) == {homes.port("a"), homes.port("b")}
    assert len(after["bodies"]) == 30


def test_a_stopped_broker_stops_its_message_groups_only(seen: brokers.Facts) -> None:
    before, without, after = seen["ordered"]

    stopped = {group for group, bodies in without.items() if not bodies}
    assert 0 < len(stopped) < 30
    assert all(len(without[group]) == 2 for group in without.keys() - stopped)
    assert all(len(bodies) == 10 for each in (before, after) for bodies in each.values())


def test_all_that_was_answered_is_heard_in_order(seen: brokers.Facts, client: str) -> None:
    plain = {body for each in seen["plain"] for body in each["bodies"]}
    assert set(seen["heard"][f"{PREFIXES[client]}-routed"]) >= plain

    answered: dict[str, list[str]] = {}
    for each in seen["ordered"]:
        for group, bodies in each.items():
            answered.setdefault(group, []).extend(bodies)
    heard = by_group(seen["heard"][f"{PREFIXES[client]}-routed-fifo"])
    for group, bodies in answered.items():
        assert heard[group] == sorted(heard[group])
        assert heard[group] == [int(body.split("-")[1]) for body in bodies]


def test_a_transaction_ends_at_the_broker_of_its_half(homes: Homes, seen: brokers.Facts) -> None:
    assert seen["transactions"]["ports"] == sorted(homes.port(name) for name in NAMES)
    assert sorted(seen["transactions"]["heard"]) == [f"half {n}" for n in range(6)]


def test_the_client_recalls_at_the_broker_that_it_dials(homes: Homes, known: Any) -> None:
    seen = known["python"]
    refused = {name: seen["recalls"][str(homes.port(name))] for name in NAMES}

    assert refused["a"] == ""
    assert refused["b"] != ""
    assert refused["c"] != ""


def test_lite_topics_need_clients_that_dial_their_broker(homes: Homes, known: Any) -> None:
    at_c, at_a = homes.addresses["c"], homes.addresses["a"]

    assert known["python"]["lite"] == {at_c: [at_c], at_a: ["NotFoundException"]}
