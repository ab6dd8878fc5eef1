"""What runs beside the traffic, and what a filter costs, measured on homes of their own.

A measurement is a function in MEASUREMENTS: it gets a Bench, an open broker and the scale, and
answers rows. ``python -m benchmarks.upkeep --help`` for the sizes.
"""

import sys
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.measured import BODY_BYTES, Bench, Row, bodies, run, seconds, with_broker
from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.filter.expression import compile_filter

#: Messages of one send.
BATCH = 10_000
#: A row is measured this often, and its median is told.
ROUNDS = 3
MILLION = 1_000_000
SCHEDULED = 100_000
HALVES = 100_000
SWEPT = 50_000
LEASES = 500_000
REVIVED = 100_000
GROUPS = 100
#: What a poisoned group may cost the others, in % of their time without one.
POISON = 5.0
POISON_ROUNDS = 12
#: No divisor of the messages: in a clean run the last receive is not a full one, either.
POISON_LIMIT = 1024
#: A poisoned group is tried again this long after each failure, during all of the run; the shorter
#: one, every other receive, is told for comparison.
BACKOFF_MS = 100
SHORT_BACKOFF_MS = 10
#: How far apart the moments of scheduled messages lie.
SPREAD_MS = 1000
FILTER = "a > 5 AND region IN ('e','w')"


# ---------------------------------------------------------------------------------------- filters


def with_properties(n: int, *, seed: int = 1) -> pa.Table:
    """Messages with three properties each: a, 0 to 9; region, one of four; order, any number."""
    random = np.random.default_rng(seed)
    values = np.empty((n, 3), dtype=object)
    values[:, 0] = random.integers(0, 10, n).astype(str)
    values[:, 1] = np.array(["e", "w", "n", "s"])[random.integers(0, 4, n)]
    values[:, 2] = random.integers(0, MILLION, n).astype(str)
    names = pa.array(np.tile(["a", "region", "order"], n), pa.string())
    starts = pa.array(np.arange(n + 1) * 3, pa.int32())
    items = pa.array(values.ravel(), pa.string())
    properties = pa.MapArray.from_arrays(starts, names, items)
    return pa.table({"body": bodies(n), "properties": properties})


def expected(messages: pa.Table) -> int:
    """How many of them FILTER wants, counted another way."""
    pairs = (dict(pairs) for pairs in messages["properties"].to_pylist())
    return sum(int(one["a"]) > 5 and one["region"] in "ew" for one in pairs)


