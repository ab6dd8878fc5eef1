"""Lease of an upkeep window, renewed during a call of user code of any length."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rmq_pipeline.errors import FencedError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.windows import IN_A_CALL_LEASE_MS, IN_A_CALL_RENEW_MS, Fence

logger = logging.getLogger(__name__)

#: Interval of renewals.
RENEW_S = IN_A_CALL_RENEW_MS / 1000


@contextmanager
def held(client: Client, window: Fence) -> Iterator[None]:
    """Renew the window's lease; its length tells other windows that a call is running.

    Args:
        client: client of the broker; also used from the renewing thread.
        window: name and epoch.

    Raises:
        FencedError: another window has already taken over. If one takes over later, the next verb
            with this fence raises.
    """
    over = threading.Event()

    def renew() -> None:
        while not over.wait(RENEW_S):
            try:
                _renew(client, window)
            except FencedError:
                return
            except Exception as error:  # noqa: BLE001 - the next renewal may succeed
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
