"""Receive of a call, bounded before it takes memory: a message, a call, all calls together.

The command of a call contains the length of its body. The broker reserves memory for the body
before it reads the first byte, or refuses the call.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.errors import BusyError, MessageBodyTooLargeError, RequestError
from rmq_pipeline.flight import framing

#: Smaller calls are accepted even if other calls hold all memory.
_SMALL_BYTES: Final = 64 * 1024
#: While a caller is refused for lack of memory, other callers may hold at most one part in this
#: many.
_SHARE: Final = 2
#: A caller refused for lack of memory is expected to retry within this time.
_RETRY_S: Final = 10.0
#: A call with an incomplete body is refused if nothing arrives for this long.
SILENT_S: Final = 10.0
#: A body that arrives at this rate may be read to its end, even while other callers are refused.
FAIR_BYTES_PER_S: Final = 16 * limits.MIB
#: Before this much time, the rate of a body counts as unknown.
_GRACE_S: Final = 2.0
#: Interval at which a call that waits for its body checks whether it must free its memory.
_LOOK_S: Final = 0.5


class Room:
    """Counts the bytes that calls hold, by caller. Thread-safe.

    A caller may hold all memory while no other caller needs it. When another caller is refused for
    lack of memory, callers with more than half of it lose their incomplete calls.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = 0
        self._by_caller: Counter[str] = Counter()
        #: Until this time on the monotonic clock, a caller with less than its share needs memory.
        self._wanted_until_s = 0.0

    @contextmanager
    def hold(self, size: int, *, caller: str, own: int = 0) -> Iterator[None]:
        """Reserve bytes for a call that already holds ``own`` bytes.

        Raises:
            MessageBodyTooLargeError: ``size`` exceeds the limit of one call.
            BusyError: all calls together hold too much, or this caller does.
        """
        if size > limits.FLIGHT_CALL_BYTES:
            raise MessageBodyTooLargeError(
                f"The call has {size} bytes; the limit is {limits.FLIGHT_CALL_BYTES}.",
                remedy="Send or settle fewer messages at a time.",
            )
        with self._lock:
            if own + size > _SMALL_BYTES:
                self._check_free(size, caller=caller, own=own)
            self._held += size
            self._by_caller[caller] += size
        try:
            yield
        finally:
            with self._lock:
                self._held -= size
                self._by_caller[caller] -= size
                if not self._by_caller[caller]:
                    del self._by_caller[caller]

    def check_share(self, caller: str, *, bytes_per_s: float = 0.0) -> None:
        """Refuse to read on for a caller that exceeds its share while another caller is refused.

        Args:
            caller: whose call it is.
            bytes_per_s: rate at which the body arrives; a fast body is soon over.

        Raises:
            BusyError: the caller exceeds its share.
        """
        with self._lock:
            is_slow = bytes_per_s < FAIR_BYTES_PER_S
            if is_slow and self._is_wanted() and self._by_caller[caller] > _share():
                self._refuse_share(caller)

    def _check_free(self, size: int, *, caller: str, own: int) -> None:
        mine = self._by_caller[caller] + size
        if self._is_wanted() and mine > _share():
            self._refuse_share(caller)
        if self._held > own and self._held + size > limits.FLIGHT_CALLS_BYTES:
            if mine <= _share():
                self._wanted_until_s = time.monotonic() + _RETRY_S
            raise BusyError(
                f"Calls under way hold {self._held} bytes, and {limits.FLIGHT_CALLS_BYTES} are"
                " the limit: try again in a moment, or send less at a time."
            )

    def _is_wanted(self) -> bool:
        return time.monotonic() < self._wanted_until_s

    def _refuse_share(self, caller: str) -> None:
        raise BusyError(
            f"Your calls hold {self._by_caller[caller]} bytes, and another caller is refused for"
            f" lack of memory. Until it has memory, the limit for one caller is {_share()} bytes.",
            remedy="Try again in a moment, or send less at a time.",
        )


def _share() -> int:
    return limits.FLIGHT_CALLS_BYTES // _SHARE


class Said(Protocol):
    """The messages of a call."""

    @property
    def messages(self) -> Iterator[framing.Message]:
        """Iterate over the messages; each is read on demand."""
        ...

    def read(self, timeout_s: float) -> framing.Message | None:
        """Return the next message, or None at the end.

        Raises:
            TimeoutError: none arrived within ``timeout_s``; the next ``read`` may return it.
        """
        ...


class Intake:
    """Reads the command and the body of one call, message by message."""

    def __init__(self, call: Said) -> None:
        """Create the reader; nothing is read yet."""
        self._call = call
        self._slices: list[memoryview] = []
        self._read = 0
        self._size: int | None = None
        self._began_s = time.monotonic()

    @property
    def is_over(self) -> bool:
        """True if the whole call was read, so that the caller waits for an answer."""
        return self._read == self._size

    def command(self) -> bytes:
        """Read the first message, and return the command of the call.

        Raises:
            RequestError: the message has no command.
        """
        message = next(self._call.messages, None)
        if message is None or message.command is None:
            raise RequestError("The call has no command: its first message begins with one.")
        if message.data:
            self._slices.append(message.data)
            self._read = message.data.nbytes
        return message.command

    def expect(self, size: int) -> None:
        """Set the length of the body, as given in the command.

        Raises:
            RequestError: the bytes read so far are longer.
        """
        self._size = size
        self._check(self._read)

    def body(self, check: Callable[[float], None] = lambda _: None) -> pa.Buffer:
        """Read the rest, and return the body of the call.

        Args:
            check: called twice a second, and for each message, with the bytes that arrive a
                second; may raise to end the call.

        Raises:
            RequestError: the body is longer or shorter than expected, or the caller stops sending.
        """
        size = self._size or 0
        while self._read < size and not self._slices:
            self._read_more(size, check)
        if self._read == size and len(self._slices) < 2:
            return pa.py_buffer(self._slices.pop() if self._slices else b"")
        buffer = pa.allocate_buffer(size)
        whole, at = memoryview(buffer).cast("B"), 0
        while True:
            for data in self._slices:
                whole[at : at + data.nbytes] = data
                at += data.nbytes
            self._slices.clear()
            if self._read == size:
                return buffer
            self._read_more(size, check)

    def _read_more(self, size: int, check: Callable[[float], None]) -> None:
        data = self._next(size, check)
        self._check(self._read + data.nbytes)
        self._slices.append(data)
        self._read += data.nbytes

    def _next(self, size: int, check: Callable[[float], None]) -> memoryview:
        """Wait for the next bytes of the body."""
        until_s = time.monotonic() + SILENT_S
        while time.monotonic() < until_s:
            check(self._rate())
            try:
                message = self._call.read(min(_LOOK_S, SILENT_S))
            except TimeoutError:
                continue
            if message is None:
                raise RequestError(
                    f"The call ended after {self._read} of the {size} bytes of its body."
                )
            if message.data:
                return message.data
        raise RequestError(
            f"The call has sent {self._read} of the {size} bytes of its body, and then nothing for"
            f" {SILENT_S:g} s, while other calls wait for its memory.",
            remedy="Call again.",
        )

    def _rate(self) -> float:
        """Return the bytes that have arrived a second; infinite during the first moments."""
        elapsed_s = time.monotonic() - self._began_s
        # A caller that announces much and sends nothing gets no more than one look.
        grace_s = _GRACE_S if self._read else _LOOK_S
        return self._read / elapsed_s if elapsed_s > grace_s else math.inf

    def _check(self, read: int) -> None:
        if self._size is not None and read > self._size:
            raise RequestError(
                f"The call sends more than the {self._size} bytes that its command says."
            )
