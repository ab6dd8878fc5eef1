"""A commit log whose entries are in one chain: late puts, lost answers and leaders that wake up."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rmq_pipeline.errors import (
    HomeFormatError,
    LogFencedError,
    LogHeldError,
    LogStoreError,
)
from rmq_pipeline.store.log.engines.chain_entry import Kind
from rmq_pipeline.store.log.engines.chained_log import ChainedLog
from rmq_pipeline.store.log.log_store import Layout
from tests.broken_wire import BrokenWire
from tests.log_stores import BucketLogs, StreamLogs
from tests.waiting import until

pytestmark = pytest.mark.parametrize("log_stores", ["s3", "nats"], indirect=True)
LEASE_S = 0.3
FRAME = b"a" * 64
Open = Callable[..., ChainedLog]
Logs = BucketLogs | StreamLogs


@pytest.fixture
def address(log_stores: Logs) -> str:
    return log_stores.new()


@pytest.fixture
def open_store(log_stores: Logs, address: str) -> Iterator[Open]:
    opened: list[ChainedLog] = []

    def open_it(
        at: str = address,
        *,
        claim: bool = True,
        force: bool = False,
        timeout_s: float = 10.0,
        home_format: int = 1,
    ) -> ChainedLog:
        opened.append(
            log_stores.store(at, timeout_s=timeout_s, lease_s=LEASE_S, home_format=home_format)
        )
        opened[-1].look()
        if claim:
            opened[-1].claim(seconds=5.0, force=force)
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


def kinds(logs: Logs, address: str) -> list[tuple[Kind, int]]:
    return [(each.kind, each.epoch) for each in logs.entries(address)]


def lose_answers(store: ChainedLog, patch: pytest.MonkeyPatch) -> None:
    """Let each put of a store be done, and tell it nothing."""
    put = store._slots.put

    def put_and_fail(number: int, data: bytes, *, stays: bool) -> bool:
        put(number, data, stays=stays)
        raise LogStoreError("The store does not answer.")

    patch.setattr(store._slots, "put", put_and_fail)


def test_a_put_that_comes_after_the_claim_stores_nothing(
    open_store: Open, log_stores: Logs, address: str
) -> None:
    with BrokenWire(log_stores.server) as wire:
        old = open_store(address.replace(log_stores.server, wire.address), timeout_s=0.5)
        old.append(0, FRAME)
        wire.hold_requests()
        with pytest.raises(LogStoreError):
            old.append(64, b"late" * 16)
        new = open_store(force=True)
        wire.release()
        until(lambda: not wire.held)
        with pytest.raises(LogFencedError):
            old.settle(64, b"late" * 16)

    new.append(64, b"b" * 64)
    assert [frame for _, frame in new.frames(0)] == [FRAME, b"b" * 64]
    claim, frame = (Kind.CLAIM, 1), (Kind.FRAME, 1)
    assert kinds(log_stores, address) == [claim, frame, (Kind.CLAIM, 2), (Kind.FRAME, 2)]


def test_a_put_that_comes_before_the_claim_is_in_the_log(
    open_store: Open, log_stores: Logs, address: str
) -> None:
    with BrokenWire(log_stores.server) as wire:
        old = open_store(address.replace(log_stores.server, wire.address), timeout_s=0.5)
        old.append(0, FRAME)
        wire.hold_requests()
        with pytest.raises(LogStoreError):
            old.append(64, b"late" * 16)
        wire.release()
        until(lambda: len(log_stores.entries(address)) == 3)
        new = open_store(force=True)
        old.settle(64, b"late" * 16)  # it is in the history of the new leader

        assert [frame for _, frame in new.frames(0)] == [FRAME, b"late" * 16]
        with pytest.raises(LogFencedError):
            old.append(128, FRAME)


def test_a_late_put_of_an_older_epoch_of_the_same_broker_stores_nothing(
    open_store: Open, log_stores: Logs, address: str
) -> None:
    with BrokenWire(log_stores.server) as wire:
        store = open_store(address.replace(log_stores.server, wire.address), timeout_s=0.5)
        wire.hold_requests()
        with pytest.raises(LogStoreError):
            store.append(0, b"late" * 16)
        wire.pass_new_requests()
        store.reclaim()  # its callers were refused, and the home has cut the frame
        assert store.last() is None
        wire.release()
        until(lambda: not wire.held)
        store.append(0, FRAME)

        assert [frame for _, frame in store.frames(0)] == [FRAME]
        assert kinds(log_stores, address) == [(Kind.CLAIM, 1), (Kind.CLAIM, 2), (Kind.FRAME, 2)]


def test_a_frame_that_was_given_up_before_its_put_began_is_not_stored(open_store: Open) -> None:
    """The local write fails at once, and the log is opened again before the thread has run."""
    store, runs = open_store(), threading.Event()
    store._appends.submit(runs.wait)
    store.begin(0, b"given up" * 8)
    given_up = store._under_way
    store.abandon()
    store.reclaim()
    runs.set()
    assert given_up is not None
    with pytest.raises(LogStoreError, match=r"epoch 1 .* is over"):
        given_up.result(60)
    store.append(0, FRAME)

    assert [frame for _, frame in store.frames(0)] == [FRAME]


def test_every_lost_answer_is_found_again(open_store: Open, log_stores: Logs, address: str) -> None:
    with BrokenWire(log_stores.server) as wire:
        store = open_store(address.replace(log_stores.server, wire.address))
        for number in range(20):
            wire.lose_next_answer()
            try:
                store.append(64 * number, FRAME)
            except LogStoreError:
                store.settle(64 * number, FRAME)
        assert wire.lost >= 20

        assert [found.position for found in store.headers(0)] == [64 * n for n in range(20)]


def test_a_file_and_a_frame_in_doubt_are_both_stored_once(
    open_store: Open, log_stores: Logs, address: str
) -> None:
    with BrokenWire(log_stores.server) as wire:
        store = open_store(address.replace(log_stores.server, wire.address), timeout_s=0.5)
        wire.hold_requests()
        with pytest.raises(LogStoreError):
            store.append(0, FRAME)
        wire.pass_new_requests()
        store.put_file("access.json", b"{1}")
        wire.release()
        until(lambda: not wire.held)
        store.settle(0, FRAME)

        assert store.file("access.json") == b"{1}"
        assert kinds(log_stores, address) == [(Kind.CLAIM, 1), (Kind.FILES, 1), (Kind.FRAME, 1)]


def test_a_file_in_doubt_is_not_taken_back_by_the_next_one(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    store.put_file("access.json", b"{1}")
    with monkeypatch.context() as patch:
        lose_answers(store, patch)
        with pytest.raises(LogStoreError):
            store.put_file("access.json", b"{2}")
    store.put_file("state.json", b"{3}")

    assert store.file("access.json") == b"{2}"
    assert store.file("state.json") == b"{3}"


def test_an_old_leader_that_reads_the_log_of_the_new_one_does_not_go_on_after_it(
    open_store: Open,
) -> None:
    """Only a standby may take another broker's entry for the last one."""
    old = open_store()
    old.append(0, FRAME)
    new = open_store(force=True)
    new.append(64, b"b" * 64)

    with pytest.raises(LogFencedError):
        old.last()
    with pytest.raises(LogFencedError):
        list(old.frames(0))
    with pytest.raises(LogFencedError):
        old.trim(128)
    with pytest.raises(LogFencedError):
        old.append(64, FRAME)

    assert not old.renew()
    assert [frame for _, frame in new.frames(0)] == [FRAME, b"b" * 64]


