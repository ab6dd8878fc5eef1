"""Every member reads everything (semantics §6.3, §6.8, §6.10)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.broadcasting import Keeper, KeptPlaces
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.offset_store import BrokerOffsets, FileOffsets, OffsetFile
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.push_consumer import PushConsumer
from tests.consumer.conftest import bodies
from tests.consumer.listening import Heard, consumer
from tests.consumer.pieces import Gate
from tests.waiting import until

Make = Callable[..., Any]


def broadcasting(
    verbs: Broker, group: str, *topics: str, folder: Path, client_id: str = "one", **settings: Any
) -> PushConsumer:
    """A member with offsets of its own."""
    return consumer(
        verbs,
        group,
        *topics,
        model="broadcasting",
        client_id=client_id,
        offsets_folder=folder,
        **settings,
    )


@pytest.mark.parametrize("order", ["concurrently", "queue", "key"])
def test_every_member_gets_every_message(
    order: Any, verbs: Broker, topic: Make, group: Make, tmp_path: Path
) -> None:
    name, readers = topic(queues=3), group()
    verbs.send(name, bodies(0, 60))
    one, two = Heard(), Heard()

    with (
        broadcasting(verbs, readers, name, folder=tmp_path, order=order).listen(one),
        broadcasting(verbs, readers, name, folder=tmp_path, order=order, client_id="two").listen(
            two
        ),
    ):
        one.wait(60)
        two.wait(60)

    assert sorted(one.bodies) == sorted(two.bodies) == list(range(60))


def test_what_fails_is_logged_and_not_given_again(
    verbs: Broker,
    topic: Make,
    group: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(messages: Any, _context: Any) -> str:
        if int(messages[0].body) == 1:
            raise ValueError("gate 7 is shut")
        return "success"

    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 4))
    heard = Heard(fail)

    with broadcasting(verbs, readers, name, folder=tmp_path).listen(heard):
        heard.wait(3)
        # What fails is not among them, and may be given last.
        until(lambda: len(heard.bodies) == 4)
    again = Heard()
    with broadcasting(verbs, readers, name, folder=tmp_path).listen(again) as running:
        until(running.owned)
        verbs.send(name, bodies(4, 5))
        again.wait(1)

    assert sorted(heard.bodies) == [0, 1, 2, 3]
    assert again.bodies == [4]
    assert f"skips 1 failed messages from <message {name}/0/1>: gate 7 is shut" in caplog.text


def test_a_restart_goes_on_where_it_was_and_repeats_what_was_not_done(
    verbs: Broker, topic: Make, group: Make, tmp_path: Path
) -> None:
    gate = Gate()

    def hang(messages: Any, _context: Any) -> str:
        if int(messages[0].body) == 2:
            gate.pass_through()
        return "success"

    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 5))
    heard, again = Heard(hang), Heard()
    running = broadcasting(verbs, readers, name, folder=tmp_path, close_timeout_s=0.1)
    running.listen(heard).start()
    heard.wait(4)
    running.close()
    gate.open()

    with broadcasting(verbs, readers, name, folder=tmp_path).listen(again):
        again.wait(3)

    assert sorted(again.bodies) == [2, 3, 4]


def test_in_the_order_of_a_queue_a_failure_comes_again_here(
    verbs: Broker, topic: Make, group: Make, tmp_path: Path
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 20))
    answers = iter(["success", "suspend", None] + ["success"] * 30)
    heard = Heard(lambda *_: next(answers))

    with broadcasting(verbs, readers, name, folder=tmp_path, order="queue").listen(heard):
        heard.wait(20)

    assert heard.done == list(range(20))
    assert heard.bodies[:4] == [0, 1, 1, 1]


def test_what_a_filter_passes_over_counts_as_read(
    verbs: Broker, topic: Make, group: Make, tmp_path: Path
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 9, tag=["a", *["b"] * 8]))
    heard = Heard()
    running = broadcasting(verbs, readers, folder=tmp_path).subscribe(name, "a").listen(heard)
    with running:
        heard.wait(1)
        (queue,) = running._running().queues.of_topic(name)
        until(lambda: queue.done_before() == 9)

    again = Heard()
    with broadcasting(verbs, readers, name, folder=tmp_path).listen(again) as running:
        until(running.owned)
        verbs.send(name, bodies(9, 10))
        again.wait(1)

    assert again.bodies == [9]


def test_a_reset_of_the_group_moves_its_members(
    verbs: Broker, topic: Make, group: Make, tmp_path: Path
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 6))
    heard = Heard()

    with broadcasting(verbs, readers, name, folder=tmp_path).listen(heard):
        heard.wait(6)
        verbs.reset_offset(readers, name, to_offset=4)
        heard.wait(8)

    assert sorted(heard.bodies) == [0, 1, 2, 3, 4, 4, 5, 5]


def test_what_is_kept_while_a_reset_is_followed_does_not_undo_it(
    verbs: Broker, topic: Make, group: Make, tmp_path: Path
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 6))
    with closing(OffsetFile("one", readers, folder=tmp_path)) as file:
        offsets = FileOffsets(verbs, file, start_from="first")
        of_group = BrokerOffsets(verbs, group=readers, client_id="one", start_from="first")
        places, keeper = KeptPlaces(offsets, of_group), Keeper(offsets, group=readers)
        before, after = (ProcessQueue(MessageQueue(name, "rmq", 0), now_ms=0) for _ in range(2))
        before.next_offset = 6
        verbs.reset_offset(readers, name, to_offset=2)

        places.moved(before.queue)
        keeper.keep([before])
        before.drop()
        places.begin(after)
        keeper.keep([before])

        assert after.next_offset == file.get(after.queue) == 2


def test_an_offset_beyond_the_end_is_corrected(
    verbs: Broker, topic: Make, group: Make, tmp_path: Path
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 6))
    heard, again = Heard(), Heard()
    with broadcasting(verbs, readers, name, folder=tmp_path).listen(heard):
        heard.wait(6)
    verbs.delete_topic(name)
    verbs.create_topic(name, queues=1)
    verbs.send(name, bodies(0, 2))

    with broadcasting(verbs, readers, name, folder=tmp_path).listen(again) as running:
        until(lambda: any(q.next_offset == 2 for q in running._running().queues.of_topic(name)))
        verbs.send(name, bodies(2, 3))
        again.wait(1)

    assert again.bodies == [2]


def test_no_more_is_held_than_the_threshold(
    verbs: Broker, topic: Make, group: Make, tmp_path: Path
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 3000))
    heard = Heard()

    with broadcasting(verbs, readers, name, folder=tmp_path).listen(heard) as running:
        running.suspend()
        stopped = threading.Event()
        until(lambda: not stopped.wait(0.1))
        until(lambda: running._running().queues.of_topic(name))
        (queue,) = running._running().queues.of_topic(name)
        assert queue.count <= 1000
        running.resume()
        heard.wait(3000)

    assert sorted(heard.bodies) == list(range(3000))
