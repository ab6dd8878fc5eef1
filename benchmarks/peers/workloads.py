"""The workloads, each with its check. A workload that fails its check has no figures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

import numpy as np

from benchmarks.peers.driver import NOTHING, Connection, Driver, Kind, Offer, Received
from benchmarks.peers.ledger import Check, CheckFailedError, Ledger, place_of
from benchmarks.peers.pinned import Busy

FILL: Final = 1000
PRODUCERS: Final = 8
GROUPS: Final = 5
KEYS: Final = 1000
POISONED_KEY: Final = 7
RATE_PER_S: Final = 2000
#: A rate counts as held if so much of it arrived in its time.
HELD: Final = 0.98
#: A group that gets no message for this time will get no more.
LOST_S: Final = 15.0
#: How long before its moment a timer has to be stored.
AHEAD_MS: Final = 200
_WAIT_S: Final = 1.0
#: After the last message: a repetition would come in this time.
_QUIET_S: Final = 0.1
#: A rate is given up when a send is so late.
BEHIND_S: Final = 3.0
_TOPICS: Final = count()


@dataclass(frozen=True)
class Size:
    """How long workloads take."""

    warm_s: float
    timed_s: float
    #: Messages of a round of a drain: at least, and at most.
    least: int
    most: int
    timers: int
    timers_s: float
    #: From the first timer's sending to its moment.
    lead_s: float
    steady_s: float


FULL: Final = Size(
    warm_s=1.5,
    timed_s=6.0,
    least=4_000,
    most=200_000,
    timers=20_000,
    timers_s=20.0,
    lead_s=5.0,
    steady_s=15.0,
)
QUICK: Final = Size(
    warm_s=0.2,
    timed_s=0.8,
    least=1_000,
    most=20_000,
    timers=1_000,
    timers_s=2.0,
    lead_s=2.0,
    steady_s=1.5,
)


@dataclass(frozen=True)
class Figure:
    """A number that a workload gives."""

    name: str
    value: float
    unit: str
    #: Shares of their cores that server and client took meanwhile.
    server: float
    client: float


@dataclass(frozen=True)
class Workload:
    """What a driver is asked to do."""

    measure: Callable[[Driver, Size], list[Figure]]
    needs: frozenset[Offer] = frozenset({Offer.STORAGE})


@dataclass
class _Topic:
    """A topic of one workload, and the messages that were sent to it."""

    driver: Driver
    name: str
    groups: Sequence[str]
    ledger: Ledger
    _filler: Connection | None = field(default=None)

    @property
    def checked(self) -> bool:
        """Return whether the driver stores what it is sent."""
        return Offer.STORAGE in self.driver.offers

    def send(self, connection: Connection, producer: int, *, n: int) -> None:
        """Send the next messages of a producer in one call."""
        bodies = self.ledger.bodies(producer, n)
        connection.send(self.name, bodies, keys=self.ledger.keys_of(bodies))

    def fill(self, n: int) -> None:
        """Send messages in calls of FILL."""
        if self._filler is None:
            self._filler = self.driver.connect()
        for start in range(0, n, FILL):
            self.send(self._filler, 0, n=min(FILL, n - start))

    def close(self) -> None:
        """Delete the topic."""
        if self._filler is not None:
            self._filler.close()
        self.driver.drop(self.name)


@contextmanager
def _topic(
    driver: Driver, *, groups: int = 1, keys: int = 0, kind: Kind = Kind.PLAIN
) -> Iterator[_Topic]:
    name = f"t{next(_TOPICS)}"
    topic = _Topic(driver, name, [f"{name}_g{n}" for n in range(groups)], Ledger(keys))
    driver.create(name, topic.groups, kind=kind)
    try:
        yield topic
    except BaseException:
        with suppress(Exception):  # report the error that led here
            topic.close()
        raise
    topic.close()


def produce(driver: Driver, size: Size, *, batch: int, producers: int) -> list[Figure]:
    """Send in calls of ``batch``; then drain all of it, which checks it."""
    if driver.shares_writes:
        batch, producers = batch * producers, 1
    with _topic(driver) as topic:
        done: list[list[float]] = [[] for _ in range(producers)]
        begin = time.perf_counter() + size.warm_s
        end = begin + size.timed_s

        def work(producer: int) -> None:
            connection = driver.connect()
            try:
                # A call counts when it began in the time. Of a slow peer, one call is enough.
                while (now := time.perf_counter()) < end or not done[producer]:
                    topic.send(connection, producer, n=batch)
                    if now >= begin:
                        done[producer].append(time.perf_counter())
            finally:
                connection.close()

        with ThreadPoolExecutor(producers) as pool:
            working = [pool.submit(work, producer) for producer in range(producers)]
            time.sleep(size.warm_s)
            busy = Busy(driver)
            for each in working:
                each.result()
            server, client = busy.shares()
        if topic.checked:
            check = Check(topic.ledger)
            limit = FILL if Offer.LARGE_RECEIVES in driver.offers else 32
            _Consumer(topic, topic.groups[0], check=check, limit=limit).run()
            check.finish()
    taken_s = max(each[-1] for each in done) - begin
    return [Figure("", sum(map(len, done)) * batch / taken_s, "msg/s", server, client)]


class _Consumer:
    """A group's consumer; it checks outside of the time that it measures."""

    def __init__(self, topic: _Topic, group: str, *, check: Check, limit: int) -> None:
        self._topic, self._group, self._limit = topic, group, limit
        self._check = check
        self._poisoned = check.poisoned
        self.acked = 0

    def run(self) -> None:
        """Receive and ack until the group has all that it expects, and check it."""
        connection = self._topic.driver.connect_to_check()
        try:
            self.drain(connection)
        finally:
            connection.close()

    def drain(self, connection: Connection) -> float:
        """Receive and ack all that was sent; return when the last ack was answered."""
        taken: list[Received] = []
        expected = self._check.expected
        name, group, limit = self._topic.name, self._group, self._limit
        last = time.perf_counter()
        done, failed = NOTHING, self._failed(NOTHING)
        while self.acked < expected:
            progress = len(done.bodies) - len(failed)
            if self.acked + progress == expected:
                connection.ack(done, failed)
                done = NOTHING
            else:
                done = connection.ack_and_receive(
                    done, failed, topic=name, group=group, limit=limit, wait_s=_WAIT_S
                )
            self.acked += progress
            last = time.perf_counter() if progress else last
            failed = self._failed(done)
            if done.bodies:
                taken.append(done)
            if time.perf_counter() > last + LOST_S:
                break
        again = connection.receive(name, group, limit=limit, wait_s=_QUIET_S)
        if again.bodies:
            connection.ack(again, self._failed(again))
            taken.append(again)
        for each in taken:
            self._check.take(each)
        return last

    def _failed(self, received: Received) -> Sequence[int]:
        if self._poisoned is None:
            return ()
        keys = self._topic.ledger.keys_of(received.bodies)
        return [at for at, key in enumerate(keys) if key == self._poisoned]


