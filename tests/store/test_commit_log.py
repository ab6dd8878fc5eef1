"""What is committed is there, at the place that was told, whatever happens to the process."""

import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.errors import StorageError
from rmq_pipeline.store.log.commit_log import CommitLog
from tests.store.log_batches import (
    EVENTS,
    MESSAGES,
    SCHEMAS,
    STATE,
    OpenLog,
    bodies,
    events,
    messages,
    random_body,
    sections,
    write,
)

STEPS = ["staged", "before_write", "half_written", "written", "before_roll", "rolled"]


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.log"))


def test_sections_come_back_as_they_were_staged(open_log: OpenLog) -> None:
    log = open_log()
    state = pa.record_batch({"message_group": ["N1"], "leg": pa.array([3], pa.int32())})
    state = state.replace_schema_metadata({b"group_id": b"7", b"topic_id": b"9"})

    at = [log.stage(MESSAGES, messages(b"a", b"bc")), log.stage(EVENTS, events(32))]
    at.append(log.stage(STATE, state))
    end = log.commit()

    log.close()
    log = open_log()
    assert log.end == end == log.synced
    assert [log.read(position).kind for position in at] == [MESSAGES, EVENTS, STATE]
    assert [log.read(position).position for position in at] == at
    assert log.read(at[0]).batch.equals(messages(b"a", b"bc"))
    assert log.read(at[1]).batch.equals(events(32))
    assert log.read(at[2]).batch.equals(state, check_metadata=True)
    [(frame_end, found)] = log.frames(0, log.end)
    assert frame_end == end
    assert [section.position for section in found] == at


def test_positions_are_dense_over_frames_and_files(open_log: OpenLog, tmp_path: Path) -> None:
    log = open_log()

    sent = [random_body(9000, seed=i) for i in range(40)]
    ends = [0]
    for body in sent:
        (position,) = write(log, messages(body))
        assert position == ends[-1] + 64
        ends.append(log.end)

    names = files_of(tmp_path / "log")
    assert len(names) > 4
    assert {int(name[:20]) for name in names} <= set(ends)
    assert [end for end, _ in log.frames(0, log.end)] == ends[1:]
    assert bodies(log) == sent
    assert bodies(log, ends[17]) == sent[17:]
    log.close()
    assert bodies(open_log()) == sent


def test_an_empty_commit_does_nothing(open_log: OpenLog) -> None:
    log = open_log()

    assert log.commit() == 0

    log.stage(EVENTS, events(1))
    assert log.staged_bytes() > 0
    log.discard()
    assert (log.staged_bytes(), log.commit()) == (0, 0)
    assert list(log.frames(0, log.end)) == []


def test_empty_batches_and_slices_are_kept(open_log: OpenLog) -> None:
    log = open_log()

    write(log, messages(b"a", b"b", b"c").slice(1, 1), events(0))

    first, second = sections(log)
    assert first.batch["body"].to_pylist() == [b"b"]
    assert second.batch.num_rows == 0


def test_a_read_copies_nothing(open_log: OpenLog) -> None:
    log = open_log(file_bytes=4 << 20)
    (position,) = write(log, messages(random_body(1 << 20)))

    before = pa.total_allocated_bytes()
    section = log.read(position)

    assert section.batch["body"][0].as_py() == random_body(1 << 20)
    assert pa.total_allocated_bytes() == before
    queue_offset = section.batch["queue_offset"].to_numpy(zero_copy_only=True)
    assert queue_offset.flags.aligned
    assert log.read(position) is section


def test_a_frame_larger_than_a_file_gets_its_own(open_log: OpenLog, tmp_path: Path) -> None:
    log = open_log()

    sent = [random_body(300_000, seed=1), random_body(5000), random_body(200_000, seed=2)]
    for body in sent:
        write(log, messages(body))

    log.close()
    log = open_log()
    assert bodies(log) == sent
    assert len(files_of(tmp_path / "log")) == 3


def test_many_small_sections_make_one_frame(open_log: OpenLog) -> None:
    log = open_log(file_bytes=4 << 20)

    positions = write(log, *[events(1)] * 2000)

    log.close()
    log = open_log(file_bytes=4 << 20)
    [(_, found)] = log.frames(0, log.end)
    assert [section.position for section in found] == positions


