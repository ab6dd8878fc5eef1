"""``rmq repair``: what a start refuses opens again, with all up to the damage."""

import json
import os
from pathlib import Path
from typing import Any

import duckdb
import pytest

from rmq_pipeline.backup.repairing import UnrepairableError, locked, plan, repair
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.archiving import compact, delete_replaced
from rmq_pipeline.broker.work.reading import segments_of
from rmq_pipeline.broker.work.seal import seal
from rmq_pipeline.errors import CorruptLogError, HomeLockedError, RequestError, RocketMQError
from rmq_pipeline.flight.flags import Flags
from tests.broker.sealed_home import MIB, fill, messages, open_broker, seal_all, stored
from tests.cli.conftest import Rmq, no_broker

__all__ = ["no_broker"]
#: Two small segments are merged, and the replaced files deleted at once.
MERGES: dict[str, Any] = {"replaced_grace_ms": 0, "compact_min_inputs": 2}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def sent_undispatched(home: Path) -> list[int]:
    """Leave a home whose last three frames are not in the database; return where they begin."""
    with open_broker(home) as broker:
        broker.create_topic("plain", queues=1)
        broker.send("plain", messages(5))
    copy = (home / "state.duckdb").read_bytes()
    starts = []
    with open_broker(home) as broker:
        for number in range(3):
            starts.append(broker.engine.log.end)
            broker.send("plain", messages(7, start=100 * number, body_bytes=300))
    (home / "state.duckdb").write_bytes(copy)
    return starts


def flip(home: Path, position: int) -> None:
    (path,) = (home / "log").glob("*.log")
    with path.open("r+b") as file:
        file.seek(4096 + position + 200)
        byte = file.read(1)
        file.seek(4096 + position + 200)
        file.write(bytes([byte[0] ^ 1]))


def read(broker: Broker) -> int:
    return len(broker.read("plain", 0, offset=0, limit=100))


def test_a_log_is_cut_before_a_damaged_frame(home: Path, no_broker: Rmq) -> None:
    starts = sent_undispatched(home)
    flip(home, starts[1])
    with pytest.raises(CorruptLogError, match="rmq repair HOME"):
        open_broker(home)
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}

    dry = no_broker("repair", str(home), "--dry-run")
    unasked = no_broker("repair", str(home))

    assert (dry.code, unasked.code) == (1, 1)
    assert f"cut at position {starts[1]}" in dry.text + dry.err
    assert "messages of topic plain from offset 12 of queue 0" in dry.text + dry.err
    assert "give --yes" in unasked.err
    as_json = no_broker("repair", str(home), "--json")
    assert (as_json.code, json.loads(as_json.out)["aside"]) == (1, None)
    assert before == {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}

    done = no_broker("repair", str(home), "--yes", "--json")

    said = json.loads(done.out)
    assert said["cut_at"] == starts[1]
    assert said["lost_frames"] >= 1
    (lost,) = said["lost_messages"]
    assert (lost["topic"], lost["from_offset"], lost["messages"]) == ("plain", 12, 14)
    (aside,) = Path(said["aside"]).glob("*.log")
    assert aside.read_bytes() == before[home / "log" / aside.name]
    with open_broker(home) as broker:
        assert read(broker) == 12
        broker.send("plain", messages(1))
        assert read(broker) == 13
    assert no_broker("repair", str(home)).code == 0


def test_a_damaged_database_is_made_again_from_the_log(home: Path) -> None:
    with open_broker(home, log_file_bytes=8 << 20) as broker:
        fill(broker)
        seal_all(broker)
        broker.send("plain", messages(9))
        expected = stored(broker)
        assert broker.engine.log.first == 0
    damaged = b"no database" * 1000
    (home / "state.duckdb").write_bytes(damaged)
    with pytest.raises(RocketMQError):
        open_broker(home)

    with locked(home) as where:
        found = plan(where)
        assert (found.is_derived, found.cut) == (True, None)
        aside = repair(found)

    assert (aside / "state.duckdb").read_bytes() == damaged
    with open_broker(home, log_file_bytes=8 << 20) as broker:
        assert stored(broker) == expected
        seal_all(broker)
        assert stored(broker) == expected


def mend(home: Path) -> Path:
    with locked(home) as where:
        return repair(plan(where))


def test_a_repair_keeps_the_settings(home: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "archive_root": str(tmp_path / "archive"),
        "log_file_bytes": 8 << 20,
    }
    with open_broker(home, **settings) as broker:
        fill(broker, rounds=2)
        seal_all(broker)
        expected = stored(broker)
    Flags(settings=settings).keep(home)
    kept = (home / "settings.json").read_bytes()
    (home / "state.duckdb").write_bytes(b"no database")

    mend(home)

    assert (home / "settings.json").read_bytes() == kept
    with open_broker(home, **Flags.remembered(home).settings) as broker:
        assert stored(broker) == expected