def drain(
    driver: Driver,
    size: Size,
    *,
    limit: int,
    groups: int = 1,
    keys: int = 0,
    poisoned: int | None = None,
) -> list[Figure]:
    """Fill a topic and drain it, in turns; only the drains are timed."""
    if Offer.STORAGE not in driver.offers:
        return _drain_of_nothing(driver, size, limit=limit)
    # Of a peer without order by key, one consumer gets the order of the whole topic.
    kind = Kind.KEYED if keys and Offer.KEYS in driver.offers else Kind.PLAIN
    with _topic(driver, groups=groups, keys=keys, kind=kind) as topic:
        checks = [Check(topic.ledger, poisoned=poisoned) for _ in topic.groups]
        consumers = [
            _Consumer(topic, group, check=check, limit=limit)
            for group, check in zip(topic.groups, checks, strict=True)
        ]
        timed_s, delivered, shares = 0.0, 0, np.zeros(2)
        connections = [driver.connect() for _ in consumers]
        try:
            # The first round is for warming, and says how large the others are.
            n, warm = size.least, True
            while timed_s < size.timed_s:
                topic.fill(n)
                took_s, busy = _round(driver, consumers, connections=connections)
                for check in checks:
                    check.finish()
                if not warm:
                    timed_s, delivered = timed_s + took_s, delivered + n * groups
                    shares += np.array(busy) * took_s
                n, warm = int(n / took_s * size.timed_s / 3), False
                n = min(size.most, max(size.least, n)) // KEYS * KEYS
        finally:
            for connection in connections:
                connection.close()
        if poisoned is not None:
            delivered -= delivered // keys
    server, client = shares / timed_s
    return [Figure("", delivered / timed_s, "msg/s", float(server), float(client))]