def test_a_batch_of_another_schema_is_refused(open_log: OpenLog) -> None:
    log = open_log()

    with pytest.raises(ValueError, match="another schema"):
        log.stage(MESSAGES, events(1))

    assert log.staged_bytes() == 0


def test_only_what_is_in_the_log_is_read(open_log: OpenLog) -> None:
    log = open_log()
    write(log, events(1))
    staged = log.stage(EVENTS, events(1))

    for position in (staged, log.end, -1):
        with pytest.raises(LookupError):
            log.read(position)


def test_whole_files_are_dropped_and_stay_readable_to_who_has_them(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log()
    positions = [write(log, messages(random_body(20_000, seed=i)))[0] for i in range(10)]
    bases = [int(name[:20]) for name in files_of(tmp_path / "log")]
    held = log.read(positions[0])

    assert log.drop_before(bases[2] - 1) == [tmp_path / "log" / f"{0:020d}.log"]
    log.drop_before(bases[2])

    assert log.first == bases[2]
    assert files_of(tmp_path / "log") == [f"{base:020d}.log" for base in bases[2:]]
    assert held.batch["body"].to_pylist() == [random_body(20_000)]
    for read in (lambda: log.read(positions[0]), lambda: next(log.frames(0, log.end))):
        with pytest.raises(LookupError):
            read()
    assert len(log.drop_before(log.end)) == len(bases) - 3
    end, kept = log.end, bodies(log, log.first)
    log.close()
    log = open_log(dispatched_position=end)
    assert (log.first, log.end, bodies(log, log.first)) == (bases[-1], end, kept)


def test_async_commits_are_synced_by_the_caller_and_at_a_roll(open_log: OpenLog) -> None:
    log = open_log(flush="async")

    write(log, messages(b"a"))
    first_end = log.end
    assert log.synced == 0
    log.sync()
    assert log.synced == first_end

    write(log, messages(b"b"))
    before_roll = log.end
    write(log, messages(random_body(60_000)))
    assert log.synced == before_roll < log.end
    log.close()
    assert len(bodies(open_log(flush="async"))) == 3


def test_readers_see_whole_frames_while_the_writer_goes_on(open_log: OpenLog) -> None:
    log = open_log(file_bytes=1 << 20)
    frames = 1000
    written = threading.Condition()

    def follow(every: int) -> int:
        position, seen = 0, 0
        while seen < frames:
            with written:
                while log.end == position:
                    assert written.wait(30)
            for end, (section, _) in log.frames(position, log.end):
                assert section.batch["body"].to_pylist() == [b"%d" % seen] * 3
                if seen % every == 0:
                    assert log.read(section.position).batch.equals(section.batch)
                position, seen = end, seen + 1
        return seen

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(follow, every) for every in (1, 7)]
        for i in range(frames):
            write(log, messages(*[b"%d" % i] * 3), events(2))
            with written:
                written.notify_all()

    assert [reader.result() for reader in readers] == [frames, frames]


def test_files_are_dropped_while_readers_follow(open_log: OpenLog) -> None:
    log = open_log()
    with ThreadPoolExecutor(1) as pool:
        held = [log.read(write(log, messages(random_body(5000, seed=i)))[0]) for i in range(50)]
        dropping = pool.submit(lambda: [log.drop_before(section.position) for section in held])
        for i in range(50, 100):
            write(log, messages(random_body(5000, seed=i)))
        dropping.result()

    for i, section in enumerate(held):
        assert section.batch["body"].to_pylist() == [random_body(5000, seed=i)]
    assert log.first > 0
    assert bodies(log, log.first)[-1] == random_body(5000, seed=99)


def test_a_closed_log_refuses_everything(open_log: OpenLog) -> None:
    log = open_log()
    (position,) = write(log, events(1))
    section = log.read(position)

    log.close()
    log.close()

    assert section.batch.equals(events(1))
    for call in (
        log.sync,
        log.commit,
        log.refill_reserve,
        lambda: log.stage(EVENTS, events(1)),
        lambda: log.read(position),
        lambda: log.drop_before(0),
        lambda: next(log.frames(0, 64)),
    ):
        with pytest.raises(StorageError, match="closed"):
            call()


