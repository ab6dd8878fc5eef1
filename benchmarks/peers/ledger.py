"""Numbered bodies, and the check that each arrives once, whole and in order."""

from __future__ import annotations

import os
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.peers.driver import Received

BODY_BYTES: Final = 1024
#: The producer, the key, and the number of the message among those of the producer.
_HEADER: Final = struct.Struct("<IIQ")
_FILLER: Final = os.urandom(1 << 20)
_FILLER_BYTES: Final = BODY_BYTES - _HEADER.size
#: A prime: bodies that follow each other have different fillers.
_STRIDE: Final = 1009


class CheckFailedError(Exception):
    """A consumer did not get what was sent. The workload has no figure."""


@dataclass
class Ledger:
    """The messages that producers have sent to one topic."""

    #: 0: messages have no keys.
    keys: int = 0
    made: Counter[int] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        """Messages of all producers."""
        with self._lock:
            return self.made.total()

    def bodies(self, producer: int, n: int) -> list[bytes]:
        """Return the next n bodies of a producer."""
        with self._lock:
            first = self.made[producer]
            self.made[producer] += n
        return [
            _HEADER.pack(producer, self._key(number), number) + _filler(number)
            for number in range(first, first + n)
        ]

    def keys_of(self, bodies: Sequence[bytes]) -> list[int]:
        """Return the keys of bodies; none if messages have no keys."""
        return [_HEADER.unpack_from(body)[1] for body in bodies] if self.keys else []

    def _key(self, number: int) -> int:
        return number % self.keys if self.keys else 0


def place_of(body: bytes) -> tuple[int, int]:
    """Return the producer of a body and its number."""
    producer, _, number = _HEADER.unpack_from(body)
    return producer, number


def _filler(number: int) -> bytes:
    start = number * _STRIDE % (len(_FILLER) - _FILLER_BYTES)
    return _FILLER[start : start + _FILLER_BYTES]


class Check:
    """What one group has received of a ledger's messages.

    Args:
        poisoned: the key whose messages the consumer fails: only its first one may come first.
    """

    def __init__(self, ledger: Ledger, *, in_order: bool = True, poisoned: int | None = None):
        self._ledger = ledger
        self._in_order = in_order
        self.poisoned = poisoned
        self._seen: dict[int, bytearray] = {}
        self._last: dict[tuple[int, int, int], int] = {}
        self.count = 0

    def take(self, received: Received) -> None:
        """Check the messages of a receive.

        Raises:
            CheckFailedError: one is repeated, out of order, or not what was sent.
        """
        streams = received.streams or [0] * len(received.bodies)
        began = False
        for body, stream in zip(received.bodies, streams, strict=True):
            producer, key, number = _HEADER.unpack_from(body)
            if body[_HEADER.size :] != _filler(number) or number >= self._ledger.made[producer]:
                raise CheckFailedError(f"message {producer}/{number} has another body")
            if key == self.poisoned and self._ledger.keys:
                if not began and number != key:
                    raise CheckFailedError(f"{number} overtook the failed message of its key")
                began = True
                continue
            self._note(producer, number)
            if self._in_order:
                # Of a message with a key the order counts in all queues.
                self._ordered((producer, key, 0 if self._ledger.keys else stream), number)

    def _note(self, producer: int, number: int) -> None:
        seen = self._seen.setdefault(producer, bytearray())
        if number >= len(seen):
            seen.extend(bytes(self._ledger.made[producer] - len(seen)))
        if seen[number]:
            raise CheckFailedError(f"message {producer}/{number} came twice")
        seen[number] = 1
        self.count += 1

    def _ordered(self, line: tuple[int, int, int], number: int) -> None:
        if number < self._last.get(line, -1):
            raise CheckFailedError(f"message {line[0]}/{number} came after {self._last[line]}")
        self._last[line] = number

    def finish(self) -> None:
        """Check that nothing is lost.

        Raises:
            CheckFailedError: messages are missing.
        """
        expected = self.expected
        if self.count != expected:
            raise CheckFailedError(f"{expected - self.count:,} of {expected:,} messages are lost")

    @property
    def expected(self) -> int:
        """Messages that a group acks in the end."""
        if self.poisoned is None:
            return self._ledger.total
        keys, poisoned = self._ledger.keys, self.poisoned
        with self._ledger._lock:  # noqa: SLF001
            made = self._ledger.made.values()
            return sum(n - len(range(poisoned, n, keys)) for n in made)
