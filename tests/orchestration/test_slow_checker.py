"""No run takes over from a checker that still works when the next window is due."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import limits
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import FencedError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration import windows
from rmq_pipeline.orchestration.declarations import topic
from rmq_pipeline.orchestration.due_work import HAND_OVER_AFTER_MS, Memory, wanted_upkeep
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.transaction_checker import (
    FIRST_ROWS,
    JOB,
    checking_job,
    transaction_checker,
)
from rmq_pipeline.orchestration.windows import (
    CHECK_LEASE_MS,
    IN_A_CALL_LEASE_MS,
    IN_A_CALL_RENEW_MS,
    JOBS,
    OVERTIME_S,
    Fence,
    WindowResult,
    renewed,
    run_upkeep_window,
)
from tests.waiting import until

ORDERS = topic("orders", type="transaction", queues=1)
WINDOW = JOBS[JOB].window
BODIES = [b"1", b"2", b"3"]
STEP_MS = 5_000


@pytest.fixture(autouse=True)
def _halves(client: Client, clock: ManualClock) -> None:
    """Three half messages that are due for a check, of a producer that is gone."""
    ORDERS.ensure(client)
    halves = pa.table({"body": BODIES})
    client.send_half("orders", halves, producer_group="gone", immunity_ms=1)
    clock.advance(10)


class Dagster:
    """Stands for the sensor, and for the start of the runs that it requests."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._cursor: str | None = None
        #: Windows that were opened and have not worked yet.
        self.windows: list[Fence] = []
        self.opened = 0

    def tick(self) -> None:
        """Open the window that the sensor wants."""
        memory = Memory.load(self._cursor)
        wanted = wanted_upkeep(self._client.due(), {JOB: JOBS[JOB]}, memory=memory)
        self._cursor = memory.dump()
        for each in wanted:
            opened = self._client.open_window(
                WINDOW,
                owner=each.run_key,
                duration_ms=CHECK_LEASE_MS,
                takeover=bool(each.hand_over_from),
            )
            self.windows.append((WINDOW, opened["epoch"]))
            self.opened += 1


def delivered(broker: Broker) -> list[bytes]:
    found: list[bytes] = broker.read("orders", 0, offset=0, limit=100)["body"].to_pylist()
    return found


def left_ms(client: Client, clock: ManualClock) -> int:
    """For how long the window is leased yet."""
    window = client.due()["jobs"][JOB]["window"]
    return int(window["expires_at_ms"]) - clock.now_ms() if window else 0


