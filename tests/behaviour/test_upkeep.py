"""What the background work reports, and what is due."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make


def test_revive_finds_the_last_ended_lease_of_a_group_without_readers(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(max_attempts=1)
    endpoint.broker.send(name, messages(5))
    endpoint.broker.receive(readers, name, limit=3, invisible_duration_ms=1_000)
    endpoint.advance(1_000)

    report = endpoint.broker.revive()
    again = endpoint.broker.revive()

    assert report["dead_lettered"] == 3
    assert again["dead_lettered"] == 0
    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0", b"1", b"2"]
    assert endpoint.drain(name, readers) == [b"3", b"4"]


def test_revive_reports_the_leases_that_ended_and_the_next(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(5))
    start = endpoint.clock.now_ms()
    endpoint.broker.receive(readers, name, limit=2, invisible_duration_ms=1_000)
    endpoint.broker.receive(readers, name, limit=3, invisible_duration_ms=9_000)

    nothing = endpoint.broker.revive()
    endpoint.advance(1_000)
    report = endpoint.broker.revive()

    assert (nothing["revived"], nothing["next_visible_ms"]) == (0, start + 1_000)
    assert (report["revived"], report["next_visible_ms"]) == (2, start + 9_000)
    assert endpoint.broker.receive(readers, name)["delivery_attempt"].to_pylist() == [2, 2]


def test_due_says_what_the_schedule_holds(endpoint: Endpoint, topic: Make, messages: Make) -> None:
    name = topic(type="delay")
    now = endpoint.clock.now_ms()
    nothing = endpoint.broker.due()["jobs"]["deliver_scheduled"]
    endpoint.broker.send(name, messages(3, delay_level=[1, 1, 2]))
    waiting = endpoint.broker.due()["jobs"]["deliver_scheduled"]
    endpoint.advance(1_000)

    ready = endpoint.broker.due()

    assert (nothing["due"], nothing["next_due_ms"]) == (0, None)
    assert (waiting["due"], waiting["next_due_ms"]) == (0, now + 1_000)
    job = ready["jobs"]["deliver_scheduled"]
    assert (job["due"], job["next_due_ms"]) == (2, now + 1_000)
    assert ready["now_ms"] == now + 1_000


def test_due_says_which_leases_have_ended(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(3))
    endpoint.broker.receive(readers, name, limit=2, invisible_duration_ms=1_000)
    end = endpoint.clock.now_ms() + 1_000
    waiting = endpoint.broker.due()["jobs"]["revive"]
    endpoint.advance(1_000)

    ended = endpoint.broker.due()["jobs"]["revive"]

    assert (waiting["due"], waiting["next_due_ms"]) == (0, end)
    assert ended["due"] == 2


def test_due_says_what_a_group_has_to_do(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=2), group()
    endpoint.broker.subscribe(readers, name)
    idle = endpoint.broker.due()["groups"][readers]["topics"][name]
    endpoint.broker.send(name, messages(10))
    fresh = endpoint.broker.due()["groups"][readers]["topics"][name]
    endpoint.broker.receive(readers, name, limit=4, invisible_duration_ms=1_000)

    busy = endpoint.broker.due()["groups"][readers]["topics"][name]

    assert (idle["ready"], idle["unsettled"]) == (0, 0)
    assert (fresh["ready"], fresh["unsettled"]) == (10, 0)
    assert (busy["ready"], busy["unsettled"]) == (6, 4)
    assert busy["next_visible_ms"] == endpoint.clock.now_ms() + 1_000


def test_due_names_the_windows_that_are_open(endpoint: Endpoint, group: Make) -> None:
    readers = group()
    before = endpoint.broker.due()
    endpoint.broker.open_window("upkeep/revive", owner="run-1", duration_ms=1_000)
    endpoint.broker.open_window(f"consumer/{readers}", owner="run-2", duration_ms=1_000)

    after = endpoint.broker.due()

    assert before["jobs"]["revive"]["window"] is None
    assert before["groups"][readers]["window"] is None
    assert after["jobs"]["revive"]["window"]["owner"] == "run-1"
    assert after["groups"][readers]["window"]["owner"] == "run-2"
