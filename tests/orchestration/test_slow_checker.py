"""A checker that works when its window would be followed by the next: nobody takes over."""

from __future__ import annotations

import contextlib
import threading

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import FencedError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration import held_window
from rmq_pipeline.orchestration.due_work import HAND_OVER_AFTER_MS, Memory, wanted_upkeep
from rmq_pipeline.orchestration.held_window import held
from rmq_pipeline.orchestration.topic_assets import topic
from rmq_pipeline.orchestration.transaction_checker import (
    FIRST_ROWS,
    JOB,
    checking_job,
    transaction_checker,
)
from rmq_pipeline.orchestration.windows import (
    CHECK_LEASE_MS,
    IN_A_CALL_LEASE_MS,
    JOBS,
    Fence,
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
    monkeypatch.setattr(held_window, "RENEW_S", 0.001)
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


def test_a_window_that_was_taken_over_asks_nobody(client: Client) -> None:
    opened = client.open_window(WINDOW, owner="a", duration_ms=CHECK_LEASE_MS)
    client.open_window(WINDOW, owner="b", duration_ms=CHECK_LEASE_MS, takeover=True)

    with pytest.raises(FencedError), held(client, (WINDOW, opened["epoch"])):
        pytest.fail("this is not reached")


def test_nothing_holds_a_window_after_the_call(
    client: Client, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_window, "RENEW_S", 0.001)
    opened = client.open_window(WINDOW, owner="a", duration_ms=CHECK_LEASE_MS)

    def fails() -> None:
        with held(client, (WINDOW, opened["epoch"])):
            clock.advance(IN_A_CALL_LEASE_MS // 2)
            until(lambda: left_ms(client, clock) == IN_A_CALL_LEASE_MS, what="a renewal")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()

    assert not [each for each in threading.enumerate() if each.name == f"hold {WINDOW}"]
    clock.advance(IN_A_CALL_LEASE_MS)
    assert left_ms(client, clock) <= 0


def test_a_checker_begins_with_few_and_its_slice_ends_in_time(
    client: Client, clock: ManualClock
) -> None:
    bodies = [b"%d" % i for i in range(2 * FIRST_ROWS)]
    halves = pa.table({"body": bodies})
    client.send_half("orders", halves, producer_group="gone", immunity_ms=1)
    clock.advance(10)
    given = []

    def counts(checks: pa.Table) -> list[str]:
        given.append(checks.num_rows)
        return ["rollback"] * checks.num_rows

    job = checking_job([transaction_checker(topic=ORDERS)(counts)])
    opened = client.open_window(WINDOW, owner="a", duration_ms=CHECK_LEASE_MS)
    window = (WINDOW, opened["epoch"])

    first = job.call(client, wait_ms=0, window=window)
    second = job.call(client, wait_ms=0, window=window)

    assert given == [FIRST_ROWS, len(BODIES) + FIRST_ROWS]
    assert first["answers"]["orders"]["rollback"] == FIRST_ROWS
    assert second["answers"]["orders"]["rollback"] == len(BODIES) + FIRST_ROWS
