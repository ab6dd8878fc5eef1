"""What callers show to prove who they are, read and checked; nothing here says it in an error.

Three kinds: the signature of RocketMQ's clients, a password (HTTP's Basic), and a token that a
password bought (HTTP's Bearer).
"""

import base64
import binascii
import hashlib
import hmac
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from rmq_pipeline.errors import UnauthorizedError

ALGORITHM: Final = "MQv2-HMAC-SHA1"
#: Clients sign their local time and call it UTC, so an honest one is 14 h off, and its clock may
#: be wrong besides. What is further away was signed long ago by somebody else.
SIGNED_WITHIN_MS: Final = 36 * 3600 * 1000
_SHA1_BYTES: Final = 20
_DATE_TIME: Final = re.compile(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z", re.ASCII)
#: Longer headers are not looked at.
_HEADER_LENGTH: Final = 4096
_BEARER: Final = b"rmq-bearer:"


@dataclass(frozen=True, slots=True)
class Claim:
    """Who a caller says it is, and what proves it."""

    user: str
    #: Signature, password or seal, by kind.
    proof: bytes


# --------------------------------------------------------------------------- RocketMQ's signature


def read_signature(authorization: str | None) -> Claim | None:
    """What a header of RocketMQ's clients claims; None: nothing, the caller is anonymous.

    The clients of some languages send the header without a credential when they have none.

    Raises:
        UnauthorizedError: it is garbled.
    """
    if not authorization:
        return None
    if len(authorization) > _HEADER_LENGTH:
        raise UnauthorizedError("The authorization header is too long.")
    algorithm, _, rest = authorization.strip().partition(" ")
    items = [item.strip().partition("=") for item in rest.split(",")]
    fields = {name.strip(): value.strip() for name, _, value in items}
    user = fields.get("Credential", "").partition("/")[0]
    if not user and algorithm == ALGORITHM:
        return None
    if algorithm != ALGORITHM:
        raise UnauthorizedError(f"The authorization header does not begin with {ALGORITHM}.")
    try:
        proof = bytes.fromhex(fields.get("Signature", ""))
    except ValueError:
        proof = b""
    if len(proof) != _SHA1_BYTES:
        raise UnauthorizedError("The signature of the authorization header is no HMAC-SHA1 in hex.")
    return Claim(user, proof)


def sign(secret: str, date_time: str) -> bytes:
    """The signature that RocketMQ's clients make of their ``x-mq-date-time`` header."""
    return hmac.digest(secret.encode(), date_time.encode(), "sha1")


def check_signed_at(date_time: str, now_ms: int) -> None:
    """Refuse a time far from now; a text that is none is what a client of that kind signs.

    Raises:
        UnauthorizedError: it is too far away.
    """
    parts = _DATE_TIME.fullmatch(date_time)
    if parts is None:
        return
    year, month, day, hour, minute, second = map(int, parts.groups())
    try:
        signed = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return
    if abs(signed.timestamp() * 1000 - now_ms) > SIGNED_WITHIN_MS:
        raise UnauthorizedError(f"x-mq-date-time {date_time} is days away: set the clock.")


# ------------------------------------------------------------------------------- Basic and Bearer


def basic(user: str, password: str) -> str:
    """The authorization header of a user with a password."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def read_basic(value: str) -> Claim:
    """What the header after ``Basic`` claims.

    Raises:
        UnauthorizedError: it is garbled.
    """
    try:
        user, colon, password = base64.b64decode(value, validate=True).partition(b":")
        name = user.decode()
    except (binascii.Error, ValueError) as error:
        raise UnauthorizedError("The Basic credentials are garbled.") from error
    if not colon:
        raise UnauthorizedError("The Basic credentials are garbled.")
    return Claim(name, password)


def bearer(user: str, secret: str, *, until_ms: int) -> str:
    """A token that stands for the password until then, or until the password changes."""
    return f"{user}:{until_ms}:{_seal(user, secret, until_ms=until_ms).hex()}"


def read_bearer(value: str) -> tuple[Claim, int]:
    """What a token claims, and until when.

    Raises:
        UnauthorizedError: it is garbled.
    """
    user, _, rest = value.partition(":")
    until, _, seal = rest.partition(":")
    try:
        if not (until.isascii() and until.isdecimal()):
            raise ValueError
        return Claim(user, bytes.fromhex(seal)), int(until)
    except ValueError as error:
        raise UnauthorizedError("The token is garbled.") from error


def seals(claim: Claim, secret: str, *, until_ms: int) -> bool:
    """Whether a token was made with this secret."""
    return hmac.compare_digest(_seal(claim.user, secret, until_ms=until_ms), claim.proof)


def is_password(claim: Claim, secret: str) -> bool:
    """Whether the proof is the password; takes as long whatever they have in common."""
    ours, theirs = hashlib.sha256(secret.encode()), hashlib.sha256(claim.proof)
    return hmac.compare_digest(ours.digest(), theirs.digest())


def _seal(user: str, secret: str, *, until_ms: int) -> bytes:
    return hmac.digest(secret.encode(), _BEARER + f"{user}:{until_ms}".encode(), "sha256")
