"""Open the home, open the doors, serve until told to stop."""

import logging
import os
import secrets
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

from rmq_pipeline import errors
from rmq_pipeline.broker import Broker
from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.flight.flags import (
    AS_LAST_TIME,
    NO_DOOR,
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
    try:
        certificate = guard.certificate_of(home, flags)
        doors = Doors.open(
            broker, flags, token=token, asked=listening, certificate=certificate, insecure=insecure
        )
    except errors.RequestError:
        broker.close()
        raise
    endpoint = _endpoint(home, flags, doors=doors, token=token)
    if certificate is not None:
        name = certificate.name
        endpoint = replace(endpoint, certificate=str(certificate.path), server_name=name)
    replace(
        flags,
        flight=endpoint.flight,
        grpc=endpoint.grpc or NO_DOOR,
        grpc_tls=endpoint.grpc_tls or NO_DOOR,
    ).keep(home)
    interpreter.calm_garbage_collection()
    endpoint.write()
    _say_ready(endpoint)
    stopping.wait()
    log.info("stopping")
    endpoint.remove()
    _end(broker, doors)


def _say_ready(endpoint: Endpoint) -> None:
    also = f" grpc_tls={endpoint.grpc_tls}" if endpoint.grpc_tls else ""
    doors = f"grpc={endpoint.grpc or '-'}{also} flight={endpoint.flight}"
    sys.stdout.write(f"ready {doors} home={endpoint.home}\n")
    sys.stdout.flush()


def _endpoint(home: Path, flags: Flags, *, doors: Doors, token: str) -> Endpoint:
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
    )


def _end(broker: Broker, doors: Doors) -> NoReturn:
    """Close the home, let running calls end, then the process.

    The interpreter is not taken apart: that takes longer, and threads of gRPC and DuckDB may hang
    in it.
    """
    doors.refuse()
    code = 0
    try:
        broker.close()
    except Exception:
        log.exception("the home was not closed cleanly: the next start recovers it")
        code = 1
    doors.shut()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