CHILD = """
import os, signal, sys
from pathlib import Path
from rmq_pipeline.store.log.commit_log import CommitLog
from tests.store.log_batches import SCHEMAS, messages, random_body, write

folder, step, flush = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
answered = os.open(folder.parent / "answered", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
sent, armed = 0, False

def fault(name):
    if armed and name == step:
        os.kill(os.getpid(), signal.SIGKILL)

log = CommitLog.open(
    folder, schemas=SCHEMAS, file_bytes=64 << 10, reserve_bytes=1 << 20, flush=flush, fault=fault
)
while sent < 100:
    armed = sent >= 20
    write(log, messages(random_body(9000, seed=sent)))
    os.write(answered, b"x")
    sent += 1
"""


@pytest.mark.chaos
@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("step", STEPS)
def test_nothing_answered_is_lost_when_the_process_is_killed(
    step: str, flush: str, open_log: OpenLog, tmp_path: Path
) -> None:
    folder = tmp_path / "log"

    child = subprocess.run([sys.executable, "-c", CHILD, folder, step, flush], check=False)

    assert child.returncode == -9
    answered = len((tmp_path / "answered").read_bytes())
    assert answered >= 20
    log = open_log()
    found = bodies(log)
    written_unanswered = 1 if step == "written" else 0
    assert found == [random_body(9000, seed=i) for i in range(answered + written_unanswered)]
    assert not list(folder.glob("*.new"))
    write(log, messages(b"next"))
    log.close()
    assert bodies(open_log()) == [*found, b"next"]


LIMITED_CHILD = """
import resource, signal, sys
from pathlib import Path
from rmq_pipeline.errors import StorageError
from rmq_pipeline.store.log.commit_log import CommitLog
from tests.store.log_batches import SCHEMAS, messages, random_body, write

log = CommitLog.open(Path(sys.argv[1]), schemas=SCHEMAS, file_bytes=1 << 20, reserve_bytes=0)
write(log, messages(b"answered"))
limit = 4096 + log.end + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for attempt in range(2):
    try:
        write(log, messages(random_body(40_000)))
    except StorageError as error:
        print(error.message)
"""


@pytest.mark.chaos
@pytest.mark.parametrize(("room", "said"), [(10_000, "10000 of "), (0, "File too large")])
def test_a_failed_or_short_write_breaks_the_log_and_leaves_nothing(
    room: int, said: str, open_log: OpenLog, tmp_path: Path
) -> None:
    folder = tmp_path / "log"

    # A limit on the size of files makes the kernel take a part of the write, or nothing.
    command = [sys.executable, "-c", LIMITED_CHILD, str(folder), str(room)]
    child = subprocess.run(command, check=True, capture_output=True, text=True)

    first, second = child.stdout.splitlines()
    assert "failed" in first
    assert said in first
    assert second == first
    log = open_log()
    assert bodies(log) == [b"answered"]
    assert not any((folder / f"{0:020d}.log").read_bytes()[4096 + log.end :])


@pytest.mark.alone
def test_reading_the_whole_log_does_not_fill_memory(tmp_path: Path) -> None:
    body = random_body(1 << 20)
    folder = tmp_path / "log"
    log = CommitLog.open(folder, schemas=SCHEMAS, file_bytes=64 << 20, reserve_bytes=0)
    for _ in range(300):
        write(log, messages(body))
    before = resident_bytes()

    for _, found in log.frames(0, log.end):
        for section in found:
            log.read(section.position)

    assert resident_bytes() - before < 200 << 20
    log.close()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * resource.getpagesize()


def test_descriptors_and_mappings_go_with_the_log(tmp_path: Path) -> None:
    def open_and_close(dispatched: int) -> int:
        log = CommitLog.open(
            tmp_path,
            schemas=SCHEMAS,
            file_bytes=64 << 10,
            reserve_bytes=0,
            dispatched_position=dispatched,
        )
        write(log, messages(random_body(60_000)))
        log.drop_before(log.end - 300_000)
        assert bodies(log, log.first)
        log.close()
        return log.end

    dispatched = 0
    for _ in range(12):
        dispatched = open_and_close(dispatched)
        assert held_open(tmp_path) == []


def held_open(folder: Path) -> list[str]:
    """Files below a folder that this process has a descriptor or a mapping of."""
    held = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    held += [str(descriptor.resolve()) for descriptor in Path("/proc/self/fd").iterdir()]
    return [path for path in held if path.startswith(f"{folder}/")]