def _round(
    driver: Driver, consumers: Sequence[_Consumer], *, connections: Sequence[Connection]
) -> tuple[float, tuple[float, float]]:
    """Let all groups drain the topic; return the time, and the shares of the cores."""
    busy, start = Busy(driver), time.perf_counter()
    if len(consumers) == 1:
        took_s = consumers[0].drain(connections[0]) - start
    else:
        with ThreadPoolExecutor(len(consumers)) as pool:
            took_s = max(pool.map(_Consumer.drain, consumers, connections)) - start
    return took_s, busy.shares()


def _drain_of_nothing(driver: Driver, size: Size, *, limit: int) -> list[Figure]:
    """Receive and ack at a limit, which has messages without end."""
    with _topic(driver) as topic:
        connection = driver.connect()

        def work(seconds: float) -> float:
            found, start = 0, time.perf_counter()
            while (now := time.perf_counter()) < start + seconds:
                received = connection.receive(
                    topic.name, topic.groups[0], limit=limit, wait_s=_WAIT_S
                )
                connection.ack(received)
                found += len(received.bodies)
            return found / (now - start)

        try:
            work(size.warm_s)
            busy = Busy(driver)
            rate = work(size.timed_s)
        finally:
            connection.close()
    return [Figure("", rate, "msg/s", *busy.shares())]


@dataclass
class _Timers:
    """Timers that end at an even rate."""

    topic: _Topic
    size: Size
    first_ms: float
    taken: list[tuple[float, Received]] = field(default_factory=list)

    def due_ms(self, number: int) -> int:
        """Return the moment of a timer."""
        return int(self.first_ms + number * self.size.timers_s * 1000 / self.size.timers)

    def send(self) -> None:
        """Send all timers, each before its moment."""
        connection = self.topic.driver.connect()
        try:
            for start in range(0, self.size.timers, FILL):
                bodies = self.topic.ledger.bodies(0, min(FILL, self.size.timers - start))
                due = [self.due_ms(start + n) for n in range(len(bodies))]
                connection.send(self.topic.name, bodies, due_ms=due)
                if time.time() * 1000 > due[0] - AHEAD_MS:
                    raise CheckFailedError("a timer was stored only when its moment had come")
        finally:
            connection.close()

    def receive(self) -> None:
        """Receive and ack all timers."""
        topic, group = self.topic.name, self.topic.groups[0]
        connection = self.topic.driver.connect()
        try:
            last, found = time.perf_counter(), 0
            patience_s = LOST_S + self.size.lead_s
            while found < self.size.timers and time.perf_counter() < last + patience_s:
                received = connection.receive(topic, group, limit=32, wait_s=_WAIT_S)
                if received.bodies:
                    self.taken.append((time.time() * 1000, received))
                    connection.ack(received)
                    last, found = time.perf_counter(), found + len(received.bodies)
            again = connection.receive(topic, group, limit=32, wait_s=_QUIET_S)
            self.taken.append((time.time() * 1000, again))
        finally:
            connection.close()


def timers(driver: Driver, size: Size) -> list[Figure]:
    """Send timers, and measure how late they come."""
    with _topic(driver, kind=Kind.TIMED) as topic:
        work = _Timers(topic, size, (time.time() + size.lead_s) * 1000)
        busy = Busy(driver)
        with ThreadPoolExecutor(2) as pool:
            working = [pool.submit(work.send), pool.submit(work.receive)]
            for one in working:
                one.result()
        shares = busy.shares()
        check = Check(topic.ledger, in_order=False)
        for _, received in work.taken:
            check.take(received)
        check.finish()
    late = [
        moment_ms - work.due_ms(place_of(body)[1])
        for moment_ms, received in work.taken
        for body in received.bodies
    ]
    if min(late) < -1:
        raise CheckFailedError(f"a timer came {-min(late):,.0f} ms early")
    return _quantiles(late, shares, last=("latest", max(late)))


