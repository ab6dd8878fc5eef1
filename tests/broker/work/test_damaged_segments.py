"""A bit that flipped in the archive: no wrong body is given, and no merge takes it along."""

import errno
import io
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typing_extensions import override

from rmq_pipeline.archive import key_index
from rmq_pipeline.archive.segment_file import merge
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.reading import segments_of
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import CorruptLogError, StorageError
from rmq_pipeline.settings import Settings
from rmq_pipeline.storage import place as root
from rmq_pipeline.storage.local import LocalRoot

SETTINGS = Settings(
    log_file_bytes=1 << 20, reserve_bytes=0, seal_after_ms=0, compact_min_inputs=2
)  # fmt: skip
BATCH = 20


def opened(home: Path, clock: ManualClock) -> Broker:
    return Broker.open(home, clock=clock, upkeep="none", settings=SETTINGS)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def sealed(home: Path, clock: ManualClock) -> dict[str, bytes]:
    """A closed home with three segments of topic t, and as many of topic u; bodies by id, of t."""
    sent: dict[str, bytes] = {}
    with opened(home, clock) as broker:
        for topic in ("t", "u"):
            broker.create_topic(topic, queues=1)
        broker.create_group("readers", max_attempts=2)
        for batch in range(3):
            # Not compressible, so that only the checksum of a page knows a flipped bit.
            dice = random.Random(batch)
            bodies = [dice.randbytes(120) for _ in range(BATCH)]
            keys = [[f"k{batch}"]] * BATCH
            answer = broker.send("t", pa.table({"body": bodies, "keys": keys}))
            broker.send("u", pa.table({"body": bodies}))
            sent |= dict(zip(answer["message_id"].to_pylist(), bodies, strict=True))
            clock.advance(1_000_000)
            broker.seal()
        # The log goes on in another file, and the first one goes.
        broker.create_topic("filler", queues=1)
        broker.send("filler", pa.table({"body": [os.urandom(1 << 20)]}))
        clock.advance(1_000_000)
        broker.seal()
        assert broker.status()["log_first"] > 0
    return sent


def segments(home: Path, topic: str) -> list[Path]:
    return sorted((home / "topics" / topic).glob("*/.segments/*/*.kept"))


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 0x10
    with path.open("r+b") as file:  # all names of it
        file.write(content)


def in_a_body(path: Path) -> int:
    footer = pq.read_metadata(path)
    names = [footer.row_group(0).column(i).path_in_schema for i in range(footer.num_columns)]
    column = footer.row_group(0).column(names.index("body"))
    return int(column.data_page_offset + column.total_compressed_size - 20)


def in_a_column_name(path: Path) -> int:
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    return content.index(b"body", footer)


@pytest.mark.parametrize("place", [in_a_body, in_a_column_name])
def test_damaged_messages_are_never_given_and_the_others_are(
    home: Path, clock: ManualClock, sealed: dict[str, bytes], place: Callable[[Path], int]
) -> None:
    damaged = segments(home, "t")[1]
    flip(damaged, place(damaged))

    with opened(home, clock) as broker:
        with pytest.raises(CorruptLogError, match=damaged.name):
            broker.read("t", 0, offset=BATCH, limit=1)
        given: dict[str, bytes] = {}
        for _ in range(20):
            with suppress(CorruptLogError):  # a receive of nothing else says so
                got = broker.receive("readers", "t", limit=100)
                bodies = got["body"].to_pylist()
                given |= dict(zip(got["message_id"].to_pylist(), bodies, strict=True))
                broker.ack(got)
            clock.advance(100_000)

    whole = [body for n, body in enumerate(sealed.values()) if n // BATCH != 1]
    assert list(given.values()) == whole
    assert given.items() <= sealed.items()


def test_a_damaged_segment_is_not_merged_and_the_others_are(
    home: Path, clock: ManualClock, sealed: dict[str, bytes]
) -> None:
    damaged = segments(home, "t")[0]
    flip(damaged, in_a_body(damaged))
    content = damaged.read_bytes()

    with opened(home, clock) as broker:
        first, second = broker.compact(), broker.compact()

        assert (first["inputs"], second["inputs"]) == (3, 2)  # those of u, then the rest of t
        assert broker.status()["damaged_segments"] == [
            str(Path("t") / damaged.parents[2].name / "queue_id=0" / f"{damaged.stem}.parquet")
        ]
        assert broker.plan_compaction() == []
        read = broker.read("t", 0, offset=BATCH, limit=100)
        assert read["body"].to_pylist() == list(sealed.values())[BATCH:]
    assert damaged.read_bytes() == content


def test_a_merge_leaves_nothing_of_damaged_inputs(
    home: Path, clock: ManualClock, sealed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sealed
    # What was read is written at once, so that there is a file when the damage is found.
    monkeypatch.setattr("rmq_pipeline.archive.segment_file._PENDING_BYTES", 1)
    with opened(home, clock) as broker:
        archive = broker.engine.segments.root
        registered = segments_of(broker.engine).of_topic(broker.describe_topic("t")["topic_id"])
        damaged = segments(home, "t")[2]
        flip(damaged, in_a_body(damaged))
        before = archive.files("")

        with pytest.raises(CorruptLogError, match="is damaged"):
            merge(archive, registered)

        assert archive.files("") == before


def test_a_damaged_index_is_known_and_the_segment_is_searched_whole(
    home: Path, clock: ManualClock, sealed: dict[str, bytes]
) -> None:
    archive = root.opened(home / "topics")
    index = segments(home, "t")[1].with_suffix(".index")
    table = pa.ipc.open_file(index.read_bytes()).read_all()
    place = index.read_bytes().index(table["hash"].combine_chunks().buffers()[1].to_pybytes()[:4])

    flip(index, place)

    with pytest.raises(ValueError, match="checksum"):
        key_index.check(archive, str(index.relative_to(home / "topics")))
    with opened(home, clock) as broker:
        found = broker.find("t", key="k1")
        assert set(found["message_id"].to_pylist()) == set(list(sealed)[BATCH : 2 * BATCH])


class Away(LocalRoot):
    """A folder on a disk that fails to read one file while it is away."""

    file = ""

    @override
    def open(self, path: str) -> pa.NativeFile:
        if path != self.file:
            return super().open(path)
        return pa.PythonFile(Failing(self.folder / path), mode="r")


class Failing(io.FileIO):
    """A file whose end, with the footer, can be read, and no page."""

    @override
    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell() < 1000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(size or 0)


@pytest.mark.usefixtures("sealed")
def test_segments_that_could_not_be_read_for_a_moment_are_merged_later(
    home: Path, clock: ManualClock
) -> None:
    with opened(home, clock) as broker:
        found = segments_of(broker.engine)
        away = found.root = Away(found.root.folder)  # type: ignore[attr-defined]
        (one,) = [each for each in found.of_topic(topic_id_of(broker, "t")) if each.base == BATCH]
        away.file = one.kept

        with suppress(StorageError):
            broker.compact()
        away.file = ""
        broker.compact()

        assert len(segments(home, "t")) > 3
        assert found.damaged == set()
        assert len(found.of_topic(one.topic_id)) == 1


def topic_id_of(broker: Broker, topic: str) -> int:
    return broker.engine.state.topic(topic).topic.topic_id
