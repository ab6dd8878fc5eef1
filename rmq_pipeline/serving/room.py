"""Free space for the files that a start writes while the disk is full."""

import logging
from collections.abc import Callable
from typing import TypeVar

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.room import part_of
from rmq_pipeline.store.log_file import FULL

log = logging.getLogger(__name__)
Written = TypeVar("Written")


def with_room(broker: Broker, write: Callable[[], Written]) -> Written:
    """Call ``write`` and return its result, freeing parts of the reserve while the disk is full.

    The reserve exists so that consumers can drain a full broker. They need a broker that starts.

    Raises:
        StoreFullError: the reserve is used up.
        OSError: ``write`` failed for another reason.
    """
    while True:
        try:
            return write()
        except OSError as error:
            if not is_full(error):
                raise
            log.warning("the disk is full (%s): freeing a part of the reserve", error)
            engine = broker.engine
            engine.log.draw_reserve(part_of(engine.settings.reserve_bytes))


def is_full(error: OSError) -> bool:
    """Return True if the disk or the user's disk quota is full."""
    return error.errno in FULL