@dataclass
class _Steady:
    """Producers that send at a fixed rate, and a consumer."""

    topic: _Topic
    each: int
    start: float
    taken: list[tuple[float, Received]] = field(default_factory=list)
    ready: threading.Barrier = field(default_factory=lambda: threading.Barrier(PRODUCERS + 1))
    #: The peer cannot hold the rate.
    behind: threading.Event = field(default_factory=threading.Event)

    def due(self, producer: int, number: int) -> float:
        """Return the moment at which a message is to be sent."""
        return self.start + (number * PRODUCERS + producer) / RATE_PER_S

    def send(self, producer: int) -> None:
        """Send each message at its moment, or at once if that has passed."""
        connection = self.topic.driver.connect()
        try:
            self.ready.wait()
            for number in range(self.each):
                ahead_s = self.due(producer, number) - time.perf_counter()
                if ahead_s < -BEHIND_S:
                    self.behind.set()
                if self.behind.is_set():
                    break
                time.sleep(max(0.0, ahead_s))
                self.topic.send(connection, producer, n=1)
        finally:
            connection.close()

    def receive(self) -> None:
        """Receive and ack all messages."""
        topic, group = self.topic.name, self.topic.groups[0]
        connection = self.topic.driver.connect()
        try:
            self.ready.wait()
            last, found, n = time.perf_counter(), 0, self.each * PRODUCERS
            while found < n and time.perf_counter() < last + LOST_S and not self.behind.is_set():
                received = connection.receive(topic, group, limit=32, wait_s=_WAIT_S)
                if received.bodies:
                    last, found = time.perf_counter(), found + len(received.bodies)
                    self.taken.append((last, received))
                    connection.ack(received)
            again = connection.receive(topic, group, limit=32, wait_s=_QUIET_S)
            self.taken.append((time.perf_counter(), again))
        finally:
            connection.close()


def steady(driver: Driver, size: Size) -> list[Figure]:
    """Send at a fixed rate; measure from the moment when a send is due to its receipt.

    A send that waits for an earlier one counts from its own moment, so a stall is not hidden.
    """
    with _topic(driver) as topic:
        each = int(size.steady_s * RATE_PER_S / PRODUCERS)
        work = _Steady(topic, each, time.perf_counter() + size.warm_s)
        busy = Busy(driver)
        with ThreadPoolExecutor(PRODUCERS + 1) as pool:
            working = [pool.submit(work.receive)]
            working += [pool.submit(work.send, producer) for producer in range(PRODUCERS)]
            for one in working:
                one.result()
        shares = busy.shares()
        if work.behind.is_set():
            raise CheckFailedError(f"it could not take {RATE_PER_S:,} a second")
        check = Check(topic.ledger)
        for _, received in work.taken:
            check.take(received)
        check.finish()
    # The first messages are for warming.
    counted = work.start + size.warm_s
    late = [
        (moment - work.due(*place)) * 1000
        for moment, received in work.taken
        for place in map(place_of, received.bodies)
        if work.due(*place) >= counted
    ]
    moments = [at for at, received in work.taken if received.bodies and at >= counted]
    held = size.steady_s / (moments[-1] - work.start)
    if held < HELD:
        raise CheckFailedError(f"only {held * RATE_PER_S:,.0f} of {RATE_PER_S:,} a second")
    return _quantiles(late, shares, last=("longest stall", float(np.diff(moments).max()) * 1000))


def _quantiles(
    late_ms: Sequence[float], shares: tuple[float, float], *, last: tuple[str, float]
) -> list[Figure]:
    found = [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)]
    values = [(name, float(np.quantile(late_ms, share))) for name, share in found]
    return [Figure(name, value, "ms", *shares) for name, value in (*values, last)]


def _produces() -> Mapping[str, Workload]:
    return {
        f"produce {batch:,} a call, {producers} producer{'s' if producers > 1 else ''}": Workload(
            partial(produce, batch=batch, producers=producers), needs=frozenset()
        )
        for producers in (1, PRODUCERS)
        for batch in (1, 32, 1000)
    }


_STORAGE: Final = frozenset({Offer.STORAGE})
WORKLOADS: Final[Mapping[str, Workload]] = {
    **_produces(),
    "drain 32 with acks": Workload(partial(drain, limit=32), needs=frozenset()),
    "drain 1,000 with acks": Workload(
        partial(drain, limit=1000), needs=frozenset({Offer.LARGE_RECEIVES})
    ),
    f"{GROUPS} groups read one topic, 32": Workload(
        partial(drain, limit=32, groups=GROUPS), needs=_STORAGE | {Offer.GROUPS}
    ),
    f"ordered, {KEYS:,} keys, drain 32": Workload(partial(drain, limit=32, keys=KEYS)),
    f"ordered, 1 of {KEYS:,} keys poisoned, drain 32": Workload(
        partial(drain, limit=32, keys=KEYS, poisoned=POISONED_KEY), needs=_STORAGE | {Offer.KEYS}
    ),
    "timers": Workload(timers, needs=_STORAGE | {Offer.TIMERS}),
    f"{RATE_PER_S:,}/s": Workload(steady),
}
#: The limit of a workload is the raw disk at another one.
LIMIT_OF: Final[Mapping[str, str]] = {
    name: "drain 32 with acks" for name in WORKLOADS if name.endswith(("drain 32", "topic, 32"))
}
