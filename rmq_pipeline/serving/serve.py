"""Life of a broker process: open the home and the endpoints, serve, and stop in order."""

import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn, TypeVar

from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.home import part_of
from rmq_pipeline.endpoint import Endpoint, HomeMark
from rmq_pipeline.errors import StoreFullError
from rmq_pipeline.flight.flags import (
    AS_LAST_TIME,
    NO_ENDPOINT,
    SETTINGS_FILE,
    Flags,
    Flush,
    Listening,
    Upkeep,
    Values,
    checked,
)
from rmq_pipeline.flight.process import LOG_FENCED, STORE_FAILED, Interruption
from rmq_pipeline.serving import interpreter
from rmq_pipeline.serving.connections import ConnectionGuard
from rmq_pipeline.serving.endpoints import Endpoints, certificate_of, check_flags, import_ahead
from rmq_pipeline.serving.scraping import Scraping, check_push
from rmq_pipeline.store import descriptors
from rmq_pipeline.store.log.log_file import FULL

log = logging.getLogger(__name__)
Written = TypeVar("Written")


def serve(
    home: Path,
    *,
    listening: Listening = AS_LAST_TIME,
    upkeep: Upkeep | None = None,
    flush: Flush | None = None,
    settings: Values | None = None,
    standby: bool = False,
) -> NoReturn:
    """Serve a home until SIGTERM or SIGINT, then end the process. Call it in the main thread.

    Prints ``ready grpc=HOST:PORT flight=HOST:PORT home=DIR`` when the endpoints accept calls; a -
    stands for an absent gRPC endpoint. Omitted arguments take their values from the last run.

    Args:
        listening: addresses and TLS; at first Flight at 127.0.0.1:8082, gRPC at 127.0.0.1:8081, no
            metrics. A free port replaces an address of the last run that is taken. "none" switches
            gRPC or metrics off. ``tls`` encrypts Flight and metrics, and adds a gRPC endpoint at
            ``grpc_tls``. Beyond loopback a home needs users, or ``insecure`` at every start.
        upkeep, flush: at first "self" and "sync".
        settings: changes to the stored settings; "default" resets a setting.
        standby: see ``Broker.open``. Its line has role=standby; it prints another once it leads.

    Raises:
        HomeLockedError: another process has the home open.
        RequestError: an address cannot be served, or a setting or certificate is invalid.
        StoreFullError: the disk is full and the reserve is used up.
    """
    home = home.absolute()
    insecure = (said := asdict(listening)).pop("insecure")
    flags = Flags.remembered(home, settings=settings, **said, upkeep=upkeep, flush=flush)
    check_push(chosen := checked(flags.settings))
    check_flags(home, flags, insecure=insecure)
    interpreter.prepare()
    descriptors.reserve()
    stopping = Interruption()
    import_ahead(flags.grpc)
    token = secrets.token_hex(16)
    with contextlib.ExitStack() as undoing:
        scraping = undoing.enter_context(Scraping(flags))
        broker = Broker.open(
            home, upkeep=flags.upkeep, flush=flags.flush, settings=chosen, standby=standby
        )
        undoing.callback(_close, broker)
        certificate = _freeing_reserve(broker, lambda: certificate_of(home, flags))
        endpoints = Endpoints.open(
            broker, flags, token=token, asked=listening, certificate=certificate, insecure=insecure
        )
        undoing.callback(endpoints.shut)
        undoing.callback(endpoints.refuse)
        scraping.serve(broker, asked=listening, certificate=certificate)
        serving = _Serving(broker, flags, endpoints, scraping, token, certificate)
        interpreter.calm_garbage_collection()
        undoing.callback(serving.publish().remove)
        # The broker serves from here on, so _end closes everything, in its own order.
        undoing.pop_all()
    serving.go_on(stopping)


@dataclass(slots=True)
class _Serving:
    """A broker with its open endpoints."""

    broker: Broker
    flags: Flags
    endpoints: Endpoints
    scraping: Scraping
    token: str
    certificate: Certificate | None
    #: The endpoint file, as it was written last.
    published: Endpoint | None = None
    is_stopping: bool = False
    #: True if the last line that was printed says that this is a standby.
    said_standby: bool = False

    def go_on(self, stopping: Interruption) -> NoReturn:
        """Serve until the process is told to stop, and end it."""
        guard = ConnectionGuard([*self.endpoints.ports(), *self.scraping.ports()])
        guard.start()
        self.broker.when_leading(lambda: self.lead(guard))
        stopping.wait()
        log.info("stopping")
        self.is_stopping = True
        if self.published is not None:
            self.published.remove()
        _end(self.broker, self.endpoints, scraping=self.scraping)

    def publish(self) -> Endpoint:
        """Store the flags for the next start, publish the endpoint, and print the ready line."""
        endpoint, metrics = self.endpoint(), self.scraping.address
        self.said_standby = self.broker.is_standby
        _keep(self.broker, self.flags, endpoint=endpoint, metrics=metrics)
        try:
            _announce(self.broker, endpoint, metrics=metrics)
        except BaseException:
            endpoint.remove()
            raise
        self.published = endpoint
        return endpoint

    def lead(self, guard: ConnectionGuard) -> None:
        """Open what a standby does not have, and publish it; does nothing on another broker."""
        if self.is_stopping:
            return
        opened = self.endpoints.grpc is None and self.endpoints.open_grpc()
        if opened or self.said_standby:
            guard.guard(self.endpoints.ports())
            self.publish()

    def endpoint(self) -> Endpoint:
        """Return the content of the endpoint file."""
        home, flight, grpc = (
            self.broker.engine.home.path,
            self.endpoints.flight,
            self.endpoints.grpc,
        )
        return Endpoint(
            pid=os.getpid(),
            started_at_ms=time.time_ns() // 1_000_000,
            token=self.token,
            flight=flight.address,
            grpc=grpc.address if grpc is not None else None,
            grpc_tls=grpc.tls_address if grpc is not None else None,
            home=str(home),
            upkeep=self.flags.upkeep,
            flush=self.flags.flush,
            certificate=str(self.certificate.path) if self.certificate is not None else None,
            server_name=self.certificate.name if self.certificate is not None else None,
            mark=HomeMark.of(home),
        )


