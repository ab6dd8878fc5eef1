"""Cost of a scrape of the metrics with many queues, and of what it holds up meanwhile.

The table of samples, the Prometheus text, and the longest time for which one request of a scrape
holds the writer: as long a send waits for it at most.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide.backlog import Count, Overview
from rmq_pipeline.metrics.exposition import exposition

_TURNS = 5
_PER_TOPIC = 100


def _median_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_TURNS):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


def _scrape(broker: Broker) -> pa.Table:
    broker._measuring._looked = None  # noqa: SLF001 each scrape looks anew
    return broker.metrics()


def _requests_ms(broker: Broker) -> tuple[float, float]:
    """Return the median and the longest decision of the requests of one look."""
    engine = broker.engine
    held = engine.submit(Overview())
    times, at = [], 0
    while at < len(held.keys):
        request = Count(held.keys, at, {})
        began = time.perf_counter()
        at = request.decide(engine.state, held.now_ms).answer
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times), max(times)


def _fill(broker: Broker, *, queues: int, per_queue: int, receive: bool) -> None:
    broker.create_group("g")
    for number in range(queues // _PER_TOPIC):
        topic = f"t{number}"
        broker.create_topic(topic, queues=_PER_TOPIC)
        rows = _PER_TOPIC * per_queue
        broker.send(topic, pa.table({"body": [b"x" * 100] * rows}))
        if receive:
            broker.receive("g", topic, limit=rows // 2)
        else:
            broker.subscribe("g", topic)


def measure(*, queues: int, per_queue: int, receive: bool) -> dict[str, float]:
    """Return the figures of a broker with so many queues."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Broker.open(Path(folder) / "home", upkeep="none", flush="async") as broker,
    ):
        _fill(broker, queues=queues, per_queue=per_queue, receive=receive)
        table = _scrape(broker)
        median_ms, most_ms = _requests_ms(broker)
        return {
            "samples": table.num_rows,
            "table_ms": _median_ms(lambda: _scrape(broker)),
            "kept_ms": _median_ms(broker.metrics),
            "text_ms": _median_ms(lambda: exposition(table)),
            "text_kib": len(exposition(table)) / 1024,
            "request_ms": median_ms,
            "request_most_ms": most_ms,
        }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queues", type=int, default=10_000, help="queues, 100 in each topic")
    parser.add_argument("--per-queue", type=int, default=10, help="messages in each queue")
    asked = parser.parse_args()
    for receive in (False, True):
        found = measure(queues=asked.queues, per_queue=asked.per_queue, receive=receive)
        print("deliveries under way" if receive else "nothing delivered")
        for name, figure in found.items():
            print(f"  {name:16} {figure:10,.2f}")


if __name__ == "__main__":
    main()
