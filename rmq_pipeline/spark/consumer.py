"""A window of a Spark consumer: receive, walk in Spark, settle, until nothing more comes."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rmq_pipeline.spark.report import BatchReport, WindowReport
from rmq_pipeline.spark.spec import ConsumerSpec
from rmq_pipeline.spark.tenure import Tenure
from rmq_pipeline.spark.verbs import Verbs
from rmq_pipeline.spark.window import Bounds, Window

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["BatchReport", "ConsumerSpec", "WindowReport", "run_window"]


def run_window(
    spec: ConsumerSpec,
    verbs: Verbs,
    *,
    spark: "Callable[[], SparkSession]",
    owner: str,
    idle_s: float = 20.0,
    length_s: float = 600.0,
    on_batch: Callable[[BatchReport], None] | None = None,
    takeover: bool = False,
    parallelism: int = 2,
    handoff: Path | None = None,
) -> WindowReport:
    """Handle a group's messages until none came for ``idle_s``, or for ``length_s`` in all.

    Args:
        spec: the consumer.
        verbs: flight.client.Client, or the broker itself.
        spark: gives the session; called when the first message is there.
        owner: who this is, unique to this run.
        on_batch: called after each settled micro-batch, in the caller's thread.
        takeover: end a living window instead of yielding to it.
        parallelism: tasks of a micro-batch.
        handoff: a folder that driver and tasks reach; None: below the sink, or a temporary one.

    Raises:
        BrokerUnavailableError: no broker answers; the next window goes on from what is settled.
        RocketMQError: the broker refused a micro-batch for another reason than its receipts.
    """
    started = time.monotonic()
    tenure = Tenure(verbs, name=spec.window, owner=owner)
    report = WindowReport(spec.name, spec.topic, spec.group)
    report.yielded_to = tenure.open(takeover=takeover)
    if report.yielded_to is not None:
        report.ended = "yielded"
        return report
    bounds = Bounds(idle_s=idle_s, ends_at=started + length_s, parallelism=parallelism)
    with tenure, _folder(spec, handoff) as folder:
        window = Window(spec, verbs, tenure=tenure, spark=spark, bounds=bounds, handoff=folder)
        for batch in window.run():
            report.add(batch)
            if on_batch is not None:
                on_batch(batch)
    report.ended, report.lost, report.swept_files = window.ended, window.lost, window.swept_files
    report.epoch, report.seconds = tenure.epoch, time.monotonic() - started
    return report


@contextmanager
def _folder(spec: ConsumerSpec, parent: Path | None) -> Iterator[Path]:
    """A folder for tables too large for a row; gone with the window."""
    parent = parent or (spec.sink / "_handoff" if spec.sink else None)
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="rmq-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
