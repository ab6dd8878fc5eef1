"""What is held of a queue (semantics §6.7)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rmq_pipeline.consumer.process_queue import ProcessQueue
from tests.consumer.pieces import QUEUE, held_queue, received
from tests.waiting import until


def test_messages_are_held_with_their_number_bytes_and_span() -> None:
    queue = held_queue()

    queue.put(received(queue, [3, 4, 9], body=[b"abc", b"de", b"f"]))

    assert (queue.count, queue.bytes, queue.span) == (3, 6, 6)


def test_put_says_to_begin_only_when_no_thread_takes() -> None:
    queue = held_queue()

    assert not queue.put([])
    assert queue.put(received(queue, [1]))
    assert not queue.put(received(queue, [2]))
    assert [m.queue_offset for m in queue.take(9)] == [1, 2]
    assert not queue.put(received(queue, [3]))
    assert [m.queue_offset for m in queue.take(9)] == [3]
    assert queue.take(9) == []
    assert queue.put(received(queue, [4]))


def test_take_gives_the_lowest_offsets_whatever_the_order_they_came_in() -> None:
    queue = held_queue()
    queue.put(received(queue, [7, 8]))
    queue.put(received(queue, [5, 6]))

    assert [m.queue_offset for m in queue.take(3)] == [5, 6, 7]


def test_remove_answers_the_offset_before_which_nothing_is_left() -> None:
    queue = held_queue()
    one, two, three = received(queue, [1, 2, 3])

    assert queue.remove([one]) == -1
    queue.put([one, two, three])
    assert queue.remove([two]) == 1
    assert queue.remove([one]) == 3
    assert queue.remove([three]) == 4
    assert queue.remove([three]) == -1
    assert (queue.count, queue.bytes) == (0, 0)


def test_what_is_with_the_listener_counts_as_not_done() -> None:
    queue = held_queue()
    one, two = received(queue, [1, 2])
    queue.put([one, two])
    queue.take(1)

    assert queue.remove([two]) == 1


def test_commit_names_all_that_is_with_the_listener() -> None:
    queue = held_queue()
    queue.put(received(queue, [1, 2, 3]))
    queue.take(1)
    queue.take(1)

    done = queue.commit()

    assert [m.queue_offset for m in done] == [1, 2]
    assert queue.remove(done) == 3


def test_rollback_puts_all_that_is_with_the_listener_back() -> None:
    queue = held_queue()
    queue.put(received(queue, [1, 2, 3]))
    queue.take(2)

    queue.rollback()

    assert queue.commit() == []
    assert [m.queue_offset for m in queue.take(9)] == [1, 2, 3]


def test_consume_again_puts_some_back_in_their_places() -> None:
    queue = held_queue()
    queue.put(received(queue, [1, 2, 3]))
    taken = queue.take(2)

    queue.consume_again(taken[1:])

    assert [m.queue_offset for m in queue.take(1)] == [2]


def test_a_newer_delivery_takes_the_place_of_one_that_waits() -> None:
    queue = held_queue()
    (older,) = received(queue, [1], body=[b"1"])
    (newer,) = received(queue, [1], body=[b"1"], receipt_handle=["newer"])
    queue.put([older])
    queue.put([newer])

    assert (queue.count, queue.bytes) == (1, 1)
    assert queue.begin([older]) == []
    assert queue.begin([newer]) == [newer]


def test_the_older_delivery_that_still_runs_removes_nothing_of_the_newer() -> None:
    queue = held_queue()
    (older,) = received(queue, [1], body=[b"1"])
    (newer,) = received(queue, [1], body=[b"1"])
    queue.put([older])
    queue.begin([older])
    queue.put([newer])
    queue.begin([newer])

    assert queue.remove([older]) == 1
    assert queue.remove([newer]) == 2
    assert queue.bytes == 0


def test_nothing_of_a_dropped_queue_is_begun() -> None:
    queue = held_queue()
    messages = received(queue, [1, 2, 3])
    queue.put(messages)
    queue.take(1)

    assert [m.queue_offset for m in queue.drop()] == [2, 3]
    assert queue.take(9) == []
    assert queue.begin(messages) == []
    assert not queue.put(received(queue, [4]))


def test_a_dropped_queue_is_quiet_once_the_broker_knows_of_what_ran() -> None:
    told = threading.Event()
    queue = held_queue(changed=told.set)
    queue.put(received(queue, [1]))
    running = queue.take(1)
    queue.drop()

    quiet = [queue.is_quiet]
    queue.remove(running, unsettled=True)
    quiet.append(queue.is_quiet)
    queue.settled(1)
    quiet.append(queue.is_quiet)
    assert quiet == [False, False, True]
    assert told.is_set()


class Torn(ProcessQueue):
    """A call ends while somebody looks whether the queue is quiet."""

    ends: Callable[[], None] = staticmethod(lambda: None)
    _number = 0

    @property
    def _unsettled(self) -> int:
        number = self._number
        self.ends()
        return number

    @_unsettled.setter
    def _unsettled(self, number: int) -> None:
        self._number = number


def test_a_queue_is_not_quiet_while_what_ran_becomes_unsettled() -> None:
    queue = Torn(QUEUE, now_ms=0)
    queue.put(received(queue, [1]))
    running = queue.take(1)
    queue.drop()

    def end() -> None:
        del queue.ends
        ended = threading.Thread(target=queue.remove, args=[running], kwargs={"unsettled": True})
        ended.start()
        ended.join(0.2)  # it may have to wait until the look is over

    queue.ends = end
    assert not queue.is_quiet
    until(lambda: queue._unsettled == 1)
    assert not queue.is_quiet


def test_what_takes_its_place_begins_when_it_is_quiet() -> None:
    before = held_queue()
    before.put(received(before, [1]))
    running = before.take(1)
    before.drop()
    after = held_queue(before=before)

    may_begin = [after.may_begin]
    assert [m.queue_offset for m in after.held()] == [1]
    before.remove(running)
    may_begin.append(after.may_begin)
    assert may_begin == [False, True]


def test_room_is_told_once_when_it_is_waited_for() -> None:
    told: list[str] = []
    queue = held_queue(changed=lambda: told.append("room"))
    one, two, three, four = received(queue, [1, 2, 3, 4])
    queue.put([one, two, three, four])

    queue.remove([one])
    assert told == []
    queue.room = lambda: 2 - queue.count
    queue.remove([two])
    assert told == []
    queue.remove([three])
    queue.remove([four])
    assert told == ["room"]


def test_a_lost_message_is_not_begun_and_one_that_runs_goes_on() -> None:
    queue = held_queue()
    one, two = received(queue, [1, 2])
    queue.put([one, two])
    queue.begin([one])

    queue.lose(one)
    queue.lose(two)

    assert queue.held() == [one]


def test_all_is_done_before_the_first_that_is_not() -> None:
    queue = held_queue()
    queue.next_offset = 5
    assert queue.done_before() == 5

    one, two = received(queue, [5, 6])
    queue.put([one, two])
    queue.next_offset = 7
    assert queue.done_before() == 5
    queue.remove([one])
    assert queue.done_before() == 6
    queue.drop()
    assert queue.done_before() == 6
