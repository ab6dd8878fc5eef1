"""A window of a consumer: receive, have it handled, settle, until nothing more comes."""

import time
from collections.abc import Callable
from contextlib import closing
from typing import Final, Required, TypedDict

from typing_extensions import Unpack

from rmq_pipeline.handling.engine import Engine
from rmq_pipeline.handling.report import BatchReport, WindowReport
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.handling.tenure import Tenure
from rmq_pipeline.handling.verbs import Verbs
from rmq_pipeline.handling.window import Bounds, Window

IDLE_S: Final = 20.0
LENGTH_S: Final = 600.0


class Terms(TypedDict, total=False):
    """Whose window it is, and when it ends, whatever it runs on."""

    #: Who this is, unique to this run.
    owner: Required[str]
    #: It ends when no message came for so long, by default 20 s,
    idle_s: float
    #: or when it has lasted so long, by default 600 s.
    length_s: float
    #: Called after each settled micro-batch, in the caller's thread.
    on_batch: Callable[[BatchReport], None] | None
    #: End a living window instead of yielding to it.
    takeover: bool


def run_window(
    spec: ConsumerSpec, verbs: Verbs, *, engine: Engine, **terms: Unpack[Terms]
) -> WindowReport:
    """Handle a group's messages until none comes.

    Args:
        spec: the consumer.
        verbs: flight.client.Client, or the broker itself.
        engine: what the handler runs on; it is asked for nothing before the first message.
        terms: as Terms says.

    Raises:
        BrokerUnavailableError: no broker answers; the next window goes on from what is settled.
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
        # Also when on_batch raises, nothing works any more after this.
        with closing(window.run()) as batches:
            for batch in batches:
                report.add(batch)
                if on_batch is not None:
                    on_batch(batch)
    report.ended, report.lost, report.swept_files = window.ended, window.lost, window.swept_files
    report.epoch, report.seconds = tenure.epoch, time.monotonic() - started
    return report
