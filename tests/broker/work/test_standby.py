"""A standby: it has what the leader has, answers reads only, and leads once the leader has gone."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.verbs.declaration import declarations
from rmq_pipeline.broker.work.engine import SCHEMAS
from rmq_pipeline.broker.work.home import FORMAT
from rmq_pipeline.broker.work.writer import EVENTS
from rmq_pipeline.errors import (
    ConflictError,
    LogFencedError,
    LogHeldError,
    LogStoreError,
    OperatorError,
    RequestError,
    StandbyError,
)
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.process import ANY_PORT
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.limits import MIB
from rmq_pipeline.settings import Settings
from rmq_pipeline.store.log.catching_up import DivergedLogError
from rmq_pipeline.store.log.replication import Replication
from rmq_pipeline.store.log.shared_log import LeadingLog
from tests.broken_wire import BrokenWire
from tests.log_stores import LogStores
from tests.waiting import until

Open = Callable[..., Broker]
#: Longer than any pause of a test, and that of a leader that dies.
LEASE_MS, SHORT_MS = 60_000, 400


@pytest.fixture
def address(log_stores: LogStores) -> str:
    return log_stores.new()


@pytest.fixture
def open_broker(tmp_path: Path, address: str) -> Iterator[Open]:
    opened: list[Broker] = []

    def open_it(
        home: str = "first", store: str | None = address, *, standby: bool = True, **changed: Any
    ) -> Broker:
        settings = Settings(
            log_file_bytes=MIB,
            reserve_bytes=MIB,
            log_store=store,
            **{"log_lease_ms": LEASE_MS, "log_timeout_ms": 1000, **changed},
        )
        opened.append(
            Broker.open(tmp_path / home, upkeep="none", settings=settings, standby=standby)
        )
        return opened[-1]

    yield open_it
    for broker in opened:
        broker.close()


@pytest.fixture
def leader(open_broker: Open) -> Broker:
    """The first broker that starts leads, also with --standby."""
    return prepared(open_broker())


@pytest.fixture
def mortal(open_broker: Open) -> Broker:
    """A leader whose lease is over soon after it died."""
    return prepared(open_broker(log_lease_ms=SHORT_MS))


def prepared(broker: Broker) -> Broker:
    assert not broker.is_standby
    broker.ensure_topic("orders", type="fifo", queues=1)
    broker.ensure_group("billing", order="message_group")
    broker.subscribe("billing", "orders")
    return broker


def send(broker: Broker, *bodies: str) -> None:
    broker.send(
        "orders",
        pa.table(
            {"body": [body.encode() for body in bodies], "message_group": ["a"] * len(bodies)}
        ),
    )


def bodies(broker: Broker) -> list[str]:
    found = broker.read("orders", queue_id=0, offset=0, limit=1000)
    return [body.decode() for body in found["body"].to_pylist()]


def end_of(broker: Broker) -> int:
    return int(broker.engine.log.end)


def caught_up(standby: Broker, leader: Broker) -> Callable[[], bool]:
    return lambda: end_of(standby) == end_of(leader)


def die(broker: Broker) -> None:
    """Let a leader neither renew its lease nor end it, as after kill -9."""
    replication = broker.engine.replication
    assert replication is not None
    replication._renew = lambda **_: None  # type: ignore[method-assign]


def test_a_standby_has_what_the_leader_has(leader: Broker, open_broker: Open) -> None:
    send(leader, "before")
    standby = open_broker("second")
    assert standby.is_standby
    for number in range(40):
        send(leader, f"{number:03}", "x" * 40_000)  # more than a log file
    leader.ensure_topic("later", queues=3)
    received = leader.receive("billing", "orders", limit=3)
    leader.ack(received["receipt_handle"].to_pylist()[:2])
    until(caught_up(standby, leader))

    assert bodies(standby) == bodies(leader)
    asked = "SELECT topic, queue_id, queue_offset, message_id FROM messages ORDER BY ALL"
    assert standby.sql(asked) == leader.sql(asked)
    in_flight = "SELECT queue_offset, delivery_attempt FROM in_flight"
    assert standby.sql(in_flight) == leader.sql(in_flight)
    assert standby.sql(in_flight).num_rows == 1


def test_a_standby_answers_all_that_it_says_as_the_leader(
    leader: Broker, open_broker: Open
) -> None:
    leader.send("orders", pa.table({"body": [b"a"], "message_group": ["a"], "keys": [["k"]]}))
    standby = open_broker("second")
    until(caught_up(standby, leader))
    at = {"topic": "orders", "queue_id": 0}
    of_group = {"group": "billing", "topic": "orders"}
    first, last = {"queue_id": [0], "queue_offset": [0], "stored_at_ms": [0]}, "last_queue_"
    places = pa.table({"message_group": ["a"], **first, f"{last}id": [0], f"{last}offset": [0]})
    asked: dict[str, dict[str, Any]] = {
        "list_topics": {},
        "describe_topic": {"name": "orders"},
        "list_groups": {},
        "describe_group": {"name": "billing"},
        "lag": {"group": "billing"},
        "offset_at": {**at, "at_ms": 0},
        "read": {**at, "offset": 0, "limit": 10},
        "find": {"topic": "orders", "key": "k"},
        "keyed_state": of_group,
        "keyed_state_history": {**of_group, "places": places},
        "sink_files": {"group": "billing"},
        "list_users": {},
        "list_policies": {},
        "sql": {"query": "SELECT * FROM lag"},
    }
    assert leader.call("find", asked["find"]).num_rows == 1
    assert leader.call("read", asked["read"]).num_rows == 1

    for verb, args in asked.items():
        assert standby.call(verb, args) == leader.call(verb, args), verb

    served = {name for name, each in declarations(Broker).items() if each.on_standby}
    of_the_home = {"ping", "status", "metrics", "archive"}
    assert served == asked.keys() | of_the_home | {"explain_access"}
    for verb in of_the_home:
        assert standby.call(verb, {})


def test_a_standby_changes_nothing(leader: Broker, open_broker: Open) -> None:
    send(leader, "a")
    standby = open_broker("second")
    until(caught_up(standby, leader))

    for verb, args in (
        ("send", {"topic": "orders", "messages": pa.table({"body": [b"b"]})}),
        ("receive", {"group": "billing", "topic": "orders"}),
        ("create_topic", {"name": "other"}),
        ("open_window", {"name": "consumer/billing", "owner": "me", "duration_ms": 1000}),
        ("seal", {}),
    ):
        with pytest.raises(StandbyError, match=r"process .* leads"):
            standby.call(verb, args)
    # The log refuses what gets past the verbs.
    with pytest.raises(StandbyError):
        send(standby, "b")
    with pytest.raises(StandbyError):
        standby.receive("billing", "orders", limit=1)

    send(leader, "c")
    until(caught_up(standby, leader))
    assert bodies(standby) == ["a", "c"]


def test_the_status_of_a_standby_names_the_leader(
    leader: Broker, open_broker: Open, address: str
) -> None:
    standby = open_broker("second")

    shown = standby.status()["log_store"]

    assert (shown["role"], shown["store"]) == ("standby", address)
    assert "process" in shown["leader"]
    assert shown["failing"] is None
    assert leader.status()["log_store"]["role"] == "leader"


def test_a_standby_leads_once_the_leader_is_gone(mortal: Broker, open_broker: Open) -> None:
    send(mortal, "a", "b")
    received = mortal.receive("billing", "orders", limit=1)
    mortal.ack(received["receipt_handle"].to_pylist())
    standby = open_broker("second")
    leads = threading.Event()
    standby.when_leading(leads.set)
    die(mortal)

    until(leads.is_set)

    assert not standby.is_standby
    again = standby.receive("billing", "orders", limit=5)
    assert again["body"].to_pylist() == [b"b"]
    standby.ack(again["receipt_handle"].to_pylist())
    send(standby, "c")
    assert bodies(standby) == ["a", "b", "c"]
    assert standby.status()["log_store"]["role"] == "leader"
    told = threading.Event()
    standby.when_leading(told.set)
    assert told.is_set()
    with pytest.raises(LogFencedError):
        send(mortal, "of the old leader")


def test_a_standby_that_begins_to_lead_logs_no_error(
    leader: Broker, open_broker: Open, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_broker("second").engine
    rebuild = engine.writer._rebuild

    def while_its_house_is_kept() -> Any:
        for _ in range(2):
            engine.repair.wakes.set()
            until(lambda: not engine.repair.wakes.is_set())
        return rebuild()

    engine.writer._rebuild = while_its_house_is_kept
    leader.close()
    until(lambda: engine.leads is not None and engine.writer.failure is None)

    assert "begins to lead" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_receipt_of_the_old_leader_holds_at_the_new_one(
    mortal: Broker, open_broker: Open
) -> None:
    send(mortal, "a")
    receipt = mortal.receive("billing", "orders", limit=1)["receipt_handle"].to_pylist()
    standby = open_broker("second")
    die(mortal)
    until(lambda: not standby.is_standby)

    standby.ack(receipt)

    (row,) = standby.lag("billing").to_pylist()
    assert row["committed_offset"] == 1


def test_a_leader_that_stops_hands_over_at_once(leader: Broker, open_broker: Open) -> None:
    standby = open_broker("second")
    send(leader, "a")

    leader.close()

    until(lambda: not standby.is_standby, within_s=LEASE_MS / 1000 / 2)
    assert bodies(standby) == ["a"]


def test_of_two_standbys_one_leads_and_the_other_follows_it(
    leader: Broker, open_broker: Open
) -> None:
    standbys = [open_broker("second"), open_broker("third")]
    leader.close()
    until(lambda: any(not each.is_standby for each in standbys))

    standbys.sort(key=lambda each: each.is_standby)
    new, other = standbys
    assert other.is_standby
    send(new, "a")
    until(caught_up(other, new))
    assert bodies(other) == ["a"]


def test_an_old_leader_comes_back_as_standby(leader: Broker, open_broker: Open) -> None:
    send(leader, "a")
    standby = open_broker("second")
    leader.close()
    until(lambda: not standby.is_standby)
    send(standby, "b")

    again = open_broker("first")

    assert again.is_standby
    until(caught_up(again, standby))
    assert bodies(again) == ["a", "b"]


def test_a_standby_opens_again_after_its_own_end(leader: Broker, open_broker: Open) -> None:
    send(leader, "a")
    standby = open_broker("second")
    until(caught_up(standby, leader))
    standby.close()
    send(leader, "b")

    again = open_broker("second")

    until(caught_up(again, leader))
    assert bodies(again) == ["a", "b"]


# --------------------------------------------------------------------------------------- promotion


def test_a_manual_standby_waits_for_its_promotion(leader: Broker, open_broker: Open) -> None:
    standby = open_broker("second", failover="manual")
    send(leader, "a")
    until(caught_up(standby, leader))
    with pytest.raises(LogHeldError, match="process"):
        standby.promote()
    leader.close()
    followed = standby.engine.followed
    assert followed is not None
    until(lambda: not followed.look())
    assert standby.is_standby

    assert standby.promote() == {"role": "leader", "epoch": 2}

    send(standby, "b")
    assert bodies(standby) == ["a", "b"]
    with pytest.raises(ConflictError, match="no standby"):
        standby.promote()


def test_a_forced_promotion_ends_the_leader(open_broker: Open) -> None:
    # The leader renews its lease, and learns of its end, after a quarter of the lease.
    leader = prepared(open_broker(log_lease_ms=LEASE_MS // 4))
    told = threading.Event()
    leader.engine.on_fenced = lambda _: told.set()
    standby = open_broker("second")
    send(leader, "a")

    standby.promote(force=True)

    until(told.is_set)
    with pytest.raises(LogFencedError):
        send(leader, "of the old leader")
    send(standby, "b")
    assert bodies(standby) == ["a", "b"]


def test_a_leader_cannot_be_promoted(leader: Broker) -> None:
    with pytest.raises(ConflictError, match="no standby"):
        leader.promote()


# ------------------------------------------------------------------------------------------ faults


def test_a_standby_needs_a_store(open_broker: Open) -> None:
    with pytest.raises(RequestError, match="--log"):
        open_broker("alone", store=None)


def test_a_standby_goes_on_after_its_store_was_away(
    leader: Broker, open_broker: Open, log_stores: LogStores, address: str
) -> None:
    with BrokenWire(log_stores.server) as wire:
        through = address.replace(log_stores.server, wire.address)
        standby = open_broker("second", through, failover="manual")
        wire.cut()
        send(leader, "a")
        until(lambda: standby.status()["log_store"]["failing"] is not None)
        assert standby.is_standby
        wire.mend()

        until(caught_up(standby, leader))
    assert bodies(standby) == ["a"]


def test_access_rules_reach_the_standby(leader: Broker, open_broker: Open) -> None:
    standby = open_broker("second")
    leader.create_user("ann", password="secret-of-ann", type="super")

    until(lambda: standby.access.enabled)

    assert standby.call("list_users", {}) == leader.call("list_users", {})


def test_a_home_whose_last_answers_the_store_lacks_is_no_standby(
    open_broker: Open, log_stores: LogStores, address: str
) -> None:
    """It led with async while the store was away."""
    with BrokenWire(log_stores.server) as wire:
        through = address.replace(log_stores.server, wire.address)
        first = open_broker("first", through, replication="async", log_lease_ms=5_000)
        first.ensure_topic("orders", type="fifo", queues=1)
        until(lambda: first.status()["log_store"]["behind_bytes"] == 0)
        wire.cut()
        send(first, "only here")
        first.close()
    second = open_broker("second", standby=False)
    send(second, "b")

    with pytest.raises(DivergedLogError, match="differ from position"):
        open_broker("first")

    assert bodies(second) == ["b"]


def test_a_standby_that_cannot_read_the_log_leaves_it_to_others(
    leader: Broker, open_broker: Open, log_stores: LogStores, address: str, tmp_path: Path
) -> None:
    """A newer version has led, whose columns this one does not know."""
    standby = open_broker("second")
    send(leader, "a")
    until(caught_up(standby, leader))
    store = log_stores.store(address, timeout_s=2.0, lease_s=60.0, home_format=FORMAT)
    store.look()
    store.claim(seconds=0.0, force=True)
    replication = Replication(store, mode="sync", lease_s=60.0, timeout_s=2.0, behind_bytes=MIB)
    replication.start()
    newer = {**SCHEMAS, EVENTS: SCHEMAS[EVENTS].append(pa.field("of_tomorrow", pa.string()))}
    commit_log = LeadingLog.open(
        tmp_path / "newer",
        schemas=newer,
        file_bytes=MIB,
        reserve_bytes=0,
        replication=replication,
        answered_alone=False,
    )
    fields = newer[EVENTS]
    row = {field.name: [None if field.nullable else 0] for field in fields}
    commit_log.stage(EVENTS, pa.record_batch(row, schema=fields))
    commit_log.commit()
    assert standby.is_standby
    until(lambda: "columns" in (standby.status()["log_store"]["failing"] or ""))
    commit_log.close()
    replication.close()

    followed = standby.engine.followed
    assert followed is not None
    until(lambda: not followed.look())
    with pytest.raises(OperatorError, match="does not follow the log"):
        standby.promote()
    assert standby.is_standby
    assert not followed.look()


def test_a_refused_store_is_told(open_broker: Open) -> None:
    with pytest.raises(LogStoreError):
        open_broker("second", "postgresql://127.0.0.1:1/none")


# ----------------------------------------------------------------------------------------- clients


def test_clients_leave_a_leader_that_has_lost_its_database(
    open_broker: Open, log_stores: LogStores, address: str
) -> None:
    with BrokenWire(log_stores.server) as wire:
        through = address.replace(log_stores.server, wire.address)
        old = prepared(open_broker("first", through, log_lease_ms=SHORT_MS))
        standby = open_broker("second")
        with FlightServer(old, ANY_PORT) as one, FlightServer(standby, ANY_PORT) as two:
            with Client(f"{one.address},{two.address}") as client:
                client.send("orders", pa.table({"body": [b"a"], "message_group": ["a"]}))
                wire.cut()
                until(lambda: not standby.is_standby)
                standby.create_topic("later")

                assert "later" in client.list_topics()["name"].to_pylist()
                client.send("orders", pa.table({"body": [b"b"], "message_group": ["a"]}))
            with Client(f"{one.address},{two.address}") as another:
                assert "later" in another.list_topics()["name"].to_pylist()
            with Client(one.address) as client, pytest.raises(LogStoreError):
                client.list_topics()
        assert bodies(standby) == ["a", "b"]


def test_a_client_with_one_address_gets_the_answers_of_a_standby(
    leader: Broker, open_broker: Open
) -> None:
    send(leader, "a")
    standby = open_broker("second")
    until(caught_up(standby, leader))

    with FlightServer(standby, ANY_PORT) as server, Client(server.address) as client:
        assert client.read("orders", 0, offset=0, limit=10)["body"].to_pylist() == [b"a"]
        with pytest.raises(StandbyError, match=r"process .* leads"):
            client.send("orders", pa.table({"body": [b"b"], "message_group": ["a"]}))


def test_rules_without_users_do_not_open_a_standby_beyond_loopback(
    leader: Broker, open_broker: Open
) -> None:
    leader.create_user("ann", password="secret-of-ann", type="super")
    standby = open_broker("second")
    assert standby.access.enabled
    standby.access.is_required = True  # as an endpoint beyond loopback sets it

    leader.delete_user("ann")
    until(lambda: "ann" not in (standby.engine.home.path / "access.json").read_text())
    standby.access.reload()

    assert standby.access.enabled
