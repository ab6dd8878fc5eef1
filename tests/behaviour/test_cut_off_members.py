"""A member whose process is gone is missed soon: its waiting heartbeat was cut off."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from tests.waiting import LOOK_S, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from tests.behaviour.conftest import Endpoint, Make

# Of the table endpoint only: in process nobody can be cut off.

TIMEOUT_MS = 120_000


def members(endpoint: Endpoint, readers: str, client_id: str, name: str) -> set[str]:
    """Those that a member learns of by its heartbeat."""
    return set(endpoint.broker.heartbeat(readers, client_id, topics=[name], details={})["members"])


@pytest.fixture
def server(inside: Endpoint) -> Iterator[FlightServer]:
    with FlightServer(inside.inside) as served:
        yield served


def slice_by_slice(inside: Endpoint, condition: Callable[[], bool]) -> None:
    """Turn the clock to the end of one slice of waiting after the other, until it holds.

    The endpoint hears late that a call was cut off: ever slower, so that the call does not
    come to its own end before.
    """
    pauses = (LOOK_S * 2**n for n in range(14))
    pause = threading.Event()

    def look() -> bool:
        if not condition() and any(at > inside.clock.now_ms() for at in inside._moments()):
            inside.advance(1_000)
            pause.wait(next(pauses))
        return condition()

    until(look, within_s=60)


def cut_off(inside: Endpoint, server: FlightServer, *, readers: str, name: str) -> None:
    """Member a locks a queue, waits in a heartbeat, and is cut off."""
    client = Client(server.address, retry_s=0)
    version = client.heartbeat(readers, "a", topics=[name], details={})["version"]
    client.lock_queues(readers, name, queue_ids=[0], client_id="a", duration_ms=3_600_000)
    waiting = inside.begin(
        lambda: client.heartbeat(
            readers, "a", topics=[name], details={}, known_version=version, wait_ms=30_000
        )
    )

    client.close()

    with pytest.raises(errors.BrokerUnavailableError):
        waiting.result(60)
    member = inside.inside.engine.members._groups[readers].members["a"]
    slice_by_slice(inside, lambda: member.cut_off_ms is not None)


def test_who_is_cut_off_is_gone_two_seconds_later(
    inside: Endpoint, server: FlightServer, topic: Make, group: Make
) -> None:
    name, readers = topic(), group()
    cut_off(inside, server, readers=readers, name=name)
    inside.advance(1_999)
    assert members(inside, readers, "b", name) == {"a", "b"}

    inside.advance(1)

    assert members(inside, readers, "b", name) == {"b"}
    broker = inside.broker
    assert broker.lock_queues(readers, name, queue_ids=[0], client_id="b") == [0]


def test_who_is_cut_off_and_calls_again_stays(
    inside: Endpoint, server: FlightServer, topic: Make, group: Make
) -> None:
    name, readers = topic(), group()
    cut_off(inside, server, readers=readers, name=name)

    members(inside, readers, "a", name)

    inside.advance(TIMEOUT_MS - 1)
    assert members(inside, readers, "b", name) == {"a", "b"}
    assert inside.broker.lock_queues(readers, name, queue_ids=[0], client_id="b") == []


def test_others_that_wait_are_woken_when_who_is_cut_off_is_gone(
    inside: Endpoint, server: FlightServer, topic: Make, group: Make
) -> None:
    name, readers = topic(), group()
    cut_off(inside, server, readers=readers, name=name)
    known = inside.broker.heartbeat(readers, "b", topics=[name], details={})["version"]
    found = inside.begin(
        lambda: inside.broker.heartbeat(
            readers, "b", topics=[name], details={}, known_version=known, wait_ms=60_000
        )
    )
    assert not found.done()

    inside.advance(2_000)

    assert set(found.result(60)["members"]) == {"b"}


def test_who_calls_again_before_it_is_noticed_stays(
    inside: Endpoint, server: FlightServer, topic: Make, group: Make
) -> None:
    name, readers = topic(), group()
    gone = Client(server.address, retry_s=0)
    version = gone.heartbeat(readers, "a", topics=[name], details={})["version"]
    gone.lock_queues(readers, name, queue_ids=[0], client_id="a", duration_ms=3_600_000)

    def wait(client: Client) -> Future[dict[str, Any]]:
        return inside.begin(
            lambda: client.heartbeat(
                readers, "a", topics=[name], details={}, known_version=version, wait_ms=30_000
            )
        )

    lost = wait(gone)
    gone.close()
    with pytest.raises(errors.BrokerUnavailableError):
        lost.result(60)
    with Client(server.address, retry_s=0) as again:
        waiting = wait(again)
        member = inside.inside.engine.members._groups[readers].members["a"]
        assert member.waiting == 2

        slice_by_slice(inside, lambda: member.waiting == 1)

        for _ in range(3):
            inside.advance(1_000)
            until(lambda: member.waiting == 1)
        assert not waiting.done()
        assert members(inside, readers, "b", name) == {"a", "b"}
        assert inside.broker.lock_queues(readers, name, queue_ids=[0], client_id="b") == []
        assert set(waiting.result(60)["members"]) == {"a", "b"}
