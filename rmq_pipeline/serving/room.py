"""Room on a full disk for what a start has to write."""

import logging
from collections.abc import Callable
from typing import TypeVar

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.room import part_of
from rmq_pipeline.store.log_file import FULL

log = logging.getLogger(__name__)
Written = TypeVar("Written")


def with_room(broker: Broker, write: Callable[[], Written]) -> Written:
    """What ``write`` returns; while the disk is full for it, parts of the reserve go to the disk.

    A broker that does not start lets no consumer drain it, which is what the reserve is for.

    Raises:
        StoreFullError: nothing is left of the reserve.
        OSError: it failed for another reason.
    """
    while True:
        try:
            return write()
        except OSError as error:
            if not is_full(error):
                raise
            log.warning("the disk is full (%s): a part of the reserve is given up", error)
            engine = broker.engine
            engine.log.draw_reserve(part_of(engine.settings.reserve_bytes))


def is_full(error: OSError) -> bool:
    """Whether there was no room: on the disk, or in this user's part of it."""
    return error.errno in FULL
