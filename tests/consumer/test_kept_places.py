"""Where a broadcasting member continues when two members, or none, write its file."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.broadcasting import ANYWHERE, KeptPlaces
from rmq_pipeline.consumer.message_queue import BROKER_NAME, MessageQueue
from rmq_pipeline.consumer.offset_store import BrokerOffsets, FileOffsets, Moves, OffsetFile
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.errors import StorageError
from tests.consumer.conftest import bodies
from tests.consumer.listening import Heard, consumer
from tests.waiting import until

Make = Callable[..., Any]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[OffsetFile]:
    with closing(OffsetFile("one", "readers", folder=tmp_path)) as file:
        yield file


def full(_: OffsetFile, offsets: Mapping[MessageQueue, int]) -> None:
    """There is no room on the disk."""
    raise OSError(errno.ENOSPC, f"No space left on device for {offsets}")


class KeptMeanwhile(FileOffsets):
    """Another thread keeps an older place as soon as one was kept."""

    def commit(self, moves: Moves) -> dict[MessageQueue, int]:
        found = super().commit(moves)
        self._file.put(dict.fromkeys(moves, 6))
        return found


def test_a_queue_begins_where_the_group_was_put_whatever_is_kept_meanwhile(
    verbs: Broker, topic: Make, group: Make, file: OffsetFile
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 6))
    verbs.reset_offset(readers, name, to_offset=2)
    of_group = BrokerOffsets(verbs, group=readers, client_id="one", start_from="first")
    places = KeptPlaces(KeptMeanwhile(verbs, file, start_from="first"), of_group)
    queue = ProcessQueue(MessageQueue(name, BROKER_NAME, 0), now_ms=0)

    places.moved(queue.queue)
    places.begin(queue)

    assert queue.next_offset == 2


def test_a_disk_without_room_is_an_error_of_storage(
    verbs: Broker, file: OffsetFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets = FileOffsets(verbs, file, start_from="first")
    monkeypatch.setattr(OffsetFile, "put", full)

    with pytest.raises(
        StorageError, match=r"could not be written to .*offsets\.json.*No space left"
    ):
        offsets.commit({MessageQueue("t", BROKER_NAME, 0): (ANYWHERE, 1)})


def test_queues_are_taken_while_places_of_others_cannot_be_kept(
    verbs: Broker, topic: Make, group: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after, readers = topic(queues=1), topic(queues=1), group()
    put = OffsetFile.put

    def full_for_one(file: OffsetFile, offsets: Mapping[MessageQueue, int]) -> None:
        (full if any(queue.topic == before for queue in offsets) else put)(file, offsets)

    running = consumer(
        verbs, readers, before, model="broadcasting", client_id="one", offsets_folder=tmp_path
    )
    with running.listen(Heard()):
        until(running.owned)
        with monkeypatch.context() as disk:
            disk.setattr(OffsetFile, "put", full_for_one)
            running.unsubscribe(before)
            until(lambda: not running.owned())

            running.subscribe(after)

            until(lambda: [queue.topic for queue in running.owned()] == [after])
