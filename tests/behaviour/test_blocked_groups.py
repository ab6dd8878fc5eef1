"""A message group that is blocked, or always fails, blocks no other group."""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.memory import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.behaviour.conftest import Endpoint, Make

MINUTE = 60_000
MIB = 1024**2


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


def test_a_poisoned_group_does_not_hold_up_healthy_ones(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    fifo = topic(type="fifo", queues=2)
    readers = group(order="message_group", max_attempts=3, backoff_ms=[1_000])
    names = ["poison", *(f"g{i}" for i in range(9))]
    endpoint.broker.send(fifo, messages(100, groups=names))
    healthy: dict[str, list[bytes]] = defaultdict(list)

    for _ in range(3):
        while (got := endpoint.broker.receive(readers, fifo, limit=20)).num_rows:
            bad = pc.equal(got["message_group"], "poison")
            if got.filter(bad).num_rows:
                fail(readers, got.filter(bad).slice(0, 1))
            good = got.filter(pc.invert(bad))
            if good.num_rows:
                endpoint.broker.ack(good)
            for row in good.to_pylist():
                healthy[row["message_group"]].append(row["body"])
        endpoint.advance(1_000)
    rest = endpoint.drain(fifo, readers)

    for i, name in enumerate(names[1:], start=1):
        assert healthy[name] == [str(n).encode() for n in range(i, 100, 10)]
    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0"]
    assert rest == [str(n).encode() for n in range(10, 100, 10)]


def test_a_blocked_group_with_most_messages_blocks_no_other_group(
    endpoint: Endpoint, topic: Make, group: Make
) -> None:
    name = topic(type="fifo", queues=4)
    readers = group(order="message_group")

    drain_around_a_whale(endpoint, name, readers, total=24_000, others=400, limit=1_000)


def test_new_messages_of_a_blocked_group_are_no_work_that_is_due(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(order="message_group", max_attempts=1, on_failure="park")
    endpoint.broker.send(name, messages(2, groups=["a"]))
    fail(readers, endpoint.broker.receive(readers, name, limit=1))

    def facts() -> tuple[int, int]:
        found = endpoint.broker.due()["groups"][readers]["topics"][name]
        return found["ready"], found["unread"]

    alone = facts()
    endpoint.broker.send(name, messages(2, groups=["b", "a"], start=2))
    mixed = facts()
    assert endpoint.drain(name, readers) == [b"2"]
    passed = facts()
    endpoint.broker.unpark(readers)
    free = facts()

    assert (alone, mixed, passed) == ((0, 1), (1, 3), (0, 0))
    assert free[0] > 0
    assert endpoint.drain(name, readers) == [b"0", b"1", b"3"]


@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("total", "size"),
    [(120_000, 2_000), pytest.param(600_000, 1_000, marks=[pytest.mark.slow, pytest.mark.long])],
)
def test_what_is_blocked_stays_out_of_memory(
    inside: Endpoint, topic: Make, group: Make, total: int, size: int
) -> None:
    name = topic(type="fifo", queues=4)
    readers = group(order="message_group")
    blocked_mib = total * 5 / 6 * size / MIB
    memory: list[float] = []

    drain_around_a_whale(
        inside,
        name,
        readers,
        total=total,
        others=total // 60,
        limit=5_000,
        size=size,
        watch=lambda: memory.append(used_mib()),
    )

    # The first receives load what every receive needs: the read-ahead and a page of the database.
    grown = max(memory) - memory[2]
    print(f"{memory[2]:.0f} MiB, {grown:.0f} more later, {blocked_mib:.0f} MiB blocked")
    assert grown < blocked_mib / 4


def used_mib() -> float:
    """Return the memory that this process uses.

    Not counted: what allocators keep of freed memory, and mapped pages of the log, which the kernel
    takes back when it needs them.
    """
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    return bytes_of(os.getpid(), "RssAnon") / MIB


def whale_table(n: int, *, others: int, start: int, size: int) -> pa.Table:
    """``n`` messages, five of six of the group whale, the rest dealt to ``others`` groups."""
    numbers = range(start, start + n)
    groups = ["whale" if i % 6 else f"g{i // 6 % others}" for i in numbers]
    return pa.table({"body": [(b"%d" % i).ljust(size) for i in numbers], "message_group": groups})


def drain_around_a_whale(
    endpoint: Endpoint,
    name: str,
    readers: str,
    *,
    total: int,
    others: int,
    limit: int,
    size: int = 0,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Block the whale by a long lease, drain the others, unblock it, drain it; all in order."""
    for start in range(0, total, 20_000):
        n = min(20_000, total - start)
        endpoint.broker.send(name, whale_table(n, others=others, start=start, size=size))
    endpoint.broker.sql(
        "SELECT 1"
    )  # dispatch has caught up, and uses no memory beside the receives
    whale = None
    last: dict[str, int] = {}
    count = 0

    def receive() -> pa.Table:
        watch()
        return endpoint.broker.receive(
            readers, name, limit=limit, invisible_duration_ms=10 * MINUTE
        )

    def settle(got: pa.Table) -> int:
        if got.num_rows:
            endpoint.broker.ack(got)
        rows = zip(got["message_group"].to_pylist(), got["body"].to_pylist(), strict=True)
        for one, body in rows:
            assert last.get(one, -1) < int(body), one
            last[one] = int(body)
        return int(got.num_rows)

    while (got := receive()).num_rows:
        mine = pc.equal(got["message_group"], "whale")
        if got.filter(mine).num_rows:
            assert whale is None, "the whale is locked"
            whale = got.filter(mine)
        count += settle(got.filter(pc.invert(mine)))
    assert whale is not None
    assert count == total // 6

    count += settle(whale)
    while (got := receive()).num_rows:
        count += settle(got)
    assert count == total
