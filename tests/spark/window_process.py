"""Windows of consumers as a process of its own, with its own Spark: one that may be killed.

``python -m tests.spark.window_process '{"flight": address, "settings": {…}, "windows": [{…}, …]}'``
prints the report of each window as a line of JSON.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


def run(
    *, flight: str, settings: dict[str, str], windows: list[dict[str, Any]], ready: str = ""
) -> Iterator[dict[str, Any]]:
    """Run windows one after another.

    Args:
        flight: the broker's address.
        settings: of Spark.
        windows: topic, group, handler (module:function) and owner of each, perhaps its sink and
            the topics that it publishes to, and bounds as ``run_window`` takes them.
        ready: a file to make once Spark is up; then a line of input is waited for.
    """
    from rmq_pipeline.flight.client import Client
    from rmq_pipeline.spark.consumer import run_window
    from rmq_pipeline.spark.session import start

    spark = start(settings)
    if ready:
        Path(ready).touch()
        sys.stdin.readline()
    with Client(flight) as client:
        for window in windows:
            spec = _spec(
                **{name: window.pop(name) for name in ("topic", "group")},
                handler=window.pop("handler"),
                sink=window.pop("sink", None),
                publishes=window.pop("publishes", ()),
                max_batch=window.pop("max_batch", 100_000),
            )
            report = run_window(spec, client, spark=lambda: spark, **window)
            yield dataclasses.asdict(report)


def _spec(
    *,
    topic: str,
    group: str,
    handler: str,
    sink: str | None,
    publishes: Sequence[str],
    max_batch: int,
) -> Any:
    from rmq_pipeline.spark.consumer import ConsumerSpec
    from tests.spark.handlers import SINK

    module, _, name = handler.partition(":")
    return ConsumerSpec(
        name=group,
        topic=topic,
        group=group,
        handler=getattr(import_module(module), name),
        sink=sink,
        sink_schema=None if sink is None else SINK,
        sink_offsets=sink is not None,
        publishes=tuple(publishes),
        max_batch=max_batch,
    )


if __name__ == "__main__":
    for report in run(**json.loads(sys.argv[1])):
        print(json.dumps(report, default=str), flush=True)
