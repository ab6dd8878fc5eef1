"""Leases of push consumers, which the broker renews while their client lives.

The protocol has no call to renew a lease. The broker renews the leases of clients that ask for it
(``auto_renew``), so that a slow listener gets no duplicates. It ends the leases of a dead client.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import receipt
from rmq_pipeline.broker.verbs.on_loop import Bridge
from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.rocketmq.clients import Clients

log = logging.getLogger(__name__)

#: Duration of a lease, interval of the checks, and the age at which a lease is renewed.
LEASE_MS: Final = 60_000
LOOK_MS: Final = 5_000
RENEW_AFTER_MS: Final = 20_000
#: A lease is never renewed beyond this age; then the broker redelivers the message.
HELD_MAX_MS: Final = 3 * 3_600_000
#: Remaining duration of a dead client's leases: the shortest there is.
_AT_ONCE_MS: Final = 1
#: Receipts that are renewed in one step.
_STEP: Final = 10_000


@dataclass(slots=True)
class _Lease:
    since_ms: int
    renewed_ms: int


class Leases:
    """Leases of push consumers by client and receipt handle. Used on the event loop only."""

    def __init__(self, clock: Clock, bridge: Bridge, *, clients: Clients) -> None:
        self._clock = clock
        self._bridge = bridge
        self._clients = clients
        self._held: dict[str, dict[str, _Lease]] = {}
        self._closed = False
        #: Time of the next check.
        self._next_ms = 0
        clients.on_gone(self._end)
        self._look_again()

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def close(self) -> None:
        """Stop renewing."""
        self._closed = True

    def hold(self, client_id: str, handles: Iterable[str]) -> None:
        """Renew these leases from now on for a client."""
        now_ms = self._clock.now_ms()
        held = self._held.setdefault(client_id, {})
        held.update((handle, _Lease(now_ms, now_ms)) for handle in handles)

    def has(self, client_id: str, handle: str) -> bool:
        """Return whether a client holds a lease that the broker renews."""
        return handle in self._held.get(client_id, ())

    def settled(self, client_id: str, handle: str) -> None:
        """Stop renewing a lease, because it is settled or its client changed its end."""
        held = self._held.get(client_id)
        if held is not None and held.pop(handle, None) is not None and not held:
            del self._held[client_id]

    def _look_again(self) -> None:
        self._next_ms = self._clock.now_ms() + LOOK_MS
        self._bridge.timers.at(self._next_ms, lambda: self._bridge.spawn(self._look_and_go_on))

    async def _look_and_go_on(self) -> None:
        try:
            await self._look()
        finally:
            if not self._closed:
                self._look_again()

    async def _look(self) -> None:
        now_ms = self._clock.now_ms()
        due: list[tuple[str, str]] = []
        for client_id in list(self._held):
            if not self._clients.is_live(client_id):
                self._end(client_id)
                continue
            held = self._held[client_id].items()
            aged = [h for h, lease in held if now_ms + LEASE_MS > lease.since_ms + HELD_MAX_MS]
            for handle in aged:
                self.settled(client_id, handle)
            due += [
                (client_id, handle)
                for handle, lease in held
                if now_ms - lease.renewed_ms >= RENEW_AFTER_MS
            ]
        for start in range(0, len(due), _STEP):
            await self._renew(due[start : start + _STEP], now_ms)

    async def _renew(self, due: list[tuple[str, str]], now_ms: int) -> None:
        # A client may have died during the step before; its leases must not outlive the end they
        # got.
        due = [(client_id, handle) for client_id, handle in due if self.has(client_id, handle)]
        holds = await self._submit([handle for _, handle in due], LEASE_MS)
        for (client_id, handle), held in zip(due, holds, strict=True):
            lease = self._held.get(client_id, {}).get(handle)
            if lease is None:
                continue
            lease.renewed_ms = now_ms
            if not held:
                self.settled(client_id, handle)

    def _end(self, client_id: str) -> None:
        """End a dead client's leases: its attempts count, and the messages are redelivered."""
        held = self._held.pop(client_id, None)
        if held:
            log.info(
                "ending the leases of a dead client",
                extra={"client_id": client_id, "leases": len(held)},
            )
            handles = list(held)
            self._bridge.start(lambda: self._submit(handles, _AT_ONCE_MS))

    async def _submit(self, handles: list[str], duration_ms: int) -> Any:
        receipts = receipt.decode(pa.array(handles, pa.string()))
        try:
            return await self._bridge.renew(receipts, duration_ms)
        except RocketMQError as error:  # the leases run out, or the next check renews them
            log.warning("leases could not be renewed or ended: %s", error)
            return [True] * len(handles)
