"""Parts of every store of the log: how a broker waits for its turn to lead, and common errors."""

import os
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from typing import Final, NamedTuple

from rmq_pipeline.errors import HomeFormatError, LogFencedError, LogHeldError

#: Pause between two looks at the lease of another broker.
_LOOK_S: Final = 0.1
#: Renewals that a broker sees before it takes the other one for alive: one may have come late.
_SIGNS_OF_LIFE: Final = 2


class Held(NamedTuple):
    """The running lease of another broker."""

    holder: str
    lease_ms: int
    #: Differs after each renewal.
    mark: object


class LeadableStore(ABC):
    """A store that brokers take turns to lead; see LogStore."""

    def __init__(self, address: str, *, home_format: int) -> None:
        """Prepare the store of a broker whose home has a format."""
        self.address = address
        self.id = ""
        self.seed = 0
        self.epoch = 0
        self._home_format = home_format
        #: Name of this broker in the store, a new one in each process.
        self._writer = secrets.token_hex(16)

    @abstractmethod
    def _try_to_lead(self, *, force: bool) -> Held | None:
        """Begin to lead and return None, or return the running lease of another broker."""

    @abstractmethod
    def begin(self, position: int, frame: bytes) -> None:
        """See LogStore."""

    @abstractmethod
    def finish(self) -> None:
        """See LogStore."""

    @abstractmethod
    def abandon(self) -> None:
        """See LogStore."""

    def claim(self, *, seconds: float | None, force: bool = False) -> None:
        """See LogStore."""
        began, pause = time.monotonic(), threading.Event()
        seen: list[object] = []
        while (held := self._try_to_lead(force=force)) is not None:
            if not seen or seen[-1] != held.mark:
                seen.append(held.mark)
            waited_s = time.monotonic() - began
            if (
                seconds is None
                or len(seen) > _SIGNS_OF_LIFE
                or waited_s > seconds + held.lease_ms / 1000
            ):
                self.abandon()
                raise LogHeldError(f"The commit log in {self.address} is led by {held.holder}.")
            pause.wait(_LOOK_S)

    def append(self, position: int, frame: bytes) -> None:
        """See LogStore."""
        self.begin(position, frame)
        self.finish()

    def _check_home_format(self, found: int) -> None:
        if found > self._home_format:
            raise HomeFormatError(
                f"The commit log in {self.address} was written by a home of format {found}; this"
                f" version has format {self._home_format}.",
                remedy="Use the version of rmq_pipeline that led last, or a newer one.",
            )

    def _fenced(self) -> LogFencedError:
        return LogFencedError(
            f"Another broker leads the commit log in {self.address};"
            f" the epoch {self.epoch} of this one is over."
        )


def holder() -> str:
    """Return the name of this process for people."""
    return f"{socket.gethostname()}, process {os.getpid()}"
