"""A window that is fenced while its handler works waits for no more of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import Deadline
from rmq_pipeline.handling.executor import Work
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.handling.results import BatchResult, WorkerDiedError
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.handling.window import Bounds, Window
from rmq_pipeline.handling.window_lease import WindowLease
from rmq_pipeline.settings import Settings

TOPIC, GROUP = "steps", "walkers"
#: A window that no process closes has ended by then.
LONG_S: Final = 10.0


class WorkingEngine:
    """Works until it is to stop; the window loses its lease while it waits for that."""

    first_rows, least_rows, at_once = 16, 1, 1

    def __init__(self, lease: WindowLease, *, deaths: int, waits: threading.Event) -> None:
        """Its first workers die; ``waits`` is set when the window does nothing else any more."""
        self._lease, self._deaths, self._waits = lease, deaths, waits
        #: Of each batch but those of workers that died, whether it was stopped.
        self.stopped: list[bool] = []

    def parts(self, rows: int) -> int:
        """One."""
        return min(rows, 1)

    def task(self, work: Work, stopping: threading.Event) -> Callable[[], BatchResult]:
        """What takes long."""
        assert work.batch.received.num_rows

        def take_long() -> BatchResult:
            assert self._waits.wait(LONG_S)
            if self._deaths:
                self._deaths -= 1
                raise WorkerDiedError("killed by SIGKILL")
            self._lease.lose()
            self.stopped.append(stopping.wait(LONG_S))
            raise CancelledError

        return take_long


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    settings = Settings(reserve_bytes=1 << 20)
    with Broker.open(tmp_path / "home", upkeep="none", settings=settings) as broker:
        broker.create_topic(TOPIC, type="fifo", queues=1)
        broker.create_group(GROUP, order="message_group")
        yield broker


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a window has asked in vain for more messages, and waits for those that it has."""
    event = threading.Event()
    receive = Broker.receive

    def noting(self: Broker, *args: Any, **how: Any) -> pa.Table:
        received = receive(self, *args, **how)
        if not received.num_rows:
            event.set()
        return received

    monkeypatch.setattr(Broker, "receive", noting)
    return event


@pytest.mark.parametrize("deaths", [0, 1], ids=["a_batch", "half_of_a_batch_that_killed_a_worker"])
def test_a_fenced_window_has_its_engine_stop_in_the_middle_of(
    deaths: int, broker: Broker, waits: threading.Event
) -> None:
    broker.send(TOPIC, pa.table({"body": [b"x"] * 4, "message_group": ["a", "b", "c", "d"]}))
    spec = ConsumerSpec(
        name="walkers",
        topic=TOPIC,
        group=GROUP,
        handler=lambda *_: Outcome(),
        order_by="message_group",
    )
    lease = WindowLease(broker, name=spec.window, owner="one")
    assert lease.open(takeover=False) is None
    engine = WorkingEngine(lease, deaths=deaths, waits=waits)
    bounds = Bounds(idle_s=LONG_S, ends=Deadline(LONG_S))
    window = Window(spec, broker, lease=lease, engine=engine, bounds=bounds)

    reports = list(window.run())

    assert (window.ended, reports, engine.stopped) == ("fenced", [], [True])
