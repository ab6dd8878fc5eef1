"""A commit log in a cluster of three NATS servers, of which one or all die or stand still."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from rmq_pipeline.errors import LogFencedError, LogStoreError
from rmq_pipeline.store.log.engines.jetstream_log import JetStreamLog
from tests.nats_server import NatsCluster
from tests.waiting import until

pytestmark = pytest.mark.slow
FRAME = 64
STREAM = "log"
Open = Callable[..., JetStreamLog]


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    cluster = NatsCluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.stop()


@pytest.fixture
def open_store(cluster: NatsCluster) -> Iterator[Open]:
    opened: list[JetStreamLog] = []

    def open_it(hosts: str = cluster.hosts, *, force: bool = False) -> JetStreamLog:
        address = f"nats://{hosts}/{STREAM}"
        opened.append(JetStreamLog(address, timeout_s=2.0, lease_s=1.0, home_format=1))
        opened[-1].look()
        if not opened[:-1] or force:
            opened[-1].claim(seconds=5.0, force=force)
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


def body(number: int) -> bytes:
    return b"%064d" % number


def write(store: JetStreamLog, numbers: range) -> None:
    """Append frames; one that is in doubt is settled, as the broker does."""
    for number in numbers:
        position, frame = number * FRAME, body(number)
        try:
            store.append(position, frame)
        except LogStoreError:
            until(partial(is_settled, store, position, frame))


def is_settled(store: JetStreamLog, position: int, frame: bytes) -> bool:
    try:
        store.settle(position, frame)
    except LogStoreError:
        return False
    return True


def frames_of(open_store: Open) -> list[bytes]:
    """The frames that another broker reads, once both streams have elected a leader."""
    found: list[JetStreamLog] = []

    def look() -> bool:
        try:
            found.append(open_store())
        except LogStoreError:
            return False
        return True

    until(look)
    return [frame for _, frame in found[0].frames(0)]


def test_a_log_goes_on_while_one_server_dies_and_none_is_lost_when_all_do(
    cluster: NatsCluster, open_store: Open
) -> None:
    store = open_store()
    write(store, range(20))
    leader = cluster.leader_of(STREAM)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write, store, range(20, 200))
        until(lambda: store._chain.tip is not None and store._chain.tip.number > 60)
        leader.stop()
        writing.result(120)
    assert frames_of(open_store) == [body(n) for n in range(200)]

    others = [server for server in cluster.servers if server is not leader]
    others[0].stop()
    with pytest.raises(LogStoreError):
        store.append(200 * FRAME, body(200))
    leader.start()
    until(lambda: is_settled(store, 200 * FRAME, body(200)))
    for server in cluster.servers:
        server.stop()
        server.start()
    until(lambda: is_settled(store, 201 * FRAME, body(201)))

    assert frames_of(open_store) == [body(n) for n in range(202)]


def test_a_leader_at_a_server_that_stood_still_is_fenced(
    cluster: NatsCluster, open_store: Open
) -> None:
    """Its server may answer reads with what it had; appends and renewals need a majority."""
    probe = open_store()
    write(probe, range(5))
    stopped = cluster.leader_of(STREAM)
    old = open_store(stopped.address, force=True)
    write(old, range(5, 10))
    others = ",".join(s.address for s in cluster.servers if s is not stopped)
    stopped.send(signal.SIGSTOP)
    late: list[str] = []

    def append_late() -> None:
        try:
            old.append(10 * FRAME, body(99))
        except (LogStoreError, LogFencedError) as error:
            late.append(type(error).__name__)

    appending = threading.Thread(target=append_late)
    appending.start()
    new = None

    def leads() -> bool:
        nonlocal new
        try:
            new = open_store(others, force=True)
        except LogStoreError:
            return False
        return True

    until(leads)
    assert new is not None
    write(new, range(10, 20))
    stopped.send(signal.SIGCONT)
    appending.join(60)

    assert late
    until(lambda: is_fenced(old))
    write(new, range(20, 25))
    found = [frame for _, frame in new.frames(0)]
    assert found == [body(number) for number in range(25)]


def is_fenced(store: JetStreamLog) -> bool:
    try:
        store.settle(10 * FRAME, body(99))
    except LogFencedError:
        return not store.renew()
    except LogStoreError:
        return False
    raise AssertionError("a leader that was succeeded has appended")
