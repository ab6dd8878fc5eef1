"""A commit log in an object store: late puts, lost answers, deletions, and bad input."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import obstore
import pytest

from rmq_pipeline.errors import (
    HomeFormatError,
    LogFencedError,
    LogHeldError,
    LogStoreError,
)
from rmq_pipeline.storage.bucket import Bucket, BucketError
from rmq_pipeline.store.log.engines.chain_entry import Kind
from rmq_pipeline.store.log.engines.object_store_log import BucketSlots, ObjectStoreLog
from tests.log_stores import BucketLogs
from tests.object_store import ObjectStore

LEASE_S = 0.3
FRAME = b"a" * 64
Open = Callable[..., ObjectStoreLog]


@pytest.fixture
def logs(object_store: ObjectStore) -> BucketLogs:
    return BucketLogs(object_store)


@pytest.fixture
def address(logs: BucketLogs) -> str:
    return logs.new()


@pytest.fixture
def open_store(address: str) -> Iterator[Open]:
    opened: list[ObjectStoreLog] = []

    def open_it(
        at: str = address, *, claim: bool = True, force: bool = False, timeout_s: float = 10.0
    ) -> ObjectStoreLog:
        opened.append(ObjectStoreLog(at, timeout_s=timeout_s, lease_s=LEASE_S, home_format=1))
        opened[-1].look()
        if claim:
            opened[-1].claim(seconds=5.0, force=force)
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


def kinds(logs: BucketLogs, address: str) -> list[tuple[Kind, int]]:
    return [(each.kind, each.epoch) for each in logs.entries(address)]


# ------------------------------------------------------------------------------ late and lost puts


def test_puts_of_one_name_at_once_have_one_winner(object_store: ObjectStore) -> None:
    """The server of these tests keeps what the log needs."""
    bucket = Bucket(object_store.uri("at-once"), timeout_s=5.0)
    with ThreadPoolExecutor(4) as pool:
        for number in range(10):
            name = f"{number}"
            won = list(pool.map(lambda n, at=name: bucket.put_if_absent(at, b"%d" % n), range(4)))
            assert won.count(True) == 1
            assert bucket.read(name) == b"%d" % won.index(True)


# ------------------------------------------------------------------------------------- leadership


def test_a_lease_of_an_older_epoch_counts_for_nothing(
    open_store: Open, logs: BucketLogs, address: str, object_store: ObjectStore
) -> None:
    old = open_store()
    new = open_store(force=True)
    key = logs.key(address, "lease.json")
    old._put_lease(is_hurried=False, released=True)  # comes late, after that of the new leader

    third = open_store(claim=False)
    with pytest.raises(LogHeldError):
        third.claim(seconds=None)

    new.append(0, FRAME)
    assert json.loads(bytes(obstore.get(object_store.bucket(), key).bytes()))["epoch"] == 1


def test_a_lease_that_is_no_lease_costs_time_only(
    open_store: Open, logs: BucketLogs, address: str, object_store: ObjectStore
) -> None:
    open_store()
    obstore.put(object_store.bucket(), logs.key(address, "lease.json"), b"\x00 no JSON")

    second = open_store()

    second.append(0, FRAME)
    assert second.last() is not None


# --------------------------------------------------------------------------------------- reading


def test_long_frames_are_not_read_ahead(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of 256 MiB at once would need more memory and time than a standby has."""
    leader, reader = open_store(), open_store(claim=False)
    frames = [bytes([number]) * 64 for number in range(7)]
    frames += [bytes([number]) * (3 << 20) for number in range(7, 12)]
    position = 0
    for frame in frames:
        leader.append(position, frame)
        position += len(frame)
    lengths, read = [], Bucket.read

    def note(bucket: Bucket, name: str, **part: int | None) -> bytes | None:
        lengths.append((name, part["length"]))
        return read(bucket, name, **part)  # type: ignore[arg-type]

    found = reader.frames(0)
    some = [next(found)[1] for _ in range(7)]
    monkeypatch.setattr(Bucket, "read", note)
    some.append(next(found)[1])
    long = {name for name, length in lengths if length is not None and length > 1 << 20}

    assert long == {f"entries/{8:020}"}
    assert [*some, *(frame for _, frame in found)] == frames


# ---------------------------------------------------------------------------------------- deletion


def test_claims_and_layouts_outlive_the_frames(
    open_store: Open, logs: BucketLogs, address: str
) -> None:
    old = open_store()
    for position in (0, 64):
        old.append(position, FRAME)
    new = open_store(force=True)
    for position in (128, 192, 256):
        new.append(position, FRAME)
    new.trim(256)

    # The old leader's number has a claim permanently.
    with pytest.raises(LogFencedError):
        old.append(128, FRAME)
    assert [found.position for found in new.headers(0)] == [256]
    assert [each.position for each, _ in open_store(force=True).frames(0)] == [256]
    claims = [number for number, (kind, _) in enumerate(kinds(logs, address))]
    assert len(claims) == 4  # three claims and the last frame


