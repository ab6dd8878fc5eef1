"""The route table: what it says, what it refuses, and that a wrong new file changes nothing."""

import logging
from pathlib import Path
from typing import Any

import pytest

from rmq_pipeline import limits
from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight import flags
from rmq_pipeline.route_table import RouteFile, RouteTable
from rmq_pipeline.settings import Settings
from rmq_pipeline.topic import Topic

BROKERS = """\
[brokers]
a = {grpc = "10.0.0.1:8081", flight = "10.0.0.1:8082"}
b = {grpc = "10.0.0.2:8081,10.0.0.3:8081"}
"""
TABLE = f"""\
{BROKERS}
[topics.orders]
type = "fifo"
queues = {{b = 1, a = 2}}
"""


def parse(text: str) -> RouteTable:
    return RouteTable.parse(text, broker_name="a")


def written(folder: Path, text: str = TABLE) -> Path:
    """Replace the file as an operator does: by one rename."""
    fresh = folder / "fresh"
    fresh.write_text(text, "utf-8")
    return fresh.rename(folder / "routes.toml")


def opened(folder: Path) -> RouteFile:
    return RouteFile(written(folder), broker_name="a")


def test_neighbours_of_a_route_are_at_different_brokers() -> None:
    topic = parse(TABLE).topics["orders"]

    assert topic.type == "fifo"
    assert topic.places() == [("a", 0), ("b", 0), ("a", 1)]


def test_a_broker_may_have_standbys() -> None:
    assert parse(TABLE).brokers["b"].grpc == ("10.0.0.2:8081", "10.0.0.3:8081")


