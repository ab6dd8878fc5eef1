"""A window of a consumer: receive, handle and settle until no more messages come."""

import time
from collections.abc import Callable
from contextlib import closing
from typing import Final, Required, TypedDict

from typing_extensions import Unpack

from rmq_pipeline.handling.engine import Engine
from rmq_pipeline.handling.report import BatchReport, WindowReport
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.handling.tenure import Tenure
from rmq_pipeline.handling.window import Bounds, Window
from rmq_pipeline.verbs import Verbs

IDLE_S: Final = 20.0
LENGTH_S: Final = 600.0


class Terms(TypedDict, total=False):
    """Owner and limits of a window, independent of its engine."""

    #: Identifies the owner; unique to this run.
    owner: Required[str]
    #: Seconds without a message after which the window ends; default 20.
    idle_s: float
    #: Maximum length of the window in seconds; default 600.
    length_s: float
    #: Called after each settled micro-batch, in the caller's thread.
    on_batch: Callable[[BatchReport], None] | None
    #: Take over an open window instead of yielding to it.
    takeover: bool


def run_window(
    spec: ConsumerSpec, verbs: Verbs, *, engine: Engine, **terms: Unpack[Terms]
) -> WindowReport:
    """Handle a group's messages until none come.

    Args:
        spec: the consumer.
        verbs: flight.client.Client, or the broker itself.
        engine: runs the handler; not used before the first message.
        terms: see Terms.

    Raises:
        BrokerUnavailableError: no broker answers; the next window continues after the last settle.
        RocketMQError: the broker refused a micro-batch for another reason than its receipts.
    """
    started = time.monotonic()
    on_batch = terms.get("on_batch")
    tenure = Tenure(verbs, name=spec.window, owner=terms["owner"])
    report = WindowReport(spec.name, spec.topic, spec.group)
    report.yielded_to = tenure.open(takeover=terms.get("takeover", False))
    if report.yielded_to is not None:
        report.ended = "yielded"
        return report
    ends_at = started + terms.get("length_s", LENGTH_S)
    bounds = Bounds(idle_s=terms.get("idle_s", IDLE_S), ends_at=ends_at)
    with tenure:
        window = Window(spec, verbs, tenure=tenure, engine=engine, bounds=bounds)
        # Closing stops all work, also if on_batch raises.
        with closing(window.run()) as batches:
            for batch in batches:
                report.add(batch)
                if on_batch is not None:
                    on_batch(batch)
    report.ended, report.lost, report.swept_files = window.ended, window.lost, window.swept_files
    report.epoch, report.seconds = tenure.epoch, time.monotonic() - started
    return report
