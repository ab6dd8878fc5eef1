"""A handler that ends its process is found, message by message, by the window that follows."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.window import Named, SubprocessHandler, start_subprocess
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.handling.group_walk import Rules
from rmq_pipeline.handling.handler import MESSAGES, Handler, Outcome
from tests.consumer import ending
from tests.consumer.conftest import SMALL

ROOT = Path(__file__).parents[2]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "home", upkeep="none", settings=SMALL) as broker:
        broker.create_topic(ending.TOPIC, type="fifo", queues=2)
        broker.create_group(ending.GROUP, order="message_group", max_attempts=2, backoff_ms=[1])
        bodies = [b"x", b"x", b"end", b"x", b"x", b"x"]
        groups = ["a", "a", "a", "a", "b", "b"]
        broker.send(ending.TOPIC, pa.table({"body": bodies, "message_group": groups}))
        yield broker


@pytest.fixture
def died(broker: Broker) -> None:
    """A window was here, whose handler has ended its process."""
    with FlightServer(broker) as server:
        command = [sys.executable, "-m", "tests.consumer.ending", str(server.address)]
        assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == ending.CODE


@pytest.mark.usefixtures("died")
@pytest.mark.parametrize("handler", [ending.ending, ending.decorated.spec.handler])
def test_the_message_that_ends_its_process_fails_alone_and_is_a_dead_letter_in_the_end(
    handler: Handler, broker: Broker
) -> None:
    report = ending.window(handler, broker, owner="the next")

    assert (report.acked, report.retried, report.dead_lettered) == (5, 1, 1)
    (dead,) = broker.sql("SELECT reason, error_type FROM dead_letters").to_pylist()
    assert dead["error_type"] == "WorkerDiedError"
    assert f"exit code {ending.CODE}" in dead["reason"]
    kept = broker.keyed_state(ending.GROUP, ending.TOPIC)
    assert kept is not None
    assert {row["message_group"]: row["seen"] for row in kept.to_pylist()} == {"a": 3, "b": 2}


@pytest.mark.usefixtures("died")
def test_what_cannot_be_found_elsewhere_is_called_here_and_that_is_told(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    here: list[int] = []

    def local(messages: pa.Table, _: pa.Table) -> Outcome:
        here.append(messages.num_rows)
        return Outcome()

    report = ending.window(local, broker, owner="the next")

    assert report.acked == sum(here) == 6
    assert "Make it a function of a module" in caplog.text


def test_a_window_that_follows_a_closed_one_calls_its_handler_here(broker: Broker) -> None:
    here: list[int] = []

    def local(messages: pa.Table, _: pa.Table) -> Outcome:
        here.append(messages.num_rows)
        return Outcome()

    ending.window(local, broker, owner="one")
    broker.send(ending.TOPIC, pa.table({"body": [b"x"], "message_group": ["c"]}))
    ending.window(local, broker, owner="two")

    assert sum(here) == 7


def forever(messages: pa.Table, _: pa.Table) -> Outcome:
    """Never done."""
    assert messages.num_rows
    threading.Event().wait()
    return Outcome()


def test_no_thread_waits_for_a_result_that_is_not_needed() -> None:
    handler = start_subprocess(Rules(forever, ordered=False), threads=1)
    assert handler is not None
    stopping = threading.Event()
    stopping.set()

    with pytest.raises(CancelledError):
        handler.walk([(MESSAGES.empty_table(), None), (_one(), None)], stopping)


def test_a_process_that_does_not_find_its_handler_does_not_begin() -> None:
    gone = Named("tests.consumer.nowhere", "forever")

    assert not SubprocessHandler(Rules(gone, ordered=False), threads=1).start()


def told_and_forever(messages: pa.Table, state: pa.Table) -> Outcome:
    """Say which process this is, and be never done."""
    print(os.getpid(), flush=True)
    return forever(messages, state)


def walk_forever() -> None:
    """The work of a window that is killed meanwhile."""
    handler = start_subprocess(Rules(told_and_forever, ordered=False), threads=1)
    assert handler is not None
    handler.walk([(_one(), None)], threading.Event())


def test_the_subprocess_ends_with_a_window_that_is_killed_in_the_middle_of_a_part() -> None:
    command = [sys.executable, "-c", f"from {__name__} import walk_forever; walk_forever()"]
    window = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert window.stdout is not None
    handling = int(window.stdout.readline())

    window.kill()

    try:
        # Its output has an end when both are gone.
        window.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(handling, signal.SIGKILL)


def _one() -> pa.Table:
    columns = [pa.nulls(1, field.type) for field in MESSAGES]
    return pa.table(columns, schema=pa.schema([pa.field(f.name, f.type) for f in MESSAGES]))