@pytest.mark.parametrize("call_ms", [HAND_OVER_AFTER_MS + 10_000, 3 * CHECK_LEASE_MS])
def test_what_a_slow_checker_commits_is_delivered(
    client: Client,
    broker: Broker,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    call_ms: int,
) -> None:
    monkeypatch.setattr(windows, "RENEW_S", 0.001)
    dagster = Dagster(client)

    def slow(checks: pa.Table) -> list[str]:
        for _ in range(call_ms // STEP_MS):
            clock.advance(STEP_MS)
            until(lambda: left_ms(client, clock) == IN_A_CALL_LEASE_MS, what="a renewal")
            dagster.tick()
        return ["commit"] * checks.num_rows

    job = checking_job([transaction_checker(topic=ORDERS)(slow)])
    dagster.tick()
    while dagster.windows:
        with contextlib.suppress(FencedError):
            job.call(client, wait_ms=0, window=dagster.windows.pop(0))

    assert delivered(broker) == BODIES
    assert dagster.opened == 1


def test_a_window_that_was_taken_over_runs_no_check(client: Client) -> None:
    opened = client.open_window(WINDOW, owner="a", duration_ms=CHECK_LEASE_MS)
    client.open_window(WINDOW, owner="b", duration_ms=CHECK_LEASE_MS, takeover=True)

    with pytest.raises(FencedError), renewed(client, (WINDOW, opened["epoch"])):
        pytest.fail("this is not reached")


def test_nothing_holds_a_window_after_the_call(
    client: Client, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "RENEW_S", 0.001)
    opened = client.open_window(WINDOW, owner="a", duration_ms=CHECK_LEASE_MS)

    def fails() -> None:
        with renewed(client, (WINDOW, opened["epoch"])):
            clock.advance(IN_A_CALL_LEASE_MS // 2)
            until(lambda: left_ms(client, clock) == IN_A_CALL_LEASE_MS, what="a renewal")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()

    assert not [each for each in threading.enumerate() if each.name == f"hold {WINDOW}"]
    clock.advance(IN_A_CALL_LEASE_MS)
    assert left_ms(client, clock) <= 0


def test_a_failure_of_whatever_kind_does_not_end_the_holding(
    resource: BrokerResource, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "RENEW_S", 0.001)

    class Stumbling(Client):
        renewals = 0

        def renew_window(self, name: str, **lease: Any) -> Any:
            self.renewals += 1
            if self.renewals == 2:
                raise OSError("no more sockets")
            return super().renew_window(name, **lease)

    with Stumbling(resource.address) as client, renewed(client, opened_window(client)):
        until(lambda: client.renewals > 2, what="another try")
        clock.advance(IN_A_CALL_LEASE_MS // 2)

        until(lambda: left_ms(client, clock) == IN_A_CALL_LEASE_MS, what="a renewal")


def begin(client: Client, clock: ManualClock, n: int) -> None:
    """So many half messages more."""
    halves = pa.table({"body": [b"%d" % i for i in range(n)]})
    client.send_half("orders", halves, producer_group="gone", immunity_ms=1)
    clock.advance(10)


def opened_window(client: Client) -> Fence:
    opened = client.open_window(WINDOW, owner="a", duration_ms=CHECK_LEASE_MS)
    return WINDOW, opened["epoch"]


def test_a_checker_begins_with_few_and_its_slice_ends_in_time(
    client: Client, clock: ManualClock
) -> None:
    begin(client, clock, 2 * FIRST_ROWS)
    given = []

    def counts(checks: pa.Table) -> list[str]:
        given.append(checks.num_rows)
        return ["rollback"] * checks.num_rows

    job = checking_job([transaction_checker(topic=ORDERS)(counts)])
    window = opened_window(client)

    first = job.call(client, wait_ms=0, window=window)
    second = job.call(client, wait_ms=0, window=window)

    assert given == [FIRST_ROWS, len(BODIES) + FIRST_ROWS]
    assert first["answers"]["orders"]["rollback"] == FIRST_ROWS
    assert second["answers"]["orders"]["rollback"] == len(BODIES) + FIRST_ROWS


def test_the_broker_does_not_step_in_while_a_checker_begins() -> None:
    row_ms = 5_000
    overdue_ms = limits.TRANSACTION_CHECK_INTERVAL_MS + limits.FALLBACK_OVERDUE_MS

    assert FIRST_ROWS * row_ms < overdue_ms


def test_a_checker_that_raises_at_once_is_not_asked_about_more(
    client: Client, clock: ManualClock
) -> None:
    begin(client, clock, 100 * FIRST_ROWS)
    given = []

    def fails(checks: pa.Table) -> list[str]:
        given.append(checks.num_rows)
        raise ConnectionError

    job = checking_job([transaction_checker(topic=ORDERS)(fails)])
    window = opened_window(client)

    for _ in range(4):
        job.call(client, wait_ms=0, window=window)

    assert given == [FIRST_ROWS] * 4


# --------------------------------------------------------------------------------- taking over late


class Watched(Client):
    """A client that counts how often it has asked what is due."""

    looks = 0

    def due(self) -> dict[str, Any]:
        found = super().due()
        self.looks += 1
        return found


class Successor:
    """A run that was requested to take over; it runs no check."""

    def __init__(self, client: Watched, pool: ThreadPoolExecutor) -> None:
        self._client = client
        self._pool = pool

    def start(self, epoch: int) -> Future[WindowResult]:
        """Begin, in a thread, and come to wait for the window of this epoch, or to take it."""
        run = self._pool.submit(
            run_upkeep_window,
            self._client,
            replace(JOBS[JOB], call=lambda *_, **__: {}),
            owner="b",
            seconds=0.0,
            overtime=0.0,
            hand_over_from=epoch,
        )
        self._run = run
        self.look()
        return run

    def look(self) -> None:
        """Wait until it has looked at the window, as it is now."""
        looks = self._client.looks
        until(lambda: self._run.done() or self._client.looks > looks + 1, what="a look")


@pytest.fixture
def successor(resource: BrokerResource) -> Iterator[Successor]:
    with ThreadPoolExecutor(1) as pool, Watched(resource.address) as client:
        yield Successor(client, pool)


def owner(client: Client) -> str | None:
    window = client.due()["jobs"][JOB]["window"]
    return str(window["owner"]) if window else None


def test_a_run_that_takes_over_waits_for_the_end_of_a_call(
    client: Client, successor: Successor
) -> None:
    window = opened_window(client)

    with renewed(client, window):
        run = successor.start(window[1])
        assert not run.done()
        assert owner(client) == "a"
    # As a window does after each slice.
    client.renew_window(WINDOW, epoch=window[1], duration_ms=CHECK_LEASE_MS)

    assert run.result(30).epoch == window[1] + 1


def test_a_run_yields_to_a_call_that_takes_long(
    client: Client, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, successor: Successor
) -> None:
    monkeypatch.setattr(windows, "RENEW_S", 0.001)
    window = opened_window(client)

    with renewed(client, window):
        run = successor.start(window[1])
        for _ in range(int(1000 * OVERTIME_S) // IN_A_CALL_RENEW_MS):
            assert not run.done()
            clock.advance(IN_A_CALL_RENEW_MS)
            until(lambda: left_ms(client, clock) == IN_A_CALL_LEASE_MS, what="a renewal")
            successor.look()

        assert run.result(30).yielded_to == "a"
        assert owner(client) == "a"


def test_a_run_takes_over_from_a_call_whose_process_is_gone(
    client: Client, clock: ManualClock, successor: Successor
) -> None:
    window = opened_window(client)
    client.renew_window(WINDOW, epoch=window[1], duration_ms=IN_A_CALL_LEASE_MS)

    run = successor.start(window[1])
    assert not run.done()
    clock.advance(2 * IN_A_CALL_RENEW_MS)

    assert run.result(30).epoch == window[1] + 1
    assert left_ms(client, clock) == 0


def test_a_run_opens_its_window_when_the_one_in_a_call_is_gone(
    client: Client, successor: Successor
) -> None:
    window = opened_window(client)

    with renewed(client, window):
        run = successor.start(window[1])
        client.close_window(WINDOW, epoch=window[1])

        assert run.result(30).epoch == window[1] + 1


def test_a_run_that_waits_yields_to_a_window_newer_than_the_one_in_a_call(
    client: Client, successor: Successor
) -> None:
    window = opened_window(client)

    with renewed(client, window):
        run = successor.start(window[1])
        client.open_window(WINDOW, owner="c", duration_ms=CHECK_LEASE_MS, takeover=True)

        assert run.result(30).yielded_to == "c"
