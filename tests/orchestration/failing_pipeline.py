"""A pipeline whose handlers always fail, until the file ``mended`` of its folder says otherwise.

``rmq up -m failing_pipeline`` loads a copy of this file, and the folder is that of the copy.
What is mended counts when the code is loaded, as in a handler that somebody has edited.
"""

import os
from pathlib import Path
from typing import Final

import pyarrow as pa

from rmq_pipeline.dagster import Outcome, Pipeline, definitions, python_consumer, topic

MENDED: Final = Path(__file__).with_name("mended").exists()
ALARMS: Final = topic("alarms", queues=1)
CRASHES: Final = topic("crashes", queues=1)
ROWS: Final = topic("rows", queues=1)
#: A file has the place of the sink's folder until the test removes it.
SINK: Final = Path(__file__) if not MENDED else Path(__file__).with_name("sinks")
KEPT: Final = pa.schema([("body", pa.binary()), ("born_at_ms", pa.int64())])


@python_consumer(topic=ALARMS, group="raising", backoff_ms=[5_000], max_attempts=1_000)
def raising(messages: pa.Table, state: pa.Table) -> Outcome:  # noqa: ARG001
    """Raise for each message."""
    if not MENDED:
        raise KeyError("carrier")
    return Outcome()


@python_consumer(topic=CRASHES, group="crashing", backoff_ms=[5_000], max_attempts=1_000)
def crashing(messages: pa.Table, state: pa.Table) -> Outcome:  # noqa: ARG001
    """End the process, and the run with it."""
    if not MENDED:
        os._exit(1)
    return Outcome()


@python_consumer(topic=ROWS, group="unwritable", sink=SINK / "rows", sink_schema=KEPT)
def unwritable(messages: pa.Table, state: pa.Table) -> Outcome:  # noqa: ARG001
    """Have a sink that cannot be written: every run fails, before it has received anything."""
    return Outcome(rows=messages.select(KEPT.names))


PIPELINE: Final = Pipeline(
    "failing", topics=[ALARMS, CRASHES, ROWS], consumers=[raising, crashing, unwritable]
)

defs = definitions([PIPELINE])
