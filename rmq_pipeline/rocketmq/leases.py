"""Leases of push consumers: they last as long as the client that has them lives.

The protocol has no call by which a client prolongs a lease. The broker does it for those that asked
for it, so that a slow listener gets no duplicates, and ends the leases of a client that has gone.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import receipt
from rmq_pipeline.broker.settling.each import Renew
from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.rocketmq.alarm import Alarm
from rmq_pipeline.rocketmq.bridge import Bridge
from rmq_pipeline.rocketmq.clients import Clients

log = logging.getLogger(__name__)

#: What a lease is given, how often all are looked at, and after which time it is given it anew.
LEASE_MS: Final = 60_000
LOOK_MS: Final = 5_000
RENEW_AFTER_MS: Final = 20_000
#: A message that is held for longer than this is given up on: it comes again.
HELD_MAX_MS: Final = 3 * 3_600_000
#: For how long a client that has gone has its messages: the shortest there is.
_AT_ONCE_MS: Final = 1
#: Receipts that are renewed in one step.
_STEP: Final = 10_000


@dataclass(slots=True)
class _Lease:
    since_ms: int
    renewed_ms: int


class Leases:
    """The running deliveries of push consumers, by client and receipt handle. For the loop."""

    def __init__(self, clock: Clock, bridge: Bridge, *, alarm: Alarm, clients: Clients) -> None:
        self._clock = clock
        self._bridge = bridge
        self._alarm = alarm
        self._clients = clients
        self._held: dict[str, dict[str, _Lease]] = {}
        self._closed = False
        #: When all are looked at next.
        self._next_ms = 0
        clients.on_gone(self._end)
        self._look_again()

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def close(self) -> None:
        """Prolong nothing more."""
        self._closed = True

    def hold(self, client_id: str, handles: Iterable[str]) -> None:
        """A client was given these, and lets the broker prolong them."""
        now_ms = self._clock.now_ms()
        held = self._held.setdefault(client_id, {})
        held.update((handle, _Lease(now_ms, now_ms)) for handle in handles)

    def has(self, client_id: str, handle: str) -> bool:
        """Whether a client holds this one."""
        return handle in self._held.get(client_id, ())

    def settled(self, client_id: str, handle: str) -> None:
        """A delivery is settled, or its client has given it another end."""
        held = self._held.get(client_id)
        if held is not None and held.pop(handle, None) is not None and not held:
            del self._held[client_id]

    def _look_again(self) -> None:
        self._next_ms = self._clock.now_ms() + LOOK_MS
        self._alarm.at(self._next_ms, lambda: self._bridge.spawn(self._look_and_go_on))

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
            due += [
                (client_id, handle)
                for handle, lease in self._held[client_id].items()
                if now_ms - lease.renewed_ms >= RENEW_AFTER_MS
            ]
        for start in range(0, len(due), _STEP):
            await self._renew(due[start : start + _STEP], now_ms)

    async def _renew(self, due: list[tuple[str, str]], now_ms: int) -> None:
        # In the step before, a client may have gone: nothing is to come after the end it was given.
        due = [(client_id, handle) for client_id, handle in due if self.has(client_id, handle)]
        holds = await self._submit([handle for _, handle in due], LEASE_MS)
        for (client_id, handle), held in zip(due, holds, strict=True):
            lease = self._held.get(client_id, {}).get(handle)
            if lease is None:
                continue
            lease.renewed_ms = now_ms
            if not held or now_ms - lease.since_ms >= HELD_MAX_MS:
                self.settled(client_id, handle)

    def _end(self, client_id: str) -> None:
        """A client has gone: others are to have its messages, and that attempt counts."""
        held = self._held.pop(client_id, None)
        if held:
            log.info("a client has gone", extra={"client_id": client_id, "leases": len(held)})
            handles = list(held)
            self._bridge.start(lambda: self._submit(handles, _AT_ONCE_MS))

    async def _submit(self, handles: list[str], duration_ms: int) -> Any:
        receipts = receipt.decode(pa.array(handles, pa.string()))
        try:
            return await self._bridge.submit(Renew(receipts, duration_ms))
        except RocketMQError as error:  # they end by themselves, or are renewed next time
            log.warning("leases could not be given another end: %s", error)
            return [True] * len(handles)
