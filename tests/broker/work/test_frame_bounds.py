"""A frame is counted as large as it is, and stays small enough to be written."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import numpy as np
import pyarrow as pa
import pytest
from typing_extensions import override

from rmq_pipeline import limits
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide import fifo
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state import event_rows
from rmq_pipeline.broker.state.event_rows import EventRows, single
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.broker.work import writer
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import RequestError
from rmq_pipeline.limits import REASON_LENGTH
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.log import commit_log, frame
from rmq_pipeline.store.log.frame_builder import FrameBuilder
from tests.broker.held import BULK, WITHIN_S, Held
from tests.broker.sealed_home import MIB, messages, open_broker
from tests.conftest import Eventually

INVISIBLE_MS = 60_000
GROUPS = 8


@dataclass(frozen=True, slots=True)
class Noted(Request):
    """A request that stores a text, as an event."""

    text: str

    @override
    def decide(self, state: State, now_ms: int) -> Decision:
        return Decision(events=[single(Kind.UPKEEP_FALLBACK, now_ms, detail=self.text)])


def keyed_state(columns: int) -> pa.Table:
    fields = {f"feature_value_{i:03d}": [1.0] for i in range(columns)}
    return pa.table({"message_group": ["a"], **fields})


def test_who_waits_for_several_answers_waits_for_no_others(
    held: Held, pool: ThreadPoolExecutor, eventually: Eventually
) -> None:
    answered = Event()
    held.arm()
    first = pool.submit(held.broker.send, "t", messages(BULK))
    assert held.held.wait(WITHIN_S)
    together = [held.prepared(messages(1, start=BULK))]
    second = pool.submit(held.engine.writer.submit_together, together)
    eventually(lambda: held.engine.writer._turns._waiting == 1)
    # The writer adds this to what it has taken from its queue. Nobody can wait for it.
    held.engine.post(held.prepared(messages(1, start=BULK + 1)), lambda *_: answered.set())
    held.let_go.set()

    assert first.result(WITHIN_S).num_rows == BULK
    assert [sent.queue_offset.tolist() for sent in second.result(WITHIN_S)] == [[BULK]]
    assert answered.wait(WITHIN_S)


@pytest.mark.parametrize("columns", [1, 40, 300, 1500])
def test_keyed_state_takes_no_more_than_is_counted(columns: int) -> None:
    (batch,) = keyed_state(columns).to_batches()
    builder = FrameBuilder({}, seed=0, start=0)
    builder.stage(writer.KEYED_STATE, batch)

    assert builder.length <= Decision(keyed_state=[batch]).encode()


@pytest.mark.parametrize("text", ["", "plain", "größer", "消息", "🙂" * 3])
def test_texts_of_events_are_counted_as_they_are_stored(text: str) -> None:
    rows = EventRows(
        kind=Kind.RETRY,
        at_ms=1,
        queue_offset=np.arange(3),
        client_id=text,
        detail=[text, None, 2 * text],
    )

    assert rows.text_bytes() == 6 * len(text.encode())
    assert single(Kind.SETTLED, 1, detail=text).text_bytes() == len(text.encode())
    assert event_rows.to_payload([rows]).size <= Decision(events=[rows]).encode()


def test_wide_keyed_state_is_settled_to_the_end_of_a_log_file(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = keyed_state(150)
    nothing = pa.table({name: pa.array([], pa.string()) for name in ("receipt_handle", "outcome")})
    with open_broker(home) as broker:
        broker.create_topic("t", queues=1, type="fifo")
        broker.create_group("g", order="message_group")
        log = broker.engine.log
        broker.settle("g", nothing, state=state, topic="t")
        frame_bytes = log.end
        broker.settle("g", nothing, state=state, topic="t")
        frame_bytes = log.end - frame_bytes

        # A little less room than it takes, and ever less: one of them was counted as fitting.
        for short in range(64, frame_bytes, 4096):
            fill = log._files[-1].capacity_end - log.end - frame_bytes + short
            broker.send("t", pa.table({"body": [os.urandom(fill)], "message_group": ["b"]}))
            broker.settle("g", nothing, state=state, topic="t")

    assert not caplog.records


@pytest.fixture
def condemned(home: Path, monkeypatch: pytest.MonkeyPatch) -> Broker:
    """A broker of small frames, and a topic all of whose message groups are given up."""
    monkeypatch.setattr(frame, "FRAME_BYTES_MAX", 4 * MIB)
    broker = open_broker(home, log_file_bytes=8 * MIB)
    broker.create_topic("t", queues=2, type="fifo")
    broker.create_group("g", order="message_group", on_failure="dead_letter_group")
    broker.send("t", of_groups(GROUPS))
    got = broker.receive("g", "t", limit=GROUPS, invisible_duration_ms=INVISIBLE_MS)
    assert got.num_rows == GROUPS
    broker.settle(
        "g",
        pa.table(
            {
                "receipt_handle": got["receipt_handle"],
                "outcome": ["give_up"] * GROUPS,
                "reason": ["x" * REASON_LENGTH] * GROUPS,
            }
        ),
    )
    return broker


def of_groups(n: int) -> pa.Table:
    return messages(n, message_group=[f"g{i % GROUPS}" for i in range(n)])


def test_a_backlog_that_is_given_up_takes_as_many_frames_as_it_needs(
    condemned: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    n = 2000
    with condemned as broker:
        broker.send("t", of_groups(n))
        broker.send("t", messages(1, start=n, message_group=["free"]))

        got = broker.receive("g", "t", limit=10, invisible_duration_ms=INVISIBLE_MS)

        assert got["body"].to_pylist() == [b"%d:" % n]
        assert broker.receive("g", "t", limit=10, invisible_duration_ms=INVISIBLE_MS).num_rows == 0
        (offsets,) = broker.describe_topic("%DLQ%g")["offsets"]
        assert offsets["max_offset"] == GROUPS + n
    assert not caplog.records


@pytest.mark.parametrize("letter", ["x", "消", "🙂"])
@pytest.mark.parametrize("how", ["receive", "revive", "settle"])
def test_a_large_message_group_that_is_with_a_receiver_is_given_up(
    home: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, how: str, letter: str
) -> None:
    n, reason = 2000, letter * REASON_LENGTH
    with open_broker(home, clock) as broker:
        broker.create_topic("t", queues=1, type="fifo")
        broker.create_group(
            "g", order="message_group", on_failure="dead_letter_group", max_attempts=2
        )
        broker.send("t", messages(n, message_group=["bad"] * n))
        broker.send("t", messages(1, start=n, message_group=["free"]))
        got = broker.receive("g", "t", limit=n, invisible_duration_ms=INVISIBLE_MS)
        assert got.num_rows == n
        broker.settle("g", failed(got, reason))
        got = broker.receive("g", "t", limit=n, invisible_duration_ms=INVISIBLE_MS)
        monkeypatch.setattr(commit_log, "FRAME_BYTES_MAX", 4 * MIB)
        monkeypatch.setattr(limits, "STEP_BYTES", MIB)

        if how == "settle":
            broker.settle("g", failed(got, reason))
        else:
            clock.advance(INVISIBLE_MS)
        if how == "revive":
            assert broker.revive()["dead_lettered"] == n

        assert broker.receive("g", "t", limit=10)["body"].to_pylist() == [b"%d:" % n]
        first, *behind = broker.read("%DLQ%g", 0, offset=0, limit=n)["properties"].to_pylist()
        assert len(behind) == n - 1
        assert dict(first)["DLQ_REASON"] == reason
        for properties in map(dict, behind):
            assert properties["DLQ_REASON"].startswith("an earlier message of its group failed: ")
            assert properties["DLQ_SIGNATURE"] == dict(first)["DLQ_SIGNATURE"]


def failed(received: pa.Table, reason: str) -> pa.Table:
    """The first of them has failed, and may come again at once."""
    columns = {"outcome": ["retry"], "reason": [reason], "retry_after_ms": [0]}
    return pa.table({"receipt_handle": received["receipt_handle"][:1], **columns})


def test_what_waited_of_a_message_group_is_given_up_in_parts(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 50
    monkeypatch.setattr(fifo, "GIVEN_UP_BYTES", 1)
    with open_broker(home) as broker:
        broker.create_topic("t", queues=1, type="fifo")
        broker.create_group("g", order="message_group", on_failure="dead_letter_group")
        broker.send("t", messages(1, message_group=["bad"]))
        got = broker.receive("g", "t", limit=1, invisible_duration_ms=INVISIBLE_MS)
        bad = ["bad" if i % 2 else "good" for i in range(1, n)]
        broker.send("t", messages(n - 1, start=1, message_group=bad))
        good = broker.receive("g", "t", limit=n, invisible_duration_ms=INVISIBLE_MS)
        broker.ack(good["receipt_handle"].to_pylist())
        broker.forward_to_dead_letter_queue(got["receipt_handle"].to_pylist(), reason="odd")

        assert broker.receive("g", "t", limit=n).num_rows == 0

        dead = broker.read("%DLQ%g", 0, offset=0, limit=n)["body"].to_pylist()
        assert sorted(dead) == sorted(
            body
            for body, group in zip(messages(n)["body"].to_pylist(), ["bad", *bad], strict=True)
            if group == "bad"
        )
        (progress,) = broker.due()["groups"]["g"]["topics"].values()
        assert (progress["unread"], progress["unsettled"], progress["ready"]) == (0, 0, 0)


def test_requests_share_a_frame_only_as_far_as_their_events_fit(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "FRAME_BYTES", 4096)
    frames = held.steps.count("written")

    held.engine.writer.submit_together([Noted("x" * 5000) for _ in range(3)])

    assert held.steps.count("written") == frames + 3


def test_a_request_that_no_frame_takes_is_refused_and_changes_nothing(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "FRAME_BYTES_MAX", 64 * 1024)
    state = held.engine.state

    sent, large = held.engine.writer.submit_together(
        [held.prepared(messages(1)), Noted("x" * 64 * 1024)]
    )

    assert sent.queue_offset.tolist() == [0]
    assert isinstance(large, RequestError)
    assert held.engine.state is state
    assert held.bodies() == [b"0:"]
