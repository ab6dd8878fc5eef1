"""The trace of a message has every station, wherever its events lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.behaviour.redrives import redrive

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

STATIONS = (
    "SELECT what, topic, consumer_group, attempt, run_id, reason FROM message_trace"
    " WHERE message_id = 'one' ORDER BY position, \"row\""
)


def told(what: str, topic: str, group: str | None = None, **more: Any) -> dict[str, Any]:
    blank = {"attempt": None, "run_id": None, "reason": None}
    return {"what": what, "topic": topic, "consumer_group": group, **blank, **more}


@pytest.mark.parametrize("sealed", [False, True], ids=["in the log", "sealed"])
def test_every_station_of_a_message_is_told_in_order(
    inside: Endpoint, topic: Make, group: Make, messages: Make, outcomes: Make, sealed: bool
) -> None:
    inside.reopen(seal_after_ms=0, snapshot_events=1)
    name, readers = topic(type="delay", queues=1), group(max_attempts=2, backoff_ms=[1_000])
    why = {"reason": "no engine", "error_type": "EngineError"}

    def settle_in(run: str, outcome: str) -> None:
        opened = inside.broker.open_window(f"consumer/{readers}", owner=run, duration_ms=500)
        window = (f"consumer/{readers}", opened["epoch"])
        got = inside.broker.receive(readers, name, window=window)
        said = outcomes(got, outcome, run_id=run, **(why if outcome != "ack" else {}))
        inside.broker.settle(readers, said, window=window)
        inside.advance(1_000)
        if sealed:
            inside.broker.seal()

    inside.broker.send(name, messages(1, message_id=["one"], delay_level=1))
    inside.advance(1_000)
    inside.broker.deliver_scheduled()
    settle_in("run-1", "retry")
    settle_in("run-2", "retry")
    inside.broker.revive()
    redrive(inside, readers, 0)
    settle_in("run-3", "ack")

    assert inside.sql(STATIONS) == [
        told("scheduled", "SCHEDULE_TOPIC_XXXX"),
        told("stored", name),
        told("schedule_delivered", "SCHEDULE_TOPIC_XXXX", attempt=0),
        told("lease", name, readers, attempt=1, run_id="run-1"),
        told("retry", name, readers, attempt=1, run_id="run-1", reason="no engine"),
        told("lease", name, readers, attempt=2, run_id="run-2"),
        told("retry", name, readers, attempt=2, run_id="run-2", reason="no engine"),
        told("stored", f"%DLQ%{readers}"),
        told("dead_letter", name, readers, attempt=2, run_id="run-2", reason="no engine"),
        told("redriven", f"%DLQ%{readers}", readers, attempt=0),
        told("release", name, readers, attempt=0),
        told("lease", name, readers, attempt=1, run_id="run-3"),
        told("ack", name, readers, attempt=1, run_id="run-3"),
    ]


def test_half_messages_are_traced_to_their_end(
    inside: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(type="transaction", queues=1)
    sent = inside.broker.send_half(name, messages(1, message_id=["one"]), producer_group="p")
    resolutions = sent.select(["transaction_id"]).append_column("resolution", [["commit"]])

    inside.broker.end_transactions(resolutions)

    stations = [(row["what"], row["topic"]) for row in inside.sql(STATIONS)]
    assert [what for what, _ in stations] == ["stored", "half", "stored", "half_committed"]
    assert stations[2][1] == name
