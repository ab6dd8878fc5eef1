"""HTTP/2 as somebody says it who has read about it: calls, and much else beside them."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Mapping
    from types import TracebackType

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RESET, SETTINGS, PROMISE, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x4, 0x8, 0x20
#: The longest frame that anybody takes who has not said otherwise.
LONGEST: Final = 16_384


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    length = len(payload)
    return struct.pack(">BHBBI", length >> 16, length & 0xFFFF, kind, flags, stream) + payload


def fields(values: Mapping[str, str], chance: random.Random) -> bytes:
    """A header block: some of the fields are kept in the table, some are not."""
    texts = [(name.encode(), value.encode()) for name, value in values.items()]
    return b"".join(
        bytes([chance.choice((0x00, 0x10, 0x40)), len(name)]) + name + _counted(value)
        for name, value in texts
    )


def _counted(value: bytes) -> bytes:
    if len(value) < 127:
        return bytes([len(value)]) + value
    assert len(value) < 255
    return bytes([127, len(value) - 127]) + value


class Speaker:
    """A connection on which calls are begun, and much else."""

    def __init__(self, address: str, chance: random.Random, *, patience_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._chance = chance
        self._socket = socket.create_connection((host, int(port)), timeout=patience_s)
        self._next = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def say(self, some: Iterable[bytes]) -> bool:
        """Send these in pieces of any size; whether the other side still listens."""
        data = b"".join(some)
        try:
            while data:
                size = self._chance.choice((len(data), len(data), self._chance.randrange(1, 2000)))
                self._socket.sendall(data[:size])
                data = data[size:]
        except OSError:
            return False
        return True

    def hear(self, *, within_s: float = 0.0) -> None:
        """Read something of what has come, or comes in time."""
        patience_s = self._socket.gettimeout()
        self._socket.settimeout(within_s)
        with contextlib.suppress(OSError):
            self._socket.recv(1 << 16)
        self._socket.settimeout(patience_s)

    def hear_out(self) -> None:
        """Say that nothing more comes, and read until the other side has ended, or says nothing."""
        self._socket.settimeout(0.5)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(1 << 16):
                pass

    def call(self, path: str, message: bytes, *, headers: Mapping[str, str]) -> list[bytes]:
        """The frames of a call; now and then it is not said to its end."""
        chance, stream = self._chance, self._next
        self._next += 2
        given = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
            "grpc-timeout": chance.choice(("200m", "1S", "3S")),
            **headers,
        }
        body = b"\0" + struct.pack(">I", len(message)) + message
        made = self._headers(fields(given, chance), stream)
        cut = chance.randrange(len(body) + 1)
        flags = chance.choice((END_STREAM,) * 4 + (0,))
        if len(body) < LONGEST and chance.random() < 0.7:
            made.append(frame(DATA, body, flags=flags, stream=stream))
        else:
            made.append(frame(DATA, body[:cut][:LONGEST], stream=stream))
            made.append(frame(DATA, body[cut:][:LONGEST], flags=flags, stream=stream))
        return made

    def _headers(self, block: bytes, stream: int) -> list[bytes]:
        how = self._chance.randrange(6)
        if how == 0:  # padding, and a priority
            padded = b"\x03" + bytes(5) + block + bytes(3)
            flags = END_HEADERS | PADDED | WITH_PRIORITY
            return [frame(HEADERS, padded, flags=flags, stream=stream)]
        if how == 1:
            at = self._chance.randrange(len(block))
            return [
                frame(HEADERS, block[:at], stream=stream),
                frame(CONTINUATION, block[at:], flags=END_HEADERS, stream=stream),
            ]
        return [frame(HEADERS, block, flags=END_HEADERS, stream=stream)]

    def aside(self) -> bytes:
        """What is said beside calls."""
        chance = self._chance
        stream = chance.choice((0, 0, 1, max(1, self._next - 2), self._next + 4))
        value = chance.choice((0, 1, 9, 0x4000, 0xFFFF, 1 << 20, (1 << 31) - 1, (1 << 32) - 1))
        setting = struct.pack(">HI", chance.randrange(8), value)
        return chance.choice(
            (
                frame(SETTINGS, setting, flags=chance.choice((0, 0, 0, 1))),
                frame(SETTINGS, flags=1),
                frame(WINDOW, struct.pack(">I", value), stream=stream),
                frame(PING, chance.randbytes(8), flags=chance.randrange(2)),
                frame(RESET, struct.pack(">I", chance.randrange(14)), stream=stream),
                frame(PRIORITY, bytes(5), stream=stream),
                frame(GOAWAY, struct.pack(">II", stream, chance.randrange(14))),
                frame(DATA, chance.randbytes(20), stream=stream),
                frame(HEADERS, flags=END_STREAM | END_HEADERS, stream=stream),
                frame(PROMISE, bytes(4), stream=stream),
                frame(chance.randrange(10, 256), chance.randbytes(9), stream=stream),
            )
        )
