"""Settle of a micro-batch: one verb, retried while the broker is busy."""

import logging
import threading
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline.errors import BrokerUnavailableError, BusyError, MessageBodyTooLargeError
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.handling.worked import TooMuchError, Worked
from rmq_pipeline.verb import Window
from rmq_pipeline.verbs import Verbs

logger = logging.getLogger(__name__)

_PAUSE_S: Final = 0.25
_TRIES: Final = 240


def settle(
    verbs: Verbs,
    spec: ConsumerSpec,
    *,
    outcomes: pa.Table,
    worked: Worked,
    fence: Window,
    number: int,
) -> dict[str, Any]:
    """Settle the outcomes of micro-batch ``number`` and its results; return the counts.

    Raises:
        FencedError, ReceiptHandleError: nothing was changed.
        TooMuchError: the batch exceeds the limit of one settle; nothing was changed.
        BusyError: the broker was busy for a minute, or does not answer.
    """
    worked.check_size()
    pause = threading.Event()
    for tries_left in reversed(range(_TRIES)):
        try:
            return verbs.settle(
                spec.group,
                outcomes,
                # Repeating is safe: the broker remembers the last settle of a window.
                settle_id=f"{fence[1]}-{number}",
                window=fence,
                publish=worked.publish or None,
                sink_files=worked.files if worked.files.num_rows else None,
                state=worked.state,
                topic=spec.topic,
            )
        except MessageBodyTooLargeError as error:
            raise TooMuchError(str(error), is_refused=True) from error
        except BusyError as error:
            # The client has already retried for long enough to reach an absent broker.
            if isinstance(error, BrokerUnavailableError) or not tries_left:
                raise
            logger.info("settle waits group=%s number=%d why=%s", spec.group, number, error)
            pause.wait(_PAUSE_S)
    raise AssertionError("unreachable")
