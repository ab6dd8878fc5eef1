"""Addresses of the stores that carry a commit log: their kinds, and what they must not have."""

import re
from typing import Final
from urllib.parse import parse_qsl

from rmq_pipeline.errors import RequestError
from rmq_pipeline.storage.root import HIDDEN, shown

#: Schemes of the addresses of the log's stores.
POSTGRES: Final = frozenset({"postgresql", "postgres"})
BUCKETS: Final = frozenset({"s3"})
NATS: Final = frozenset({"nats", "tls"})
#: Servers, stream and options of an address of NATS.
_OF_NATS: Final = re.compile(
    r"(?P<servers>[A-Za-z0-9._:,\[\]-]+)/[A-Za-z0-9_-]{1,200}(\?replicas=[1-5])?"
)
_NATS_SERVER: Final = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?")
#: Names of the parameters of libpq that are secrets.
LIBPQ_SECRETS: Final = frozenset({"password", "sslpassword", "oauth_client_secret"})


def check_log_store(address: str) -> str:
    """Return the address of the log's store; no error shows it, as it may have a password.

    Raises:
        RequestError: it is no address of a store, or has a secret.
    """
    scheme, separator, rest = address.partition("://")
    if scheme in POSTGRES and separator:
        _check_postgres(rest)
    elif scheme in BUCKETS and separator:
        _check_bucket(rest)
    elif scheme in NATS and separator:
        _check_nats(rest)
    else:
        raise RequestError(
            "The setting log_store is no address of PostgreSQL, of a bucket or of NATS.",
            remedy="Use postgresql://HOST:PORT/DATABASE, s3://BUCKET/PREFIX or"
            " nats://HOST:PORT/STREAM.",
        )
    return address


def _check_postgres(rest: str) -> None:
    # libpq reads a password up to an @, whatever is in it, and takes # for a character of names.
    user, at, _ = rest.rpartition("@")
    named = {name for name, _ in parse_qsl(rest.partition("?")[2], keep_blank_values=True)}
    if "#" in rest or (at and ":" in user) or LIBPQ_SECRETS & named:
        raise RequestError(
            "The setting log_store has a password, or a character (#, or : and @) that may begin"
            " one; settings are shown.",
            remedy="Leave it out, and set PGPASSWORD or PGPASSFILE for the broker.",
        )


def _check_bucket(rest: str) -> None:
    place, _, query = rest.partition("?")
    if "@" in rest or "#" in rest or HIDDEN in shown(f"s3://bucket?{query}"):
        raise RequestError(
            "The setting log_store has a key, a secret, or a character (@ or #) that may end one;"
            " settings are shown.",
            remedy="Leave it out, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for the"
            " broker.",
        )
    bucket, _, prefix = place.partition("/")
    if not bucket or not prefix.strip("/"):
        raise RequestError(
            "The setting log_store names no bucket, or no prefix for the log.",
            remedy="Use s3://BUCKET/PREFIX; the prefix is the log's alone.",
        )


def _check_nats(rest: str) -> None:
    if "@" in rest or "#" in rest:
        raise RequestError(
            "The setting log_store has a user, a password, or a character (@ or #) that may end"
            " one; settings are shown.",
            remedy="Leave it out, and set NATS_USER and NATS_PASSWORD, NATS_TOKEN, NATS_CREDS or"
            " NATS_NKEY for the broker.",
        )
    found = _OF_NATS.fullmatch(rest)
    servers = (
        [_NATS_SERVER.fullmatch(each) for each in found["servers"].split(",")] if found else []
    )
    if not servers or not all(each and int(each["port"] or 0) < 65536 for each in servers):
        raise RequestError(
            "The setting log_store names no servers of NATS, or no stream for the log.",
            remedy="Use nats://HOST:PORT,HOST:PORT/STREAM, and ?replicas=1 for a server alone; a"
            " stream has letters, digits, - and _.",
        )


def is_nats(log_store: str) -> bool:
    """Return True if the store of the log is a stream of NATS."""
    return log_store.partition("://")[0] in NATS


def is_bucket(log_store: str | None) -> bool:
    """Return True if the store of the log is a bucket."""
    return log_store is not None and log_store.partition("://")[0] in BUCKETS
