"""A bit that flipped on disk is found and its place is named, never passed over.

RMQ_CHAOS_FLIPS sets how many bits of all files of a home the long run flips (100).
"""

import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import CorruptLogError
from rmq_pipeline.store.database import Database
from rmq_pipeline.store.log.frame import FILE_HEADER_BYTES, HEADER_BYTES
from tests.chaos import flipping
from tests.chaos.victim import SETTINGS
from tests.chaos.zygote import Zygote

pytestmark = pytest.mark.chaos


def open_broker(home: Path) -> Broker:
    return Broker.open(home, upkeep="none", settings=SETTINGS)


def file_of(home: Path, position: int) -> tuple[Path, int]:
    """The log file and the byte of it where a position is."""
    path = max(p for p in (home / "log").glob("*.log") if int(p.stem) <= position)
    return path, FILE_HEADER_BYTES + position - int(path.stem)


def flip(path: Path, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 0x10]))


def test_a_flipped_bit_before_the_end_is_refused_with_its_place(tmp_path: Path, home: Path) -> None:
    zygote = Zygote(tmp_path / "output")
    task = {"home": str(home), "facts": str(tmp_path / "facts"), "step": "before_dispatch"}
    pid = zygote.ask(victim={**task, "times": 20})
    assert zygote.ask(reap=pid) == -signal.SIGKILL
    zygote.close()
    database = Database.open(home / "state.duckdb", memory_bytes=64 << 20)
    reached = database.dispatched
    database.close()
    path, byte = file_of(home, reached)

    flip(path, byte + 2 * HEADER_BYTES + 40)

    with pytest.raises(CorruptLogError, match=rf"{path}: .* position \d+ \(byte \d+\)"):
        open_broker(home)

    flip(path, byte + 2 * HEADER_BYTES + 40)
    open_broker(home).close()


def test_a_flipped_bit_of_dispatched_messages_is_found_by_who_reads_them(home: Path) -> None:
    with open_broker(home) as broker:
        broker.create_topic("plain", queues=1)
        sent = [broker.send("plain", pa.table({"body": [os.urandom(2000)] * 3})) for _ in range(3)]
        broker.engine.dispatched()
        page = broker.engine.database.index(
            broker.describe_topic("plain")["topic_id"], 0, start=0, stop=9
        )
    path, byte = file_of(home, int(page.position[3]))

    flip(path, byte + HEADER_BYTES + 4000)

    with open_broker(home) as broker:
        with pytest.raises(CorruptLogError, match=rf"{path}: .* position {page.position[3]} "):
            broker.read("plain", 0, offset=3, limit=3)
        for batch, offset in ((0, 0), (2, 6)):
            table = broker.read("plain", 0, offset=offset, limit=3)
            assert table["message_id"].to_pylist() == sent[batch]["message_id"].to_pylist()


FLIPS = int(os.environ.get("RMQ_CHAOS_FLIPS", "100"))
#: The normal run's share.
FEW = 4


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A closed home with files of every kind, and what it answers."""
    home = tmp_path_factory.mktemp("full") / "home"
    return home, flipping.fill(home)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("n", [FEW, pytest.param(FLIPS, marks=pytest.mark.long)])
def test_no_flipped_bit_of_a_home_gives_a_wrong_message(
    full: tuple[Path, dict[str, Any]], tmp_path: Path, n: int, seed: int
) -> None:
    home, expected = full
    found: Counter[tuple[str, str]] = Counter()
    bad = []
    for flip in flipping.flips(home, random.Random(seed), n):
        came = flipping.outcome(home, tmp_path / "home", flip, expected=expected)
        found[flipping.kind_of(flip.path), came] += 1
        if came in ("silent", "wrong"):
            bad.append((came, flip))

    for (kind, became), times in sorted(found.items()):
        print(f"{kind:14} {became:10} {times}")
    assert not bad, f"seed {seed}"
