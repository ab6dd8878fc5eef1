"""Small requests go before bulk; of bulk one at a time is prepared."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rmq_pipeline.broker.decide.deliver import Receive
from rmq_pipeline.broker.decide.request import Request
from rmq_pipeline.broker.decide.settle import Settle
from rmq_pipeline.broker.work import bulk_gate
from rmq_pipeline.broker.work.bulk_gate import BulkGate
from rmq_pipeline.broker.work.writer import Pending, Posted, small_first
from rmq_pipeline.errors import RequestError
from tests.broker.held import BULK, WITHIN_S, Held
from tests.broker.sealed_home import MIB, messages
from tests.conftest import Eventually
from tests.waiting import until


def test_what_is_small_goes_before_bulk_that_it_queued_up_behind(
    held: Held, pool: ThreadPoolExecutor, eventually: Eventually
) -> None:
    held.arm()
    first = pool.submit(held.broker.send, "t", messages(1))
    assert held.held.wait(WITHIN_S)
    bulk = pool.submit(held.broker.send, "t", messages(BULK, start=2))
    eventually(lambda: held.engine.writer._turns._waiting == 1)
    small = pool.submit(held.broker.send, "t", messages(1, start=1))
    eventually(lambda: not held.engine.writer._queue.empty())
    frames = held.steps.count("written")
    held.let_go.set()

    sent = [each.result(WITHIN_S)["queue_offset"].to_pylist() for each in (first, small, bulk)]
    assert sent == [[0], [1], list(range(2, BULK + 2))]
    assert held.steps.count("written") == frames + 3
    assert held.bodies() == messages(BULK + 2)["body"].to_pylist()


class Fed(Held):
    """A broker to which another small send comes whenever it has decided a frame, a few times."""

    left = 0

    def feed(self, pool: ThreadPoolExecutor, *, times: int) -> None:
        self.pool, self.left = pool, times

    def step(self, name: str) -> None:
        super().step(name)
        if name == "staged" and self.left:
            self.left -= 1
            self.pool.submit(self.broker.send, "t", messages(1))
            until(lambda: not self.engine.writer._queue.empty())


def test_bulk_is_passed_once(home: Path, eventually: Eventually) -> None:
    times = 5
    # A thread for everybody: who has none would not be in the queue.
    with ThreadPoolExecutor(times + 3) as pool:
        held = Fed(home)
        held.arm()
        first = pool.submit(held.broker.send, "t", messages(1))
        assert held.held.wait(WITHIN_S)
        bulk = pool.submit(held.broker.send, "t", messages(BULK))
        eventually(lambda: held.engine.writer._turns._waiting == 1)
        small = pool.submit(held.broker.send, "t", messages(1))
        eventually(lambda: not held.engine.writer._queue.empty())
        held.feed(pool, times=times)
        held.let_go.set()

        sent = [each.result(WITHIN_S)["queue_offset"][0].as_py() for each in (first, small, bulk)]
        eventually(lambda: not held.left)
    held.broker.close()
    assert sent == [0, 1, 2]


def test_what_is_small_passes_nothing_that_was_posted_before_it_by_the_same(held: Held) -> None:
    def pending(rows: int, *, posted: bool) -> Pending:
        request = held.prepared(messages(rows))
        return Posted(request, lambda _answer, _error: None) if posted else Pending(request)

    bulk, small = pending(BULK, posted=True), pending(1, posted=True)
    waits, large = pending(1, posted=False), pending(BULK, posted=False)
    together = [bulk, small, large, waits]

    assert small_first(together) == 1
    assert together == [waits, bulk, small, large]
    assert small_first([small, waits]) == 0


def test_a_small_request_goes_with_the_one_before_it(held: Held) -> None:
    bulk, one = held.prepared(messages(BULK)), held.prepared(messages(1))
    behind_bulk, behind_small = Pending(one, first=bulk), Pending(one, first=one)
    large = Pending(bulk)
    together = [large, behind_bulk, behind_small]

    assert small_first(together) == 1
    assert together == [behind_small, large, behind_bulk]


def test_many_receipts_and_a_large_receive_are_bulk(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[tuple[type[Request], bool]] = []
    submit = held.engine.writer.submit

    def noting(request: Request, **how: Any) -> Any:
        submitted.append((type(request), request.is_bulk()))
        return submit(request, **how)

    held.broker.create_group("g")
    held.broker.send("t", messages(BULK + 1))
    monkeypatch.setattr(held.engine.writer, "submit", noting)
    for limit in (BULK, 1):
        held.broker.ack(held.broker.receive("g", "t", limit=limit))

    assert {entry for entry in submitted if entry[0] in (Receive, Settle)} == {
        (Receive, True),
        (Settle, True),
        (Receive, False),
        (Settle, False),
    }


def test_one_large_send_is_prepared_at_a_time(pool: ThreadPoolExecutor) -> None:
    gate = BulkGate()
    large, small = messages(BULK), messages(1)

    def enter() -> bool:
        with gate.preparing(large):
            return True

    with gate.preparing(large):
        other = pool.submit(enter)
        with gate.preparing(small), gate.preparing(small):
            assert not other.done()
    assert other.result(WITHIN_S)


def test_large_sends_wait_while_too_many_bytes_are_not_written(
    held: Held, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_gate, "UNWRITTEN_BYTES", 3 * MIB)
    held.arm()
    first = pool.submit(held.broker.send, "t", messages(2, body_bytes=MIB))
    assert held.held.wait(WITHIN_S)
    second = pool.submit(held.broker.send, "t", messages(2, start=2, body_bytes=MIB))
    until(held.engine.bulk_gate._next.locked)
    third = pool.submit(held.broker.send, "t", messages(1, start=4, body_bytes=MIB // 2))

    assert not held.followed.wait(0.2)
    held.let_go.set()

    assert [each.result(WITHIN_S).num_rows for each in (first, second, third)] == [2, 2, 1]
    assert held.engine.bulk_gate._unwritten_bytes == 0


@pytest.mark.parametrize("unwritten_bytes", [1, 1 << 40])
def test_a_large_send_that_is_refused_leaves_its_place(
    held: Held, monkeypatch: pytest.MonkeyPatch, unwritten_bytes: int
) -> None:
    monkeypatch.setattr(bulk_gate, "UNWRITTEN_BYTES", unwritten_bytes)
    wrong = messages(BULK).append_column("message_group", [["g"] * BULK])

    with pytest.raises(RequestError):
        held.broker.send("t", wrong)

    assert held.broker.send("t", messages(BULK)).num_rows == BULK