def filters(bench: Bench) -> list[Row]:
    """A condition on a million messages in memory, as the log gives them: a batch for each send."""
    batches = [with_properties(BATCH, seed=i) for i in range(bench.count(MILLION // BATCH))]
    wanted = sum(map(expected, batches))
    messages = pa.concat_tables(batches).select(["properties"])
    rates = []
    for _ in range(ROUNDS):
        with seconds() as taken:
            mask = compile_filter(FILTER, "sql92").matches(messages)
        assert mask.true_count == wanted, (mask.true_count, wanted)
        rates.append(messages.num_rows / taken[0])
    name = f"filter {FILTER}, {messages.num_rows:,} messages in memory"
    return [Row(name, float(np.median(rates)), "/s", MILLION)]


def filtered_receives(bench: Bench) -> list[Row]:
    """The same through the broker: found, leased, read and passed over, until nothing is left."""
    broker = bench.broker
    broker.ensure_topic("filtered")
    batches = [with_properties(BATCH, seed=i) for i in range(10)]
    sends = bench.count(MILLION // BATCH)
    for i in range(sends):
        broker.send("filtered", batches[i % len(batches)])
    bench.settled()
    wanted = sum(expected(batches[i % len(batches)]) for i in range(sends))
    rates: dict[str, list[float]] = {"tag": [], "sql92": []}
    for turn in range(ROUNDS):
        for kind, expression in (("tag", "*"), ("sql92", FILTER)):
            broker.engine.filter_results.clear()
            group = f"{kind}-{turn}"
            broker.ensure_group(group)
            found = 0
            with seconds() as taken:
                while n := _received(broker, group, expression=expression, kind=kind):
                    found += n
            assert found == (wanted if kind == "sql92" else sends * BATCH)
            rates[kind].append(sends * BATCH / taken[0])
    total = f"{sends * BATCH:,} messages in the log"
    return [
        Row(
            f"receive with it, {total}, looked at", float(np.median(rates["sql92"])), "/s", MILLION
        ),
        Row(f"receive all, {total}", float(np.median(rates["tag"])), "/s"),
    ]


def _received(broker: Broker, group: str, *, expression: str, kind: str) -> int:
    got = broker.receive(group, "filtered", limit=100_000, filter=expression, filter_type=kind)
    assert got.schema.equals(schema.RECEIVED)
    return int(got.num_rows)


# -------------------------------------------------------------------------------------- scheduled


def scheduled(bench: Bench) -> list[Row]:
    """Scheduled messages that are all due at once, delivered to their topic in its order."""
    broker, n = bench.broker, bench.count(MILLION // BATCH) * BATCH
    broker.ensure_topic("scheduled", type="delay")
    at_once = [_delivered(bench, np.zeros(n, dtype=np.int64)) for _ in range(ROUNDS)]
    spread = np.random.default_rng(1).permutation(n) % SPREAD_MS
    in_turn = [_delivered(bench, spread) for _ in range(ROUNDS)]
    due = f"{n:,} scheduled messages due at once, delivered"
    return [
        Row(due, float(np.median(at_once)), "/s", SCHEDULED),
        Row(f"{due}; each of another moment", float(np.median(in_turn)), "/s", SCHEDULED),
    ]


def _delivered(bench: Bench, earlier_ms: np.ndarray) -> float:
    """Messages a second; each is due this much before the last of them."""
    broker, n = bench.broker, len(earlier_ms)
    last_ms = int(time.time() * 1000) + SPREAD_MS + n // 100
    body = bodies(BATCH)
    for start in range(0, n, BATCH):
        due = pa.array(last_ms - earlier_ms[start : start + BATCH])
        broker.send("scheduled", pa.table({"body": body, "deliver_at_ms": due}))
    assert broker.due()["jobs"]["deliver_scheduled"]["due"] == 0, "sending took too long"
    bench.settled()
    time.sleep(max(0.0, last_ms / 1000 - time.time()) + 0.01)
    with seconds() as taken:
        report = broker.deliver_scheduled(limit=n)
    assert report["delivered"] == n, report
    bench.settled()
    return n / taken[0]


# ----------------------------------------------------------------------------------- transactions


def halves(bench: Bench) -> list[Row]:
    """A check of all open half messages, nobody's checker counted, and their commit at once."""
    broker, n = bench.broker, bench.count(HALVES // BATCH) * BATCH
    broker.ensure_topic("halves", type="transaction")
    swept, given, ended = [], [], []
    for _ in range(ROUNDS):
        ids = begun(broker, n)
        bench.settled()
        with seconds() as taken:
            report = broker.check_transactions(limit=n)
        assert report["checked"] == n, report
        swept.append(n / taken[0])
        with seconds() as taken:
            checks = broker.fetch_checks(limit=n)
        assert checks.num_rows == n, checks.num_rows
        given.append(n / taken[0])
        bench.settled()
        commits = pa.table({"transaction_id": ids, "resolution": ["commit"] * n})
        with seconds() as taken:
            broker.end_transactions(commits)
        ended.append(n / taken[0])
        bench.settled()
    stored = broker.describe_topic("halves")["offsets"]
    assert sum(queue["max_offset"] for queue in stored) == n * ROUNDS
    return [
        Row(f"check sweep over {n:,} half messages", float(np.median(swept)), "/s", SWEPT),
        Row("their checks given to a checker", float(np.median(given)), "/s"),
        Row("their commit in one table", float(np.median(ended)), "/s"),
    ]


def begun(broker: Broker, n: int) -> pa.ChunkedArray:
    """``n`` half messages of four producer groups that are due for a check; transaction ids."""
    body = bodies(BATCH)
    sent = [
        broker.send_half(
            "halves",
            pa.table({"body": body}),
            producer_group=f"producers-{i % 4}",
            immunity_ms=1,
        )
        for i in range(n // BATCH)
    ]
    time.sleep(0.01)
    return pa.concat_tables(sent).column("transaction_id")


# -------------------------------------------------------------------------- revive, poisoned groups


def revived(bench: Bench) -> list[Row]:
    """Leases that have ended without an answer, recorded so that their messages come again."""
    broker, n = bench.broker, bench.count(LEASES // BATCH) * BATCH
    broker.ensure_topic("revived")
    body = bodies(BATCH)
    for _ in range(n // BATCH):
        broker.send("revived", pa.table({"body": body}))
    rates = []
    for turn in range(ROUNDS):
        group = f"revived-{turn}"
        broker.ensure_group(group)
        held_ms = 2_000 + n // 50
        leased = 0
        while leased < n:
            got = broker.receive(group, "revived", limit=50_000, invisible_duration_ms=held_ms)
            leased += got.num_rows
        assert broker.due()["jobs"]["revive"]["due"] == 0, "receiving took too long"
        bench.settled()
        time.sleep(held_ms / 1000 + 0.01)
        with seconds() as taken:
            report = broker.revive(limit=n)
        assert report["revived"] == n, report
        rates.append(n / taken[0])
        broker.delete_group(group, force=True)
        bench.settled()
    return [Row(f"revive of {n:,} ended leases", float(np.median(rates)), "/s", REVIVED)]


def poisoned(bench: Bench) -> list[Row]:
    """What a message group that fails at every try costs the 99 others.

    The time in which the same messages of the 99 are received and settled, without it and beside
    it. All cases take turns, receive by receive: whatever else the machine does meets them alike.
    """
    broker = bench.broker
    names = [f"group-{i}" for i in range(GROUPS)]
    sends = bench.count(10)
    for topic, of in (("healthy", names[1:]), ("poisoned", names)):
        broker.ensure_topic(topic, type="fifo")
        n = BATCH * len(of) // GROUPS
        groups = pa.array(of).take(pa.array(np.arange(n) % len(of)))
        for _ in range(sends):
            broker.send(topic, pa.table({"body": bodies(n), "message_group": groups}))
    healthy = sends * BATCH * (GROUPS - 1) // GROUPS
    # By case: the topic, the delay after each failure, and after how many the group is parked.
    cases = {
        "clean": ("healthy", BACKOFF_MS, 1000),
        f"tried every {BACKOFF_MS} ms": ("poisoned", BACKOFF_MS, 1000),
        "parked at once": ("poisoned", BACKOFF_MS, 1),
        f"tried every {SHORT_BACKOFF_MS} ms": ("poisoned", SHORT_BACKOFF_MS, 1000),
    }
    times: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(POISON_ROUNDS):
        for case, (_, backoff_ms, attempts) in cases.items():
            broker.ensure_group(
                case.replace(" ", "-"),
                order="message_group",
                max_attempts=attempts,
                # While the others have their turns no time of this one passes.
                backoff_ms=[backoff_ms * len(cases)],
                on_failure="park",
            )
        bench.settled()
        left, spent = dict.fromkeys(cases, healthy), dict.fromkeys(cases, 0.0)
        while open_cases := [case for case in cases if left[case] > 0]:
            for case in open_cases:
                with seconds() as taken:
                    left[case] -= _consume(
                        broker, cases[case][0], consumer_group=case.replace(" ", "-")
                    )
                spent[case] += taken[0]
        for case, total in spent.items():
            times[case].append(total)
            broker.delete_group(case.replace(" ", "-"), force=True)
    return _poison_rows(times, healthy)


def _consume(broker: Broker, topic: str, *, consumer_group: str) -> int:
    """One receive, settled; how many messages of the healthy groups it had."""
    got = broker.receive(consumer_group, topic, limit=POISON_LIMIT)
    failed = pc.equal(got["message_group"], "group-0")
    outcomes = pc.if_else(failed, "retry", "ack")
    broker.settle(
        consumer_group,
        pa.table({"receipt_handle": got["receipt_handle"], "outcome": outcomes}),
    )
    return int(got.num_rows - failed.to_numpy().sum())


def _poison_rows(times: dict[str, list[float]], healthy: int) -> list[Row]:
    clean, *others = (np.array(taken_s) for taken_s in times.values())
    rows = [Row(f"{healthy:,} messages of 99 groups", float(np.median(healthy / clean)), "/s")]
    targets = (POISON, POISON, None)
    for case, taken_s, target in zip(list(times)[1:], others, targets, strict=True):
        cost = 100 * (taken_s / clean - 1)
        low, high = np.percentile(cost, (25, 75))
        spread = f"half of the rounds: {low:.1f} to {high:.1f}"
        name = f"what one poisoned group beside them costs them, {case} ({spread})"
        rows.append(Row(name, float(np.median(cost)), "%", target))
    return rows


MEASUREMENTS: dict[str, Callable[[Bench], list[Row]]] = {
    "filter": filters,
    "filtered-receive": filtered_receives,
    "scheduled": scheduled,
    "halves": halves,
    "revive": revived,
    "poisoned": poisoned,
}


def main() -> int:
    """Measure, print, and say by the exit code whether the targets were met."""
    measurements = {name: with_broker(measure) for name, measure in MEASUREMENTS.items()}
    title = f"Upkeep and filters: {BODY_BYTES:,} B bodies, sync flush"
    return run(measurements, title=title, description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