@pytest.mark.parametrize(
    ("text", "said", "remedy"),
    [
        ("[brokers", "not valid TOML", "Correct the place"),
        ("a = " + "[" * 5000, "not valid TOML", "Correct the place"),
        (BROKERS + 'a = {grpc = "10.0.0.9:1"}', "Cannot overwrite a value", "once"),
        ("[broker]", "The table has the unknown key broker", "brokers, topics"),
        ("brokers = 1", "has brokers = 1, which is no table", "docs/routes.md"),
        ("", "It has 0 brokers", "below [brokers]"),
        ('[brokers]\nb = {grpc = "h:1"}', "name is a; the brokers are b", "Set broker_name"),
        ('[brokers]\n"a b" = {grpc = "h:1"}', "Broker name 'a b'", "characters"),
        ('[brokers]\na = "h:1"', "Broker a is 'h:1'", 'grpc = "HOST:PORT"'),
        ('[brokers]\na = {flight = "h:1"}', "Broker a has no grpc", "Add grpc"),
        ('[brokers]\na = {grpc = "h:1", http = "h:2"}', "unknown key http", "grpc_tls"),
        ("[brokers]\na = {grpc = 8081}", "grpc of broker a is 8081, not text", "HOST:PORT"),
        ('[brokers]\na = {grpc = "h"}', "grpc of broker a is 'h', not HOST:PORT", "HOST:PORT"),
        ('[brokers]\na = {grpc = "h:0"}', "is 'h:0', not HOST:PORT", "HOST:PORT"),
        ('[brokers]\na = {grpc = "http://h:80"}', "not HOST:PORT", "HOST:PORT"),
        ('[brokers]\na = {grpc = "h:1,i:2"}', "several addresses", "IPv4 or IPv6"),
        ('[brokers]\na = {grpc = "1.2.3.4:1,[::1]:2"}', "several addresses", "IPv4 or IPv6"),
        (
            '[brokers]\na = {grpc = "h:1"}\nb = {grpc = "h:1"}',
            "Brokers a and b have the same address h:1",
            "its own",
        ),
        (
            '[brokers]\na = {grpc = "h:1", grpc_tls = "h:2"}\nb = {grpc = "h:3"}',
            "Broker b has no grpc_tls",
            "all brokers grpc_tls, or none",
        ),
        (f"{BROKERS}[topics.t]\ntype = 'normal'", "Topic t is at no broker", "queues = {a = 4"),
        (
            f"{BROKERS}[topics.t]\ntype = 'normal'\nqueues = {{c = 1}}",
            "Topic t is at broker c, which the table does not have",
            "Use one of a, b",
        ),
        (f"{BROKERS}[topics.t]\nqueues = {{a = 1}}", "Topic t has type None", "normal, fifo"),
        (
            f"{BROKERS}[topics.t]\ntype = 'normal'\nqueues = {{a = true}}",
            "has True queues at broker a",
            "from 1 to 1024",
        ),
        (
            f"{BROKERS}[topics.t]\ntype = 'normal'\nqueues = {{a = 0}}",
            "has 0 queues",
            "from 1 to 1024",
        ),
        (
            f"{BROKERS}[topics.t]\ntype = 'lite'\nqueues = {{a = 1, b = 1}}",
            "Topic t has type lite and 2 brokers",
            "one broker",
        ),
        (f"{BROKERS}[topics]\nt = 4", "Topic t is 4", "[topics.t]"),
        (f"{BROKERS}[topics.'a b']\ntype = 'normal'", "Topic name 'a b'", "characters"),
        (f"{BROKERS}[topics.SCHEDULE_TOPIC_XXXX]", "reserved for the system", "another name"),
    ],
)
def test_a_fault_is_named_with_its_remedy(text: str, said: str, remedy: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(text)

    assert said in caught.value.message
    assert remedy in caught.value.remedy


def test_a_route_has_a_limit() -> None:
    brokers = "".join(f'b{n} = {{grpc = "h:{n}"}}\n' for n in range(1, 4))
    queues = ", ".join(f"b{n} = {limits.QUEUES}" for n in range(1, 4))
    text = f"[brokers]\n{brokers}[topics.t]\ntype = 'normal'\nqueues = {{{queues}}}"

    with pytest.raises(RequestError, match="3072 queues; a route has 2048 at most"):
        RouteTable.parse(text, broker_name="b1")


def test_a_missing_file_and_one_that_is_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "routes.toml"
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        RouteFile(path, broker_name="a")

    path.write_bytes(b"\xff")
    with pytest.raises(RequestError, match="is not UTF-8"):
        RouteFile(path, broker_name="a")

    path.write_bytes(b"#" * (limits.ROUTE_FILE_BYTES + 1))
    with pytest.raises(RequestError, match="has more than 1048576 bytes"):
        RouteFile(path, broker_name="a")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    routes = opened(tmp_path)

    written(tmp_path, TABLE.replace("a = 2", "a = 3"))
    routes.refresh()

    assert routes.table.topics["orders"].queues == {"a": 3, "b": 1}


def test_a_wrong_new_file_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    routes = opened(tmp_path)
    before = routes.table

    written(tmp_path, TABLE.replace("b = 1", "c = 1"))
    with caplog.at_level(logging.WARNING):
        routes.refresh()
        routes.refresh()

    assert routes.table is before
    assert caplog.text.count("is at broker c") == 1
    assert "Use one of a, b" in routes.report(lambda _: None)["fault"]


def test_a_deleted_file_changes_nothing_and_its_successor_is_read(tmp_path: Path) -> None:
    routes = opened(tmp_path)

    routes.path.unlink()
    routes.refresh()
    assert "cannot be read" in str(routes.fault)
    assert routes.table.topics

    written(tmp_path, BROKERS)
    routes.refresh()
    assert routes.fault is None
    assert not routes.table.topics


def test_the_report_names_what_differs_at_this_broker(tmp_path: Path) -> None:
    routes = opened(tmp_path)

    def report(**own: Any) -> list[str]:
        kept: dict[str, Any] = {
            "name": "orders",
            "topic_id": 4,
            "partition_time": "born",
            "created_at_ms": 0,
        }
        found: list[str] = routes.report(lambda _: Topic(**kept, **own) if own else None)[
            "differences"
        ]
        return found

    assert report() == ["Topic orders is not created at this broker."]
    assert report(type="fifo", queues=2) == []
    assert report(type="fifo", queues=3) == [
        "Topic orders has 3 queues here, 2 in the route table."
    ]
    assert report(type="normal", queues=2) == [
        "Topic orders has type normal here, fifo in the route table."
    ]


def test_settings_take_an_absolute_path_and_a_name() -> None:
    assert RouteFile.of(Settings()) is None
    with pytest.raises(RequestError, match="is the relative path"):
        flags.checked({"route_table": "routes.toml"})
    with pytest.raises(RequestError, match="Setting broker_name is 'a b'"):
        flags.checked({"broker_name": "a b"})
