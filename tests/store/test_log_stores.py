"""The contract of a log store, on real servers: PostgreSQL, an object store and NATS."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rmq_pipeline.errors import LogFencedError, LogHeldError, LogStoreError
from rmq_pipeline.store.log.catching_up import DivergedLogError, missing
from rmq_pipeline.store.log.frame import crc32
from rmq_pipeline.store.log.log_store import Layout, LogStore, Stored
from tests.broken_wire import BrokenWire
from tests.log_stores import ENGINES, LogStores

pytestmark = pytest.mark.parametrize("log_stores", ENGINES, indirect=True)
LEASE_S = 0.3
Open = Callable[..., LogStore]


@pytest.fixture
def address(log_stores: LogStores) -> str:
    return log_stores.new()


@pytest.fixture
def open_store(log_stores: LogStores, address: str) -> Iterator[Open]:
    opened: list[LogStore] = []

    def open_it(at: str = address, *, claim: bool = True) -> LogStore:
        opened.append(log_stores.store(at, timeout_s=10.0, lease_s=LEASE_S, home_format=1))
        opened[-1].look()
        if claim:
            opened[-1].claim(seconds=5.0)
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


def test_frames_come_back_in_order(open_store: Open) -> None:
    store = open_store()
    frames = {0: b"a" * 64, 64: b"b" * 128, 192: b"c" * 64}

    for position, frame in frames.items():
        store.append(position, frame)

    assert {found.position: frame for found, frame in store.frames(0)} == frames
    assert [found.position for found in store.headers(64)] == [64, 192]
    assert [found.position for found, _ in store.frames(100)] == [192]
    last = store.last()
    assert last is not None
    assert last.end == 256


def test_an_empty_store_has_no_frames(open_store: Open) -> None:
    store = open_store()

    assert store.last() is None
    assert list(store.frames(0)) == []
    assert store.epoch == 1


def test_frames_larger_than_a_read_come_back(open_store: Open) -> None:
    store, large = open_store(), bytes(33 << 20)
    store.append(0, large)
    store.append(len(large), large)

    assert [len(frame) for _, frame in store.frames(0)] == [len(large)] * 2


def test_an_older_leader_appends_nothing(open_store: Open) -> None:
    first = open_store()
    first.append(0, b"a" * 64)
    second = open_store()  # the lease of the first one ends meanwhile

    with pytest.raises(LogFencedError):
        first.append(64, b"b" * 64)
    second.append(64, b"c" * 64)

    assert [frame for _, frame in second.frames(64)] == [b"c" * 64]
    assert not first.renew()
    with pytest.raises(LogFencedError):
        first.reclaim()
    with pytest.raises(LogFencedError):
        first.put_file("access.json", b"{}")


def test_an_append_is_repeated_without_doubling(open_store: Open) -> None:
    store = open_store()
    store.append(0, b"a" * 64)

    store.append(0, b"a" * 64)
    store.settle(0, b"a" * 64)
    store.settle(64, b"b" * 64)

    assert list(store.headers(0)) == [
        Stored(0, 64, crc32(b"a" * 64)),
        Stored(64, 64, crc32(b"b" * 64)),
    ]


def test_a_lost_answer_is_settled_by_position(
    open_store: Open, log_stores: LogStores, address: str
) -> None:
    with BrokenWire(log_stores.server) as wire:
        store = open_store(address.replace(log_stores.server, wire.address))
        store.append(0, b"a" * 64)

        wire.lose_next_answer()
        with contextlib.suppress(LogStoreError):  # the object store's client asks again itself
            store.append(64, b"b" * 64)
        store.settle(64, b"b" * 64)

        assert [found.position for found in store.headers(0)] == [0, 64]
        assert wire.lost == 1


def test_the_lease_keeps_others_out_while_it_is_renewed(open_store: Open) -> None:
    leader, over = open_store(), threading.Event()

    def live() -> None:
        while not over.wait(LEASE_S / 4):
            leader.renew()

    renewing = threading.Thread(target=live)
    renewing.start()
    try:
        with pytest.raises(LogHeldError, match="is led by"):
            open_store()
    finally:
        over.set()
        renewing.join()
    leader.append(0, b"a" * 64)  # the other one has changed nothing


def test_a_closed_leader_leaves_at_once(open_store: Open) -> None:
    first = open_store()
    first.append(0, b"a" * 64)
    first.close()

    second = open_store()

    assert (second.id, second.seed, second.epoch) == (first.id, first.seed, first.epoch + 1)


def test_files_are_handed_on(open_store: Open) -> None:
    first = open_store()
    assert first.file("access.json") is None
    first.put_file("access.json", b"{1}")
    first.put_file("access.json", b"{2}")
    first.close()

    assert open_store().file("access.json") == b"{2}"


def test_a_file_is_handed_on_while_a_new_epoch_is_taken(open_store: Open) -> None:
    store, over = open_store(), threading.Event()

    def put() -> None:
        number = 0
        while not over.is_set():
            number += 1
            store.put_file("access.json", b"%d" % number)

    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(put)
        for _ in range(20):
            store.reclaim()
        over.set()
        putting.result()

    assert store.file("access.json")


def test_trim_deletes_whole_frames(open_store: Open) -> None:
    store = open_store()
    for position in (0, 64, 128):
        store.append(position, b"a" * 64)

    store.trim(130)

    assert [found.position for found in store.headers(0)] == [128]


def test_a_reader_that_was_away_while_frames_were_deleted_is_told(open_store: Open) -> None:
    leader, standby = open_store(), open_store(claim=False)
    leader.put_layout(Layout(0, 1, b"a" * 32))
    leader.append(0, b"a" * 64)
    assert len(list(missing(standby, 0))) == 1
    for number in range(1, 10):
        leader.append(64 * number, b"a" * 64)
    leader.trim(64 * 8)
    leader.renew()

    standby.lease()
    with pytest.raises(DivergedLogError, match="away for too long"):
        list(missing(standby, 64))
    standby.look()
    with pytest.raises(DivergedLogError, match="away for too long"):
        list(missing(standby, 64))
    assert [found.position for found in standby.headers(0)] == [512, 576]
    assert [found.position for found, _ in standby.frames(64)] == [512, 576]


def test_a_reader_goes_on_while_frames_are_deleted(open_store: Open) -> None:
    leader, reader = open_store(), open_store(claim=False)
    for number in range(30):
        leader.append(64 * number, b"a" * 64)

    headers, frames = reader.headers(0), reader.frames(0)
    found = [next(headers).position, next(frames)[0].position]
    leader.trim(64 * 25)

    assert found == [0, 0]
    assert {each.position for each in headers} >= {64 * number for number in range(25, 30)}
    assert {each.position for each, _ in frames} >= {64 * number for number in range(25, 30)}


def test_a_damaged_frame_is_not_delivered(
    open_store: Open, log_stores: LogStores, address: str
) -> None:
    store = open_store()
    store.append(0, b"a" * 64)
    log_stores.damage(address)

    with pytest.raises(LogStoreError, match="damaged"):
        list(store.frames(0))


def test_two_that_make_the_log_at_once_make_one_log(open_store: Open) -> None:
    found: list[LogStore] = []
    makers = [
        threading.Thread(target=lambda: found.append(open_store(claim=False))) for _ in range(4)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()

    assert len({store.id for store in found}) == 1
    assert len(found) == len(makers)


def test_layouts_hold_from_their_start_on(open_store: Open) -> None:
    first, later = Layout(0, 1, b"a" * 32), Layout(64, 1, b"b" * 32)
    store = open_store()
    assert store.layouts() == []
    store.put_layout(first)
    store.append(0, b"a" * 64)
    store.put_layout(Layout(64, 1, b"of a leader that died"))
    store.put_layout(later)
    store.append(64, b"b" * 64)

    assert store.layouts() == [first, later]
    assert open_store().layouts() == [first, later]


def test_one_of_several_that_claim_at_once_leads(open_store: Open) -> None:
    stores = [open_store(claim=False) for _ in range(4)]
    barrier = threading.Barrier(len(stores))

    def claim(store: LogStore) -> bool:
        barrier.wait()
        try:
            store.claim(seconds=None)
            store.append(0, b"a" * 64)
        except (LogHeldError, LogFencedError):
            return False
        return True

    with ThreadPoolExecutor(len(stores)) as pool:
        leaders = list(pool.map(claim, stores))

    assert leaders.count(True) == 1
    assert [found.position for found in stores[leaders.index(True)].headers(0)] == [0]


def test_a_forced_claim_ends_a_leader_that_writes(open_store: Open) -> None:
    first = open_store()
    appended: list[int] = []

    def write() -> None:
        with contextlib.suppress(LogFencedError):
            while True:
                first.append(64 * len(appended), b"a" * 64)
                appended.append(64 * len(appended))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        second = open_store(claim=False)
        second.claim(seconds=None, force=True)
        writing.result(60)

    assert [found.position for found in second.headers(0)] == appended
    second.append(64 * len(appended), b"b" * 64)


def test_a_reader_follows_a_leader(open_store: Open) -> None:
    leader, reader = open_store(), open_store(claim=False)
    positions = [64 * number for number in range(30)]
    for position in positions[:20]:
        leader.append(position, b"a" * 64)
    assert [found.position for found, _ in reader.frames(0)] == positions[:20]
    assert list(reader.frames(20 * 64)) == []
    leader.reclaim()
    for position in positions[20:]:
        leader.append(position, b"a" * 64)

    assert [found.position for found, _ in reader.frames(20 * 64)] == positions[20:]
    last = reader.last()
    assert last is not None
    assert last.position == positions[-1]
