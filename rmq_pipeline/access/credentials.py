"""Parsing and verification of credentials. Error messages never contain a secret.

A call has one of three kinds: the signature of RocketMQ clients, a password (HTTP Basic), or a
token that was issued for a password (HTTP Bearer).
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from rmq_pipeline.errors import UnauthorizedError

ALGORITHM: Final = "MQv2-HMAC-SHA1"
#: Allowed deviation of a client's clock, in both directions.
SIGNED_WITHIN_MS: Final = 5 * 60_000
#: UTC offsets in minutes that the zone database of 2026 has between 2022 and 2030. The clients in
#: Python, Java, Go and C# sign their local time and label it UTC.
UTC_OFFSETS_MIN: Final = (
    *(-720, -660, -600, -570, -540, -480, -420, -360, -300, -240, -210, -180, -150, -120, -60),
    *(0, 60, 120, 180, 210, 240, 270, 300, 330, 345, 360, 390, 420, 480, 525, 540, 570, 600),
    *(630, 660, 720, 765, 780, 825, 840),
)
_QUARTER_MS: Final = 15 * 60_000
_SHA1_BYTES: Final = 20
#: Characters of a header that an error quotes.
_SHOWN: Final = 40
_DATE_TIME: Final = re.compile(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z", re.ASCII)
_RFC_3339: Final = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)", re.ASCII
)
#: Longer headers are refused before parsing.
_HEADER_LENGTH: Final = 4096
_BEARER: Final = b"rmq-bearer:"


@dataclass(frozen=True, slots=True)
class Claim:
    """User name that a call claims, with the proof."""

    user: str
    #: Signature, password, or HMAC of a token, by kind of credentials.
    proof: bytes


# --------------------------------------------------------------------------- RocketMQ's signature


def read_signature(authorization: str | None) -> Claim | None:
    """Parse the authorization header of a RocketMQ client; None for an anonymous call.

    Clients of some languages send the header without a credential if they have none.

    Raises:
        UnauthorizedError: the header is malformed.
    """
    if not authorization:
        return None
    if len(authorization) > _HEADER_LENGTH:
        raise UnauthorizedError(
            f"The authorization header has {len(authorization):,} characters; "
            f"{_HEADER_LENGTH:,} are allowed."
        )
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
        raise UnauthorizedError(
            "The signature in the authorization header is not an HMAC-SHA1 in hex."
        )
    return Claim(user, proof)


def sign(secret: str, date_time: str) -> bytes:
    """Sign an ``x-mq-date-time`` header as RocketMQ clients do (HMAC-SHA1)."""
    return hmac.digest(secret.encode(), date_time.encode(), "sha1")


def check_signed_at(
    date_time: str, now_ms: int, *, utc_offsets_min: Collection[int] = UTC_OFFSETS_MIN
) -> None:
    """Refuse a signed time that differs from the present by more than 5 minutes.

    Args:
        date_time: the header: 20231114T221320Z, in UTC or in local time, or RFC 3339 with an
            offset, as the Rust client sends.
        now_ms: the present, in Unix milliseconds.
        utc_offsets_min: UTC offsets of accepted local times.

    Raises:
        UnauthorizedError: the header is not a time, or is too far from the present at every
            accepted offset.
    """
    signed = _signed(date_time)
    if signed is None:
        raise UnauthorizedError(
            f"x-mq-date-time {date_time[:_SHOWN]!r} is not a time.",
            remedy="Sign the present as yyyyMMddTHHmmssZ, or as RFC 3339 with an offset.",
        )
    moment, is_local = signed
    ahead_ms = int(moment.timestamp() * 1000) - now_ms
    offsets = utc_offsets_min if is_local else (0,)
    # All UTC offsets are multiples of 15 minutes. Most calls match the nearest one.
    nearest = round(ahead_ms / _QUARTER_MS) * 15
    if nearest in offsets and abs(ahead_ms - nearest * 60_000) <= SIGNED_WITHIN_MS:
        return
    away_ms = min(abs(ahead_ms - offset * 60_000) for offset in offsets)
    if away_ms > SIGNED_WITHIN_MS:
        now = datetime.fromtimestamp(now_ms / 1000, tz=UTC)
        raise UnauthorizedError(
            f"x-mq-date-time {date_time} is {away_ms // 1000} s away from the broker's clock, which"
            f" shows {now:%Y%m%dT%H%M%SZ}, in the nearest accepted time zone;"
            f" {SIGNED_WITHIN_MS // 1000} s are allowed.",
            remedy="Set the client's clock, or its time zone.",
        )


def _signed(date_time: str) -> tuple[datetime, bool] | None:
    """Parse a header; return the time, and True if it may be local time labelled as UTC."""
    try:
        if (parts := _DATE_TIME.fullmatch(date_time)) is not None:
            year, month, day, hour, minute, second = map(int, parts.groups())
            return datetime(year, month, day, hour, minute, second, tzinfo=UTC), True
        if _RFC_3339.fullmatch(date_time):
            return datetime.fromisoformat(date_time), False
    except ValueError:
        return None
    return None


# ------------------------------------------------------------------------------- Basic and Bearer


def basic(user: str, password: str) -> str:
    """Return the Basic authorization header for a user and a password."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def read_basic(value: str) -> Claim:
    """Parse the value after ``Basic``.

    Raises:
        UnauthorizedError: the value is malformed.
    """
    try:
        # Arrow's client in Go sends base64 without its padding.
        padded = value + "=" * (-len(value) % 4)
        user, colon, password = base64.b64decode(padded, validate=True).partition(b":")
        name = user.decode()
    except (binascii.Error, ValueError) as error:
        raise UnauthorizedError("The Basic credentials are not base64 of UTF-8.") from error
    if not colon:
        raise UnauthorizedError("The Basic credentials have no colon between user and password.")
    return Claim(name, password)


def bearer(user: str, secret: str, *, until_ms: int) -> str:
    """Issue a token that is valid until ``until_ms`` or until the password changes."""
    return f"{user}:{until_ms}:{_seal(user, secret, until_ms=until_ms).hex()}"


def read_bearer(value: str) -> tuple[Claim, int]:
    """Parse a token; return its claim and the end of its validity in Unix milliseconds.

    Raises:
        UnauthorizedError: the token is malformed.
    """
    user, _, rest = value.partition(":")
    until, _, seal = rest.partition(":")
    try:
        if not (until.isascii() and until.isdecimal()):
            raise ValueError
        return Claim(user, bytes.fromhex(seal)), int(until)
    except ValueError as error:
        raise UnauthorizedError(
            "The token is malformed.", remedy="Sign in again with user and password."
        ) from error


def seals(claim: Claim, secret: str, *, until_ms: int) -> bool:
    """Return True if the token was issued with this secret."""
    return hmac.compare_digest(_seal(claim.user, secret, until_ms=until_ms), claim.proof)


def is_password(claim: Claim, secret: str) -> bool:
    """Return True if the proof is the password; compares in constant time."""
    ours, theirs = hashlib.sha256(secret.encode()), hashlib.sha256(claim.proof)
    return hmac.compare_digest(ours.digest(), theirs.digest())


def _seal(user: str, secret: str, *, until_ms: int) -> bytes:
    return hmac.digest(secret.encode(), _BEARER + f"{user}:{until_ms}".encode(), "sha256")
