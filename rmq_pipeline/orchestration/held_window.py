"""Holding an upkeep window beside a call of user code, which takes as long as it takes."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rmq_pipeline.errors import FencedError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.windows import IN_A_CALL_LEASE_MS, IN_A_CALL_RENEW_MS, Fence

logger = logging.getLogger(__name__)

#: How often the lease is renewed.
RENEW_S = IN_A_CALL_RENEW_MS / 1000


@contextmanager
def held(client: Client, window: Fence) -> Iterator[None]:
    """Keep the window's lease alive, and show by its length that a call is under way.

    Args:
        client: of the broker; used from a thread of its own as well.
        window: name and epoch.

    Raises:
        FencedError: another window had taken over before. One that takes over later is met by what
            shows the fence next.
    """
    over = threading.Event()

    def renew() -> None:
        while not over.wait(RENEW_S):
            try:
                _renew(client, window)
            except FencedError:
                return
            except Exception as error:  # noqa: BLE001 - the next try may have an answer
                logger.warning("window not renewed name=%s error=%s", window[0], error)

    _renew(client, window)
    thread = threading.Thread(target=renew, name=f"hold {window[0]}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _renew(client: Client, window: Fence) -> None:
    name, epoch = window
    client.renew_window(name, epoch=epoch, duration_ms=IN_A_CALL_LEASE_MS)
