"""Users of the page: who has signed in, and the client with which each of them asks the broker."""

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from rmq_pipeline.errors import BusyError, RocketMQError, UnauthorizedError
from rmq_pipeline.flight.client import Client

#: A session ends when it was not used for this long, or at the restart of the process.
IDLE_S: Final = 12 * 3600.0
#: Sessions at a time; a new one ends the session that was not used for the longest time.
MOST: Final = 200
#: Sign-ins that wait for the broker's answer at a time: a wrong password costs the broker a call.
_SIGN_INS: Final = 4
#: Time for which a further sign-in waits.
_PATIENCE_S: Final = 2.0

#: Makes a client for a user and password; for None and None one without credentials.
Connect = Callable[[str | None, str | None], Client]


@dataclass
class Session:
    """A user who has signed in."""

    user: str
    client: Client
    used_at_s: float


class Sessions:
    """Sessions by their secret; thread-safe."""

    def __init__(
        self,
        connect: Connect,
        *,
        now: Callable[[], float] = time.monotonic,
        most: int = MOST,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._patience_s = patience_s
        self._connect = connect
        self._most = most
        self._now = now
        self._lock = threading.Lock()
        self._by_secret: dict[str, Session] = {}
        self._sign_ins = threading.BoundedSemaphore(_SIGN_INS)
        self._anonymous = connect(None, None)

    def sign_in(self, user: str, password: str) -> str:
        """Check a password at the broker; return the secret of a new session.

        Raises:
            UnauthorizedError: the user does not exist, is disabled, or has another password.
            BusyError: too many sign-ins are running.
        """
        if not user or not password:
            raise UnauthorizedError(
                "The sign-in has no user or no password.", remedy="Fill in both fields."
            )
        if not self._sign_ins.acquire(timeout=self._patience_s):
            raise BusyError("Too many sign-ins are running.", remedy="Try again in a second.")
        try:
            client = self._connect(user, password)
            try:
                client.ping()
            except BaseException:
                client.close()
                raise
        finally:
            self._sign_ins.release()
        secret = secrets.token_urlsafe(32)
        with self._lock:
            self._end_old()
            self._by_secret[secret] = Session(user, client, self._now())
        return secret

    def _end_old(self) -> None:
        oldest_first = sorted(self._by_secret.items(), key=lambda each: each[1].used_at_s)
        excess = len(oldest_first) - self._most + 1
        for number, (secret, session) in enumerate(oldest_first):
            if number < excess or self._now() - session.used_at_s > IDLE_S:
                # A redrive of the user may still run with the client, so it stays open.
                del self._by_secret[secret]

    def sign_out(self, secret: str | None) -> None:
        """End a session; does nothing if there is none."""
        with self._lock:
            self._by_secret.pop(secret or "", None)

    def find(self, secret: str | None, *, is_used: bool = True) -> Session | None:
        """Return the session of a secret, if it has not ended.

        Args:
            secret: as ``sign_in`` returned it.
            is_used: False for a request of the page itself, which does not prolong the session.
        """
        with self._lock:
            session = self._by_secret.get(secret or "")
            if session is None or self._now() - session.used_at_s > IDLE_S:
                return None
            if is_used:
                session.used_at_s = self._now()
            return session

    def client(self, secret: str | None, *, is_used: bool = True) -> Client:
        """Return the client of a session; without one, a client that has no credentials.

        The broker answers the latter while its access control is off, and refuses it otherwise.
        """
        session = self.find(secret, is_used=is_used)
        return self._anonymous if session is None else session.client

    def close(self) -> None:
        """End all sessions and disconnect."""
        with self._lock:
            clients = [each.client for each in self._by_secret.values()]
            self._by_secret.clear()
        for client in (*clients, self._anonymous):
            with suppress(RocketMQError, OSError):
                client.close()
