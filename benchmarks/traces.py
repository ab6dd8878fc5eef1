"""Cost of spans for a producer: sends in turns without and with a tracer provider.

The broker and the collector have processes of their own. The provider is the SDK's: all traces are
sampled, and a thread exports batches of spans by OTLP over HTTP.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import pyarrow as pa
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from rmq_pipeline import tracing
from rmq_pipeline.flight import process
from rmq_pipeline.flight.client import Client

#: Takes requests, and answers each without a look at it.
_COLLECTOR: Final = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *args):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def _sends_us(client: Client, messages: pa.Table, *, sends: int) -> float:
    """Return the median time of a send in µs."""
    times = []
    for _ in range(sends):
        began = time.perf_counter()
        client.send("t", messages)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def _begin_us(messages: pa.Table, *, sends: int) -> float:
    """Return the processor's time for a span and its context in the messages, without the send."""
    began = time.thread_time()
    for _ in range(sends):
        tracing.begin_send("t", messages)[0].end()
    return (time.thread_time() - began) / sends * 1e6


def _use(provider: TracerProvider | None) -> None:
    """OpenTelemetry takes one provider a process; turns need two states."""
    trace._TRACER_PROVIDER = provider  # noqa: SLF001


def measure(client: Client, provider: TracerProvider, *, turns: int, sends: int) -> None:
    """Print medians over the turns."""
    client.create_topic("t")
    for rows in (1, 1_000):
        messages = pa.table({"body": [b"x" * 256] * rows})
        found: dict[tuple[str, bool], list[float]] = {}
        _sends_us(client, messages, sends=sends)
        for traced in (False, True) * turns:
            _use(provider if traced else None)
            found.setdefault(("span", traced), []).append(_begin_us(messages, sends=sends))
            found.setdefault(("send", traced), []).append(_sends_us(client, messages, sends=sends))
        for (name, traced), values in sorted(found.items()):
            state = "with" if traced else "without"
            print(
                f"{rows:5} rows, {name} {state:7} a provider: {statistics.median(values):8.1f} µs"
            )


def main() -> None:
    """Start a broker and a collector, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--sends", type=int, default=100)
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen([sys.executable, "-c", _COLLECTOR], stdout=subprocess.PIPE) as collector,
    ):
        assert collector.stdout is not None
        port = int(collector.stdout.readline())
        provider = TracerProvider()
        exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{port}/v1/traces")
        provider.add_span_processor(BatchSpanProcessor(exporter))
        home = Path(folder) / "home"
        process.start(home)
        try:
            with Client(home=home) as client:
                measure(client, provider, turns=chosen.turns, sends=chosen.sends)
        finally:
            process.stop(home)
            provider.shutdown()
            collector.kill()


if __name__ == "__main__":
    main()