def test_what_cannot_be_repaired_is_refused(home: Path) -> None:
    with open_broker(home) as broker:
        fill(broker)
        for _ in range(8):
            broker.send("plain", messages(40, body_bytes=40_000))
        seal_all(broker)
        assert broker.engine.log.first > 0
        with pytest.raises(HomeLockedError), locked(home):
            pass
    (home / "state.duckdb").write_bytes(b"no database")

    with (
        locked(home) as where,
        pytest.raises(UnrepairableError, match="begins at position") as caught,
    ):
        plan(where)

    assert "rmq restore DEST HOME" in caught.value.remedy


def files_of(home: Path) -> dict[Path, bytes]:
    """Everything in a home but the lock, which a check may create."""
    return {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}


def refusal(home: Path) -> UnrepairableError:
    """Refuse to plan, and change nothing; return the error."""
    before = files_of(home)
    with locked(home) as where, pytest.raises(UnrepairableError) as caught:
        plan(where)
    assert files_of(home) == before
    return caught.value


class StoppedError(Exception):
    """A seal ends here."""


def stop_before_drop(step: str) -> None:
    if step == "checkpointed":
        raise StoppedError


def small_logs(home: Path, *, sealed: bool = False) -> list[Path]:
    """Leave a home with several log files, all in the database; return them."""
    with open_broker(home) as broker:
        broker.create_topic("plain", queues=1)
        for number in range(6):
            broker.send("plain", messages(10, start=10 * number, body_bytes=50_000))
        if sealed:
            with pytest.raises(StoppedError):
                seal(broker.engine, limit_bytes=8 * MIB, window=None, fault=stop_before_drop)
    return sorted((home / "log").glob("*.log"))


def break_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"damaged!" * 8)


def test_a_cut_before_sealed_messages_is_refused(home: Path) -> None:
    with open_broker(home, log_file_bytes=8 << 20) as broker:
        broker.create_topic("plain", queues=1)
        broker.send("plain", messages(5))
        middle = broker.engine.log.end
        broker.send("plain", messages(40, body_bytes=300))
        seal_all(broker)
        assert broker.engine.log.first == 0
    flip(home, middle)
    (home / "state.duckdb").write_bytes(b"no database")

    assert "would be lost" in refusal(home).message


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_segment_that_a_lost_merge_replaced_is_written_again(
    home: Path, *, is_gone: bool
) -> None:
    with open_broker(home, log_file_bytes=8 << 20, **MERGES) as broker:
        broker.create_topic("plain", queues=1)
        for number in range(4):
            broker.send("plain", messages(9, start=9 * number))
            seal_all(broker)
    copy = (home / "state.duckdb").read_bytes()
    with open_broker(home, log_file_bytes=8 << 20, **MERGES) as broker:
        damaged = broker.engine.log.end
        broker.send("plain", messages(3))
        compact(broker.engine, topic=None, limit_bytes=MIB, window=None)
        delete_replaced(broker.engine)
        expected = broker.read("plain", 0, offset=0, limit=36)
    (home / "state.duckdb").write_bytes(copy)
    flip(home, damaged)
    (merged,) = home.rglob("*.kept")
    if is_gone:
        merged.unlink()
        assert "which is gone" in refusal(home).message
        return

    mend(home)

    with open_broker(home, log_file_bytes=8 << 20) as broker:
        assert broker.read("plain", 0, offset=0, limit=100).equals(expected)
        broker.send("plain", messages(30))
        seal_all(broker)
        assert read(broker) == 66


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_header_is_written_again(home: Path, which: int) -> None:
    paths = small_logs(home)
    assert len(paths) > 2
    sound = paths[which].read_bytes()
    break_header(paths[which])
    with pytest.raises(CorruptLogError):
        open_broker(home)

    aside = mend(home)

    assert paths[which].read_bytes()[:4096] == sound[:4096]
    assert (aside / f"{paths[which].name}.header").read_bytes()[:8] == b"damaged!"
    with open_broker(home) as broker:
        assert read(broker) == 60


def test_the_header_of_the_only_file_is_written_again(home: Path) -> None:
    sent_undispatched(home)
    (path,) = (home / "log").glob("*.log")
    break_header(path)

    mend(home)

    with open_broker(home) as broker:
        assert read(broker) == 26


