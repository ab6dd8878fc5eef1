"""``rmq repair``: what a start refuses opens again, with all up to the damage."""

import json
from pathlib import Path

import pytest

from rmq_pipeline.backup.repairing import UnrepairableError, locked, plan, repair
from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import CorruptLogError, HomeLockedError, RocketMQError
from rmq_pipeline.flight.flags import Flags
from tests.broker.sealed_home import fill, messages, open_broker, seal_all, stored
from tests.cli.conftest import RMQ, process


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


def test_a_log_is_cut_before_a_damaged_frame(home: Path) -> None:
    starts = sent_undispatched(home)
    flip(home, starts[1])
    with pytest.raises(CorruptLogError, match="rmq repair HOME"):
        open_broker(home)
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}

    dry = process(RMQ, "repair", str(home), "--dry-run")
    unasked = process(RMQ, "repair", str(home))

    assert (dry.returncode, unasked.returncode) == (1, 1)
    assert f"cut at position {starts[1]}" in dry.stdout, dry.stderr
    assert before == {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}

    done = process(RMQ, "repair", str(home), "--yes", "--json")

    said = json.loads(done.stdout)
    assert said["cut_at"] == starts[1]
    assert said["lost_frames"] >= 1
    assert [row["from_offset"] for row in said["lost_messages"]] == [19]
    (aside,) = Path(said["aside"]).iterdir()
    assert aside.read_bytes() == before[home / "log" / aside.name]
    with open_broker(home) as broker:
        assert read(broker) == 12
        broker.send("plain", messages(1))
        assert read(broker) == 13
    assert process(RMQ, "repair", str(home)).returncode == 0


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
    settings = {"archive_root": str(tmp_path / "archive"), "log_file_bytes": 8 << 20}
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
