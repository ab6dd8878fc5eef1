"""Batches and logs for the tests of the commit log."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from rmq_pipeline.store.log import recovery
from rmq_pipeline.store.log.commit_log import CommitLog, Section

MESSAGES, EVENTS, STATE = 1, 2, 3

MESSAGE_SCHEMA = pa.schema(
    [
        ("queue_offset", pa.int64()),
        ("message_id", pa.string()),
        ("keys", pa.list_(pa.string())),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("body", pa.binary()),
        ("deliver_at_ms", pa.int64()),
    ]
)
EVENT_SCHEMA = pa.schema([("kind", pa.int16()), ("at_ms", pa.int64()), ("detail", pa.string())])
SCHEMAS = {MESSAGES: MESSAGE_SCHEMA, EVENTS: EVENT_SCHEMA}


def messages(*bodies: bytes) -> pa.RecordBatch:
    """A message for each body."""
    n = len(bodies)
    columns = [
        pa.array(range(n), pa.int64()),
        pa.array([f"id-{i}" for i in range(n)]),
        pa.array([[f"key-{i}"] for i in range(n)], pa.list_(pa.string())),
        pa.array([[("a", "b")]] * n, pa.map_(pa.string(), pa.string())),
        pa.array(bodies, pa.binary()),
        pa.array([None] * n, pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=MESSAGE_SCHEMA)


def events(n: int) -> pa.RecordBatch:
    """``n`` events."""
    columns = [
        pa.array([1] * n, pa.int16()),
        pa.array(range(n), pa.int64()),
        pa.array([None] * n, pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=EVENT_SCHEMA)


def random_body(size: int, *, seed: int = 0) -> bytes:
    """Bytes that do not compress and hold no zeros at their end."""
    return random.Random(seed).randbytes(size - 1) + b"\xff"


def write(log: CommitLog, *batches: pa.RecordBatch, use_reserve: bool = False) -> list[int]:
    """Commit batches of messages or events as one frame; the positions of their sections."""
    kinds = [MESSAGES if batch.schema.equals(MESSAGE_SCHEMA) else EVENTS for batch in batches]
    positions = [log.stage(kind, batch) for kind, batch in zip(kinds, batches, strict=True)]
    log.commit(use_reserve=use_reserve)
    return positions


def sections(log: CommitLog, start: int = 0) -> Iterator[Section]:
    """Every section from a position on."""
    for _, found in log.frames(start, log.end):
        yield from found


def bodies(log: CommitLog, start: int = 0) -> list[bytes]:
    """Every body from a position on, in log order."""
    batches = [found.batch for found in sections(log, start) if found.kind == MESSAGES]
    return [body for batch in batches for body in batch["body"].to_pylist()]


def flip(path: Path, byte: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ 0x10]))


OpenLog = Callable[..., CommitLog]


def overwrite(path: Path, start: int, data: bytes) -> None:
    """Write over bytes of a file."""
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def forget_mark(folder: Path) -> None:
    """Be as after a power cut: the mark was written before the last frames were."""
    (folder / recovery.MARK_FILE).unlink()


def forget_validation(folder: Path) -> None:
    """Be as a log that a version created which did not validate all that it wrote."""
    (folder / recovery.VALIDATED_FILE).unlink()