def test_a_sealed_file_that_is_gone_is_not_needed(home: Path) -> None:
    paths = small_logs(home, sealed=True)
    assert len(paths) > 2
    with open_broker(home) as broker:
        sealed_to = segments_of(broker.engine).sealed_to
    (gone,) = [each for each in paths[1:2] if int(paths[2].stem) <= sealed_to]
    gone.unlink()
    with pytest.raises(CorruptLogError):
        open_broker(home)

    aside = mend(home)

    assert (aside / paths[0].name).exists()
    with open_broker(home) as broker:
        assert read(broker) == 60
        seal_all(broker)
        assert read(broker) == 60


def test_a_file_that_is_gone_and_not_sealed_is_refused(home: Path) -> None:
    paths = small_logs(home)
    paths[1].unlink()
    with pytest.raises(CorruptLogError):
        open_broker(home)

    error = refusal(home)

    assert "is gone" in error.message
    assert "rmq restore DEST HOME" in error.remedy


def test_a_loss_at_the_end_is_for_the_operator_to_accept(home: Path) -> None:
    starts = sent_undispatched(home)
    (path,) = (home / "log").glob("*.log")
    os.truncate(path, 4096 + starts[2])
    (home / "state.duckdb").write_bytes(b"no database")

    assert "accept_loss" in refusal(home).remedy


def test_an_interrupted_repair_is_done_again(home: Path) -> None:
    with open_broker(home) as broker:
        broker.create_topic("plain", queues=1)
        broker.send("plain", messages(5))
    copy = (home / "state.duckdb").read_bytes()
    paths = small_logs_after(home)
    (home / "state.duckdb").write_bytes(copy)
    with paths[1].open("r+b") as file:
        file.seek(4096 + 300)
        file.write(b"damaged!")
    with locked(home) as where:
        found = plan(where)
    assert found.cut is not None
    # A crash after the last file was moved, and the mark not yet lowered.
    (home / "damaged").mkdir()
    paths[-1].rename(home / "damaged" / paths[-1].name)

    mend(home)

    assert sorted((home / "log").glob("*.log")) == paths[:1]
    with open_broker(home) as broker:
        assert broker.engine.log.end >= found.cut[0]
        kept = read(broker)
        broker.send("plain", messages(1))
        assert read(broker) == kept + 1


def small_logs_after(home: Path) -> list[Path]:
    """Fill more log files of a home."""
    with open_broker(home) as broker:
        for number in range(6):
            broker.send("plain", messages(10, start=10 * number, body_bytes=50_000))
    return sorted((home / "log").glob("*.log"))


def test_only_damaged_content_of_a_database_is_damage(home: Path) -> None:
    sent_undispatched(home)
    path = home / "state.duckdb"
    path.unlink()
    duckdb.connect(path).close()
    assert "may be sound" in refusal(home).message
    path.unlink()
    path.mkdir()
    assert "may be sound" in refusal(home).message
    path.rmdir()

    mend(home)

    with open_broker(home) as broker:
        assert read(broker) == 26


def test_a_folder_of_damage_elsewhere_is_refused(home: Path, tmp_path: Path) -> None:
    starts = sent_undispatched(home)
    flip(home, starts[1])
    (tmp_path / "elsewhere").mkdir()
    (home / "damaged").symlink_to(tmp_path / "elsewhere")
    before = files_of(home)

    with locked(home) as where, pytest.raises(UnrepairableError, match="is not a folder"):
        repair(plan(where))

    assert files_of(home) == before


def test_an_incomplete_restore_is_named(home: Path) -> None:
    sent_undispatched(home)
    (home / "format").write_text("restoring\n")

    with pytest.raises(RequestError, match="incomplete") as caught, locked(home):
        pass

    assert "restore it again" in caught.value.remedy


def test_the_first_frame_of_a_log_is_damaged(home: Path) -> None:
    with open_broker(home) as broker:
        broker.create_topic("plain", queues=1)
        broker.send("plain", messages(5))
    (path,) = (home / "log").glob("*.log")
    (home / "state.duckdb").unlink()
    flip(home, 0)

    mend(home)

    assert path.exists()
    with open_broker(home) as broker:
        broker.create_topic("plain", queues=1)
        broker.send("plain", messages(2))
        assert read(broker) == 2


def test_a_damaged_last_frame_that_was_answered_is_cut(home: Path) -> None:
    starts = sent_undispatched(home)
    with open_broker(home):
        pass
    copy = (home / "state.duckdb").read_bytes()
    with open_broker(home) as broker:
        last = broker.engine.log.end
        broker.send("plain", messages(7, body_bytes=300))
    (home / "state.duckdb").write_bytes(copy)
    assert last > starts[-1]
    flip(home, last)
    with pytest.raises(CorruptLogError):
        open_broker(home)

    mend(home)

    with open_broker(home) as broker:
        assert read(broker) == 26
