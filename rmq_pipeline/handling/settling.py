"""Settling a micro-batch: one verb, asked again while the broker is busy."""

import logging
import threading
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline.errors import BrokerUnavailableError, BusyError
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.handling.verbs import Fence, Verbs
from rmq_pipeline.handling.worked import Worked

logger = logging.getLogger(__name__)

_PAUSE_S: Final = 0.25
_TRIES: Final = 240


def settle(
    verbs: Verbs,
    spec: ConsumerSpec,
    *,
    outcomes: pa.Table,
    worked: Worked,
    fence: Fence,
    number: int,
) -> dict[str, Any]:
    """Settle the outcomes of micro-batch ``number`` and all that came of them; the counts.

    Raises:
        FencedError, ReceiptHandleError: nothing was changed.
        BusyError: for a minute the broker could not take it, or does not answer.
    """
    pause = threading.Event()
    for tries_left in reversed(range(_TRIES)):
        try:
            return verbs.settle(
                spec.group,
                outcomes,
                # Repeating it is harmless: the broker knows the last one of a window.
                settle_id=f"{fence[1]}-{number}",
                window=fence,
                publish=worked.publish or None,
                sink_files=worked.files if worked.files.num_rows else None,
                state=worked.state,
                topic=spec.topic,
            )
        except BusyError as error:
            # A client has tried for long enough to reach a broker that is away.
            if isinstance(error, BrokerUnavailableError) or not tries_left:
                raise
            logger.info("settle waits group=%s number=%d why=%s", spec.group, number, error)
            pause.wait(_PAUSE_S)
    raise AssertionError("unreachable")
