"""What the killed runs belong to: a pipeline with a checker and a Spark consumer, for Dagster.

RMQ_CHAOS_DESK names a folder in which the test says what the code is to do: a fault that is mended,
a call that is held up.
"""

import os
import threading
import time
from pathlib import Path
from typing import Final

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.orchestration.consumer import spark_consumer
from rmq_pipeline.orchestration.declarations import topic
from rmq_pipeline.orchestration.due_work import BUSY_FOR_MS
from rmq_pipeline.orchestration.operator_jobs import redrive_asset, redrive_job
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.orchestration.resources import resources_of
from rmq_pipeline.orchestration.sensors import due_work_sensor
from rmq_pipeline.orchestration.transaction_checker import (
    JOB,
    transaction_check_job,
    transaction_checker,
    transaction_checks,
)
from rmq_pipeline.orchestration.upkeep_assets import upkeep_asset, upkeep_job
from rmq_pipeline.orchestration.windows import JOBS

TOPIC: Final = "trades"
GROUP: Final = "settlement"
STATE: Final = pa.schema([("seen", pa.int64())])
SETTLED: Final = pa.schema(
    [
        ("message_id", pa.string()),
        ("message_group", pa.string()),
        ("tag", pa.string()),
        ("number", pa.int64()),
        ("seen", pa.int64()),
        ("born_at_ms", pa.int64()),
    ]
)
#: What the local work of a half message came to, by its number. Of those that the producer leaves
#: open, the last is not known at the first check.
FATES: Final = ("commit", "commit", "rollback", "commit", "rollback", "commit")
ENDED: Final = 3
LATE_TO_KNOW: Final = 5
HELD_UP_S: Final = 120


def fate(number: int) -> str:
    """How a transaction ends."""
    return FATES[number % len(FATES)]


def is_left_open(number: int) -> bool:
    """Whether its producer never ends it."""
    return number % len(FATES) >= ENDED


def desk() -> Path:
    """Where the test leaves its word."""
    return Path(os.environ["RMQ_CHAOS_DESK"])


def held_up(name: str) -> None:
    """Say that a call is under way, and wait while it must be held up."""
    (desk() / f"asked-{name}").touch()
    give_up_at = time.monotonic() + HELD_UP_S
    while (desk() / f"hold-{name}").exists() and time.monotonic() < give_up_at:
        threading.Event().wait(0.02)


def is_mended(tag: str) -> bool:
    """Whether bad messages of this tag can be settled now."""
    return (desk() / f"mended-{tag}").exists()


def check(checks: pa.Table) -> list[str]:
    """What the local work came to."""
    if (desk() / "hold-checker").exists():
        held_up("checker")
        # Such a late answer is wrong, and no caller may use it.
        return ["rollback"] * checks.num_rows
    if (desk() / "closed").exists():
        return ["unknown"] * checks.num_rows
    return [
        "unknown" if number % len(FATES) == LATE_TO_KNOW and times == 1 else fate(number)
        for number, times in zip(
            map(int, checks["body"].to_pylist()), checks["checks"].to_pylist(), strict=True
        )
    ]


def settle(messages: pa.Table, state: pa.Table) -> Outcome:
    """Number what comes of a group; a bad message is a dead letter until its fault is mended."""
    tags = messages["tag"].to_pylist()
    if "slow" in tags and (desk() / "hold-handler").exists():
        held_up("handler")
    mended = {tag: not tag.startswith("bad") or is_mended(tag) for tag in set(tags)}
    good = pa.array([mended[tag] for tag in tags])
    bad = messages.filter(pc.invert(good)).select(["queue_id", "queue_offset"])
    results = bad.append_column("outcome", pa.array(["dead_letter"] * bad.num_rows, pa.string()))
    messages = messages.filter(good)
    n = messages.num_rows
    if not n:
        return Outcome(results=results)
    has_group = messages["message_group"][0].is_valid
    seen = state["seen"][0].as_py() if state.num_rows else 0
    columns = {
        "message_id": messages["message_id"],
        "message_group": messages["message_group"],
        "tag": messages["tag"],
        "number": pa.array([int(body) for body in messages["body"].to_pylist()], pa.int64()),
        "seen": pa.array(range(seen + 1, seen + n + 1) if has_group else [None] * n, pa.int64()),
        "born_at_ms": messages["born_at_ms"],
    }
    after = pa.table({"seen": [seen + n]}, schema=STATE) if has_group else None
    return Outcome(rows=pa.table(columns, schema=SETTLED), state=after, results=results)


TRADES: Final = topic(TOPIC, type="mixed", queues=3)
SETTLEMENT: Final = spark_consumer(
    topic=TRADES,
    group=GROUP,
    order_by="message_group",
    state=STATE,
    sink=GROUP,
    sink_schema=SETTLED,
    # A delivery that a kill has cut short is no attempt: one that fails is the last.
    max_attempts=1,
)(settle)
PIPELINE: Final = Pipeline(
    "exchange",
    topics=[TRADES],
    consumers=[SETTLEMENT],
    checkers=[transaction_checker(topic=TRADES)(check)],
)
_UPKEEP: Final = [job for job in JOBS.values() if job.name != JOB]
_WINDOWS: Final = [*map(upkeep_job, _UPKEEP), transaction_check_job(PIPELINE.checkers)]

defs = dg.Definitions.merge(
    dg.Definitions(
        assets=[
            *map(upkeep_asset, _UPKEEP),
            transaction_checks(PIPELINE.checkers),
            redrive_asset(),
        ],
        jobs=[*_WINDOWS, redrive_job()],
        sensors=[due_work_sensor(JOBS, _WINDOWS, busy_for_ms=BUSY_FOR_MS)],
        resources=resources_of(),
        executor=dg.in_process_executor,
    ),
    PIPELINE.definitions(),
)