@pytest.mark.parametrize("is_new_leader", [False, True])
def test_a_deletion_that_ended_halfway_is_finished_by_the_next_one(
    open_store: Open,
    logs: BucketLogs,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_new_leader: bool,
) -> None:
    """Messages that have expired must not stay in the bucket."""
    leader = open_store()
    for number in range(6):
        leader.append(64 * number, FRAME)

    def fail(*_: object) -> None:
        raise BucketError("The bucket does not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "delete", fail)
        with pytest.raises(LogStoreError):
            leader.trim(64 * 5)
    assert len(logs.frames(address)) == 6

    (open_store(force=True) if is_new_leader else leader).trim(64 * 5)
    assert [position for position, _, _ in logs.frames(address)] == [320]


def test_the_newest_of_many_marks_is_found_by_few_requests(
    open_store: Open, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark is put for every 8 MiB that are deleted, and marks stay."""
    leader, asked = open_store(), []
    for number in range(40):
        leader.append(64 * number, FRAME)
        leader.trim(64 * number)
    ask = Bucket.exists

    def count(bucket: Bucket, name: str) -> bool:
        asked.append(name)
        return ask(bucket, name)

    monkeypatch.setattr(Bucket, "exists", count)
    slots = BucketSlots(address, timeout_s=2.0)  # as in a process that has just started

    assert slots.first() == leader._slots.first() == 40
    assert len([name for name in asked if name.startswith("first/")]) < 15


def test_a_claim_of_the_next_name_leaves_no_name_free_before_it(
    open_store: Open, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = open_store()
    leader.append(0, FRAME)
    slots = BucketSlots(address, timeout_s=10.0)
    end = slots.last(None)
    assert end is not None
    refused, put = [end + 1], slots.put

    def refusing(number: int, data: bytes, *, stays: bool) -> bool:
        """Refuse one put to a free name, as S3 may do if two come at once."""
        if number in refused:
            refused.remove(number)
            return False
        return put(number, data, stays=stays)

    monkeypatch.setattr(slots, "put", refusing)

    assert slots.put_next(b"claim", after=end) == end + 1
    assert [slots.read(end + n, length=5) for n in (1, 2, 3)] == [b"claim", b"claim", None]


def test_a_mark_that_is_none_is_told(
    open_store: Open, logs: BucketLogs, address: str, object_store: ObjectStore
) -> None:
    open_store().close()
    key = logs.key(address, f"first/{1:010}")
    obstore.put(object_store.bucket(), key, b"not a number")

    with pytest.raises(LogStoreError, match=r"first/0000000001 .* is none of a commit log"):
        open_store(claim=False)


def test_a_claim_at_the_number_of_a_deleted_frame_leads_nothing(open_store: Open) -> None:
    leader = open_store()
    sleeper = open_store(claim=False)
    for number in range(10):
        leader.append(64 * number, FRAME)
    # It knows only the first claim, and its put comes after the deletion.
    tip = sleeper._chain.at(0)
    leader.trim(64 * 8)
    find_tip = sleeper._chain.find_tip
    sleeper._chain.find_tip = lambda: tip  # type: ignore[method-assign]
    sleeper._chain.tip = tip

    assert not sleeper._chain.claim(b"{}", after=1, force=True)
    sleeper._chain.find_tip = find_tip  # type: ignore[method-assign]

    leader.append(640, FRAME)
    last = sleeper.last()
    assert last is not None
    assert last.position == 640


def test_a_lost_frame_is_told(
    open_store: Open, logs: BucketLogs, address: str, object_store: ObjectStore
) -> None:
    leader = open_store()
    for number in range(3):
        leader.append(64 * number, FRAME)
    obstore.delete(object_store.bucket(), logs.key(address, f"entries/{2:020}"))

    for read in (leader.frames, leader.headers):
        with pytest.raises(LogStoreError, match=r"entries/0+2 .* is lost"):
            list(read(0))


# --------------------------------------------------------------------------------------- bad input


def test_wrong_credentials_are_told(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")

    with pytest.raises(LogStoreError, match=r"refuses the credentials.*AWS_ACCESS_KEY_ID"):
        open_store()


def test_a_missing_bucket_is_told(open_store: Open, address: str) -> None:
    with pytest.raises(LogStoreError, match=r"bucket of .* does not exist"):
        open_store(address.replace("s3://lake", "s3://absent"))


def test_a_prefix_with_other_objects_is_refused(
    open_store: Open, logs: BucketLogs, address: str, object_store: ObjectStore
) -> None:
    obstore.put(object_store.bucket(), logs.key(address, "part-0.parquet"), b"PAR1")

    with pytest.raises(LogStoreError, match=r"other objects: part-0\.parquet"):
        open_store()


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"\xff",
        b'{"format": 1, "id": "no hex", "seed": 1}',
        b'{"format": 1, "id": "00", "seed": 1}',
        b'{"format": "x", "id": "00", "seed": 1}',
        b"[" * 100_000,
    ],
)
def test_an_object_with_the_name_of_a_log_is_told(
    open_store: Open, logs: BucketLogs, address: str, object_store: ObjectStore, content: bytes
) -> None:
    obstore.put(object_store.bucket(), logs.key(address, "log.json"), content)

    with pytest.raises(LogStoreError, match=r"log\.json in .* is none of a commit log"):
        open_store()


def test_the_object_of_a_folder_is_no_other_object(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amazon's console makes one for "Create folder"; its name below the prefix is empty."""
    monkeypatch.setattr(Bucket, "some", lambda _, most: [""][:most])

    assert open_store().last() is None


def test_a_log_of_a_newer_format_is_refused(
    open_store: Open, logs: BucketLogs, address: str, object_store: ObjectStore
) -> None:
    open_store().close()
    said = {"format": 99, "id": "00" * 16, "seed": 1}
    key = logs.key(address, "log.json")
    obstore.put(object_store.bucket(), key, json.dumps(said).encode())

    with pytest.raises(HomeFormatError, match="format 99"):
        open_store()


def test_an_entry_of_another_log_is_refused(
    open_store: Open, logs: BucketLogs, address: str, object_store: ObjectStore
) -> None:
    open_store().close()
    other = logs.new()
    open_store(other).append(0, FRAME)
    bucket, name = object_store.bucket(), f"entries/{1:020}"
    foreign = bytes(obstore.get(bucket, logs.key(other, name)).bytes())
    obstore.put(bucket, logs.key(address, name), foreign)

    with pytest.raises(LogStoreError, match="belongs to another log"):
        open_store(claim=False)
