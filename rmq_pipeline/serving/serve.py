"""Open the home, open the doors, serve until told to stop."""

import contextlib
import logging
import os
import secrets
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.broker import Broker
from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.errors import StoreFullError
from rmq_pipeline.flight.flags import (
    AS_LAST_TIME,
    NO_DOOR,
    SETTINGS_FILE,
    Flags,
    Flush,
    Listening,
    Upkeep,
    Values,
    checked,
)
from rmq_pipeline.interruption import Interruption
from rmq_pipeline.serving import guard, interpreter
from rmq_pipeline.serving.doors import Doors, import_ahead
from rmq_pipeline.serving.room import is_full, with_room

log = logging.getLogger(__name__)


def serve(
    home: Path,
    *,
    listening: Listening = AS_LAST_TIME,
    upkeep: Upkeep | None = None,
    flush: Flush | None = None,
    settings: Values | None = None,
) -> NoReturn:
    """Serve a home until SIGTERM or SIGINT, then end the process; for the main thread.

    Prints ``ready grpc=HOST:PORT flight=HOST:PORT home=DIR`` when calls are answered. An argument
    left out is what the home was served with the last time, at first 127.0.0.1:8082 and, for
    RocketMQ clients, 127.0.0.1:8081, upkeep self, flush sync; where such a port is taken, a free
    one. Settings that are given change those that the home keeps; "default" gives one its default.

    With a ``listening.grpc`` of none there is no door for RocketMQ clients, and the line has a - in
    its place. ``tls`` encrypts the table door, and opens that for RocketMQ clients at ``grpc_tls``,
    too. Beyond loopback a home must have users, or ``insecure`` be said each time.

    Raises:
        HomeLockedError: another process has the home open.
        RequestError: an address is taken, or beyond loopback, or a setting or certificate is wrong.
        StoreFullError: the disk has no room for what a start writes, nor has the reserve.
    """
    home = home.absolute()
    said = asdict(listening)
    insecure = said.pop("insecure")
    flags = Flags.remembered(home, settings=settings, **said, upkeep=upkeep, flush=flush)
    chosen = checked(flags.settings)
    guard.look_ahead(home, flags, insecure=insecure)
    interpreter.prepare()
    stopping = Interruption()
    import_ahead(flags.grpc)
    broker = Broker.open(home, upkeep=flags.upkeep, flush=flags.flush, settings=chosen)
    token = secrets.token_hex(16)
    with contextlib.ExitStack() as undoing:
        undoing.callback(_close, broker)
        certificate = with_room(broker, lambda: guard.certificate_of(home, flags))
        doors = Doors.open(
            broker, flags, token=token, asked=listening, certificate=certificate, insecure=insecure
        )
        undoing.callback(doors.shut)
        undoing.callback(doors.refuse)
        endpoint = _endpoint(home, flags, doors=doors, token=token, certificate=certificate)
        _keep(broker, flags, endpoint=endpoint)
        interpreter.calm_garbage_collection()
        with_room(broker, endpoint.write)
        undoing.callback(endpoint.remove)
        _say_ready(endpoint)
        # It serves: from here on it ends in order, and in another one.
        undoing.pop_all()
    stopping.wait()
    log.info("stopping")
    endpoint.remove()
    _end(broker, doors)


def _keep(broker: Broker, flags: Flags, *, endpoint: Endpoint) -> None:
    """Have the next start find how this one is served; without a reserve that is left out."""
    home = Path(endpoint.home)
    served = replace(
        flags,
        flight=endpoint.flight,
        grpc=endpoint.grpc or NO_DOOR,
        grpc_tls=endpoint.grpc_tls or NO_DOOR,
    )
    try:
        with_room(broker, lambda: served.keep(home))
    except StoreFullError:
        log.warning(
            "the disk is full: %s stays as it was, and what was given holds for this run only",
            home / SETTINGS_FILE,
        )


def _say_ready(endpoint: Endpoint) -> None:
    also = f" grpc_tls={endpoint.grpc_tls}" if endpoint.grpc_tls else ""
    doors = f"grpc={endpoint.grpc or '-'}{also} flight={endpoint.flight}"
    _tell(f"ready {doors} home={endpoint.home}\n")


def _tell(text: str = "") -> None:
    """Print it, and what was before it, at once; a full disk does without, or gets it later."""
    # A descriptor that was closed from the start is nobody to tell.
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        if not is_full(error):
            raise


def _endpoint(
    home: Path, flags: Flags, *, doors: Doors, token: str, certificate: Certificate | None
) -> Endpoint:
    return Endpoint(
        pid=os.getpid(),
        started_at_ms=time.time_ns() // 1_000_000,
        token=token,
        flight=doors.flight.address,
        grpc=doors.grpc.address if doors.grpc is not None else None,
        grpc_tls=doors.grpc.tls_address if doors.grpc is not None else None,
        home=str(home),
        upkeep=flags.upkeep,
        flush=flags.flush,
        certificate=str(certificate.path) if certificate is not None else None,
        server_name=certificate.name if certificate is not None else None,
    )


def _close(broker: Broker) -> bool:
    """Close the home; whether that went in order."""
    try:
        broker.close()
    except Exception:
        log.exception("the home was not closed cleanly: the next start recovers it")
        return False
    return True


def _end(broker: Broker, doors: Doors) -> NoReturn:
    """Close the home, let running calls end, then the process.

    The interpreter is not taken apart: that takes longer, and threads of gRPC and DuckDB may hang
    in it.
    """
    doors.refuse()
    code = 0 if _close(broker) else 1
    doors.shut()
    logging.shutdown()
    _tell()
    os._exit(code)
