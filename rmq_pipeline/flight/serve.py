"""The broker's process: open the home, open the door, serve until told to stop."""

import ctypes
import faulthandler
import gc
import json
import logging
import os
import secrets
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn

from rmq_pipeline import errors
from rmq_pipeline.broker import Broker
from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.flight.flags import Flags, Flush, Upkeep, Values, checked
from rmq_pipeline.flight.process import ANY_PORT, HOME_LOCKED
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.interruption import Interruption

log = logging.getLogger(__name__)

#: A thread that waits for the GIL asks for it after this long: at the default of 5 ms a single
#: busy thread makes every sync of the commit log 10 ms late.
SWITCH_INTERVAL_S: Final = 0.0002
#: Running calls get this long to end; their clients repeat them, or learn that it is not known.
_GRACE_S: Final = 10.0
#: M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h.
_MALLOC_OPTIONS: Final = ((-8, 2), (-3, 4 << 20), (-1, 16 << 20))


def serve(
    home: Path,
    *,
    flight: str | None = None,
    upkeep: Upkeep | None = None,
    flush: Flush | None = None,
    settings: Values | None = None,
) -> NoReturn:
    """Serve a home until SIGTERM or SIGINT, then end the process; for the main thread.

    Prints ``ready grpc=- flight=HOST:PORT home=DIR`` when calls are answered. An argument left
    out is what the home was served with the last time, at first 127.0.0.1:8082, upkeep self, flush
    sync; where that port is taken, a free one. Settings that are given change those that the home
    keeps; "default" gives one its default.

    Raises:
        HomeLockedError: another process has the home open.
        RequestError: the address is taken, or beyond loopback; or a setting is wrong.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _bound_allocator()
    # SIGUSR1 writes what every thread does to stderr, which tells why a broker hangs.
    faulthandler.register(signal.SIGUSR1)
    stopping = Interruption()
    home = home.absolute()
    flags = Flags.remembered(home, flight=flight, upkeep=upkeep, flush=flush, settings=settings)
    chosen = checked(flags.settings)
    broker = Broker.open(home, upkeep=flags.upkeep, flush=flags.flush, settings=chosen)
    token = secrets.token_hex(16)
    try:
        server = _listen(broker, flags.flight, token=token, chosen=flight is not None)
    except errors.RequestError:
        broker.close()
        raise
    endpoint = Endpoint(
        pid=os.getpid(),
        started_at_ms=time.time_ns() // 1_000_000,
        token=token,
        flight=server.address,
        grpc=None,
        home=str(home),
        upkeep=flags.upkeep,
        flush=flags.flush,
    )
    replace(flags, flight=server.address).keep(home)
    calm_garbage_collection()
    endpoint.write()
    sys.stdout.write(f"ready grpc=- flight={server.address} home={home}\n")
    sys.stdout.flush()
    stopping.wait()
    log.info("stopping")
    endpoint.remove()
    _end(broker, server)


def _listen(broker: Broker, address: str, *, token: str, chosen: bool) -> FlightServer:
    """Open the door; where a port that was only remembered is taken, at a free one."""
    try:
        return FlightServer(broker, address, token=token)
    except errors.RequestError:
        if chosen:
            raise
        log.warning("%s is taken: using another port", address)
        return FlightServer(broker, ANY_PORT, token=token)


def _bound_allocator() -> None:
    """Let glibc keep less of what is freed: by default each of many threads has its own heap.

    After five million messages and acks that is some 300 MB.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for parameter, value in _MALLOC_OPTIONS:
            libc.mallopt(parameter, value)


def calm_garbage_collection() -> None:
    """Keep the collector away from what lives as long as the process, and let it run less often.

    A full collection of the modules of DuckDB, Arrow and pydantic takes tens of ms, in which no
    call is answered.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _end(broker: Broker, server: FlightServer) -> NoReturn:
    """Close the home, let running calls end, then the process.

    The interpreter is not taken apart: that takes longer, and threads of gRPC and DuckDB may hang
    in it.
    """
    server.refuse()
    code = 0
    try:
        broker.close()
    except Exception:
        log.exception("the home was not closed cleanly: the next start recovers it")
        code = 1
    closing = threading.Thread(target=server.shutdown, name="rmq-flight-shutdown", daemon=True)
    closing.start()
    closing.join(_GRACE_S)
    if closing.is_alive():
        log.warning("calls still run after %s s: leaving them", _GRACE_S)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def main() -> int:
    """What ``process.start`` runs: the home, and its flags as JSON."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        serve(Path(sys.argv[1]), **json.loads(sys.argv[2]))
    except errors.HomeLockedError as error:
        sys.stderr.write(f"{error}\n")
        return HOME_LOCKED
    except errors.RocketMQError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