def _keep(broker: Broker, flags: Flags, *, endpoint: Endpoint, metrics: str | None) -> None:
    """Store the flags of this run for the next start, unless the disk and the reserve are full."""
    home = Path(endpoint.home)
    served = replace(
        flags,
        flight=endpoint.flight,
        # A standby has no gRPC endpoint yet.
        grpc=flags.grpc if broker.is_standby else endpoint.grpc or NO_ENDPOINT,
        grpc_tls=flags.grpc_tls if broker.is_standby else endpoint.grpc_tls or NO_ENDPOINT,
        metrics=metrics or NO_ENDPOINT,
    )
    try:
        _freeing_reserve(broker, lambda: served.keep(home))
    except StoreFullError:
        log.warning(
            "the disk is full: %s was not updated, so the flags apply to this run only",
            home / SETTINGS_FILE,
        )


def _announce(broker: Broker, endpoint: Endpoint, *, metrics: str | None) -> None:
    """Publish the endpoint in the home, and print the line that tells that the broker serves."""
    _freeing_reserve(broker, endpoint.write)
    _say_ready(endpoint, metrics=metrics, is_standby=broker.is_standby)
    engine = broker.engine
    engine.repair.on_unrepairable = _die
    engine.on_fenced = lambda why: _leave(endpoint, why)
    if engine.replication is not None and (fenced := engine.replication.fenced) is not None:
        _leave(endpoint, fenced.message)


def _say_ready(endpoint: Endpoint, *, metrics: str | None, is_standby: bool) -> None:
    also = f" grpc_tls={endpoint.grpc_tls}" if endpoint.grpc_tls else ""
    also += f" metrics={metrics}" if metrics else ""
    endpoints = f"grpc={endpoint.grpc or '-'}{also} flight={endpoint.flight}"
    role = " role=standby" if is_standby else ""
    _tell(f"ready {endpoints} home={endpoint.home}{role}\n")


def _tell(text: str = "") -> None:
    """Print and flush; if the disk is full, the text stays in the buffer."""
    # Python sets sys.stdout to None if the descriptor was closed at the start.
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        if not _is_full(error):
            raise


def _die(why: str) -> None:
    """End the process at once and leave the endpoint file, so that a supervisor restarts it."""
    log.critical("the store cannot be rebuilt; exiting with code %d: %s", STORE_FAILED, why)
    logging.shutdown()
    os._exit(STORE_FAILED)


def _leave(endpoint: Endpoint, why: str) -> None:
    """End the process at once, because another broker leads the log; nothing is answered."""
    log.critical("this broker has ended; exiting with code %d: %s", LOG_FENCED, why)
    with contextlib.suppress(OSError):
        endpoint.remove()
    logging.shutdown()
    os._exit(LOG_FENCED)


def _close(broker: Broker) -> bool:
    """Close the home; return False if that failed."""
    try:
        broker.close()
    except Exception:
        log.exception("the home was not closed cleanly: the next start recovers it")
        return False
    return True


def _end(broker: Broker, endpoints: Endpoints, *, scraping: Scraping) -> NoReturn:
    """Let running calls end, close the home, then end the process.

    The home closes after the endpoints, because running calls need the broker until their answer.
    The metrics stop after calls are refused: the last push may wait 2 s for its collector.
    ``os._exit`` skips the shutdown of the interpreter: it is slow, and threads of gRPC and DuckDB
    can hang in it.
    """
    endpoints.refuse()
    for what, step in (
        ("stop the metrics", scraping.refuse),
        ("end the running calls", broker.wind_down),
        ("end the running calls", endpoints.shut),
    ):
        try:
            step()
        except Exception:
            log.exception("could not %s in order", what)
    code = 0 if _close(broker) else 1
    logging.shutdown()
    _tell()
    os._exit(code)


def _freeing_reserve(broker: Broker, write: Callable[[], Written]) -> Written:
    """Call ``write`` and return its result, freeing parts of the reserve while the disk is full.

    The reserve exists so that consumers can drain a full broker. They need a broker that starts.

    Raises:
        StoreFullError: the reserve is used up.
        OSError: ``write`` failed for another reason.
    """
    while True:
        try:
            return write()
        except OSError as error:
            if not _is_full(error):
                raise
            log.warning("the disk is full (%s): freeing a part of the reserve", error)
            engine = broker.engine
            engine.log.draw_reserve(part_of(engine.settings.reserve_bytes))


def _is_full(error: OSError) -> bool:
    """Return True if the disk or the user's disk quota is full."""
    return error.errno in FULL
