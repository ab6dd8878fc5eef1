"""Whose turn it is to decide and to write."""

from concurrent.futures import ThreadPoolExecutor

from rmq_pipeline.broker.work.turns import Turns
from tests.waiting import until


def test_bulk_is_decided_while_the_bulk_before_it_is_written() -> None:
    turns = Turns()
    assert turns.try_take(bulk=True) == 1
    assert turns.try_take(bulk=True) is None, "nobody decides beside another one"
    turns.decided()

    assert turns.try_take(bulk=False) is None, "small requests wait for company"
    assert turns.try_take(bulk=True) == 2
    turns.decided()
    assert turns.try_take(bulk=True) is None, "one is enough"

    turns.written()
    assert turns.try_take(bulk=False) is None
    assert turns.try_take(bulk=True) == 3


def test_nothing_is_decided_beside_the_write_of_a_small_frame() -> None:
    turns = Turns()
    assert turns.try_take(bulk=False) == 1
    turns.decided()
    assert turns.try_take(bulk=True) is None
    turns.written()
    assert turns.try_take(bulk=True) == 2


def test_frames_are_written_in_the_order_they_were_taken() -> None:
    turns = Turns()
    order = []
    with ThreadPoolExecutor(2) as pool:
        for frame in (1, 2):
            assert turns.try_take(bulk=True) == frame
            turns.decided()
        second = pool.submit(turns.wait_to_write, 2)
        second.add_done_callback(lambda _: order.append("second"))
        assert turns.wait_to_write(1)
        order.append("first")
        turns.written()
        assert second.result()
    assert order == ["first", "second"]


def test_nobody_goes_past_one_who_waits() -> None:
    turns = Turns()
    assert turns.try_take(bulk=True) == 1
    turns.decided()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(turns.take, bulk=False)
        until(lambda: turns._waiting == 1)
        past = turns.try_take(bulk=True)  # bulk could go beside bulk
        turns.decided()
        for _ in range(past or 1):  # what went past is written too, or nobody ends
            turns.written()
        taken = waiting.result()
    assert (past, taken) == (None, 2)


def test_who_decides_is_told_to_stop_when_the_frame_before_fails() -> None:
    turns = Turns()
    turns.try_take(bulk=True)
    turns.decided()
    assert turns.try_take(bulk=True) == 2
    with ThreadPoolExecutor(2) as pool:
        deciding = pool.submit(turns.wait_to_write, 2)
        stopping = pool.submit(turns.stop)
        assert deciding.result() is False
        assert not stopping.done()
        turns.decided()
        stopping.result()
        assert turns.try_take(bulk=True) is None
        turns.written()
        turns.go_on()
        assert turns.wait_to_write(2)
    assert turns.try_take(bulk=True) == 3


def test_closing_waits_for_what_is_decided() -> None:
    turns = Turns()
    turns.try_take(bulk=True)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(turns.close)
        assert turns.wait_to_write(1), "closing stops nobody"
        turns.decided()
        assert not closing.done()
        turns.written()
        closing.result()
    assert turns.try_take(bulk=True) is None