def test_a_claim_that_came_after_the_look_at_the_lease_is_respected(open_store: Open) -> None:
    """Of two standbys that see the same lease end, the slower one must not fence the faster."""
    open_store().close()
    faster, slower = open_store(claim=False), open_store(claim=False)
    look = slower._look_at_lease

    def look_slowly() -> tuple[dict[str, Any], bool]:
        found = look()
        faster.claim(seconds=None)
        return found

    slower._look_at_lease = look_slowly  # type: ignore[method-assign]
    with pytest.raises(LogHeldError):
        slower.claim(seconds=None)

    faster.append(0, FRAME)
    assert faster.renew()


def test_a_renewal_does_not_wait_for_log_timeout(
    open_store: Open, log_stores: Logs, address: str
) -> None:
    with BrokenWire(log_stores.server) as wire:
        leader = open_store(address.replace(log_stores.server, wire.address), timeout_s=60.0)
        wire.hold_requests()

        with pytest.raises(LogStoreError), ThreadPoolExecutor(1) as pool:
            pool.submit(leader.renew).result(20)
        wire.release()


def test_a_leader_whose_frame_in_doubt_was_deleted_by_another_one_is_fenced(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frame was stored and is deleted: its name is free again for a leader that wakes up."""
    old = open_store()
    old.append(0, FRAME)
    with monkeypatch.context() as patch:
        lose_answers(old, patch)
        with pytest.raises(LogStoreError):
            old.append(64, FRAME)
    assert old.renew()
    new = open_store(force=True)
    for number in range(2, 6):
        new.append(64 * number, FRAME)
    new.trim(64 * 5)

    assert not old.renew()
    with pytest.raises(LogFencedError):
        old.put_file("access.json", b"{}")
    with pytest.raises(LogFencedError):
        old.put_file("access.json", b"{}")
    with pytest.raises(LogFencedError):
        old.settle(64, FRAME)


def test_a_log_that_a_home_of_a_newer_format_led_is_refused(open_store: Open) -> None:
    open_store(home_format=2).close()

    with pytest.raises(HomeFormatError, match="a home of format 2"):
        open_store()


def test_layouts_and_files_outlive_the_frames(open_store: Open) -> None:
    store = open_store()
    store.put_layout(Layout(0, 1, b"a" * 32))
    store.put_file("access.json", b"{1}")
    for number in range(5):
        store.append(64 * number, FRAME)
    store.trim(64 * 4)
    store.append(64 * 5, FRAME)
    store.trim(64 * 5)

    new = open_store(force=True)
    assert new.layouts() == [Layout(0, 1, b"a" * 32)]
    assert new.file("access.json") == b"{1}"
    assert [found.position for found in new.headers(0)] == [64 * 5]
    new.append(64 * 6, FRAME)
    with pytest.raises(LogFencedError):
        store.append(64 * 6, b"b" * 64)
