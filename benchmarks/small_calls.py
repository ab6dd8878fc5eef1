"""Small calls of the client through Flight and over plain TCP, in turns, beside each other.

Two brokers have processes and homes of their own; one of them has no port for plain connections.
Each turn makes calls at one of them for some seconds, at the other, and so on. The result is the
ratio of plain TCP to Flight: of the calls a second, and of the processor's time for each call, in
the broker and in the client. ``python -m benchmarks.small_calls [--turns N] [--seconds S]``.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import psutil
import pyarrow as pa

from rmq_pipeline.flight import process
from rmq_pipeline.flight.channel import SMALL_CALLS
from rmq_pipeline.flight.client import Client

ONE: Final = pa.table({"body": [b"x" * 1024]})
#: Ten batches, so that most receives find one.
MANY: Final = pa.table({"body": [b"x" * 1024] * 320})

APART: Final = "receive and ack 32, one caller"
TOGETHER: Final = "receive 32 with acks, one caller"


class Turn(NamedTuple):
    """What a turn of calls took."""

    calls_per_s: float
    broker_us: float
    client_us: float


def send(client: Client) -> None:
    """Send one message."""
    client.send("t", ONE)


def drain(client: Client) -> None:
    """Receive 32 messages and acknowledge them; send some if there are none."""
    received = client.receive("g", "t", limit=32)
    if received.num_rows:
        client.ack(received.select(["receipt_handle"]))
    else:
        client.send("t", MANY)


class DrainTogether:
    """As ``drain``, but each receive acks the messages of the one before."""

    def __init__(self) -> None:
        self._received: dict[Client, pa.Table] = {}

    def __call__(self, client: Client) -> None:
        """Receive 32 messages; send some if there are none."""
        received = client.receive("g", "t", limit=32, ack=self._received.pop(client, None))
        if received.num_rows:
            self._received[client] = received
        else:
            client.send("t", MANY)


def turn(
    home: Path, work: Callable[[Client], None], *, callers: int, seconds: float, broker: int
) -> Turn:
    """Make calls by some callers, each with a client of its own."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(home=home)) for _ in range(callers)]
        for client in clients:
            for _ in range(SMALL_CALLS):
                client.ping()
        server = psutil.Process(broker)
        before_s, own_s = sum(server.cpu_times()[:2]), time.process_time()
        counts = [0] * callers
        until_s = time.perf_counter() + seconds

        def run(number: int) -> None:
            while time.perf_counter() < until_s:
                work(clients[number])
                counts[number] += 1

        threads = [threading.Thread(target=run, args=(number,)) for number in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        calls = sum(counts)
        return Turn(
            calls / seconds,
            (sum(server.cpu_times()[:2]) - before_s) / calls * 1e6,
            (time.process_time() - own_s) / calls * 1e6,
        )


def ratio(one: Turn, other: Turn) -> str:
    """Return what one turn has beside another."""
    return (
        f"{one.calls_per_s / other.calls_per_s:.2f} ×; processor"
        f" {one.broker_us / other.broker_us:.2f} × in the broker,"
        f" {one.client_us / other.client_us:.2f} × in the client"
    )


def main() -> None:
    """Start both brokers, and print a line a workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        brokers = {}
        for way, port in (("Flight", None), ("TCP", 0)):
            home = Path(folder) / way
            brokers[way] = home, process.start(home, settings={"tcp_port": port}).pid
            stack.callback(process.stop, home)
            with Client(home=home) as client:
                client.create_topic("t", queues=4)
                client.create_group("g")
        workloads: tuple[tuple[str, Callable[[Client], None], int], ...] = (
            ("send 1, one caller", send, 1),
            ("send 1, eight callers", send, 8),
            (APART, drain, 1),
            (TOGETHER, DrainTogether(), 1),
        )
        rates: dict[str, Turn] = {}
        for name, work, callers in workloads:
            found = defaultdict(list)
            for _ in range(chosen.turns):
                for way, (home, pid) in brokers.items():
                    took = turn(home, work, callers=callers, seconds=chosen.seconds, broker=pid)
                    found[way].append(took)
            flight, tcp = (
                Turn(*map(statistics.median, zip(*found[way], strict=True)))
                for way in ("Flight", "TCP")
            )
            rates[name] = tcp
            print(
                f"{name:32} {tcp.calls_per_s:6.0f}/s and {flight.calls_per_s:6.0f}/s by Flight:"
                f" {ratio(tcp, flight)}",
                flush=True,
            )
        print(f"acks together with the next receive: {ratio(rates[TOGETHER], rates[APART])}")


if __name__ == "__main__":
    main()
