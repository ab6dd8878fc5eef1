"""Metrics of a broker's process: the listener for scrapes, and the push to a collector."""

import logging
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from rmq_pipeline import extras
from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.verbs.declaration import declarations
from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight.flags import NO_ENDPOINT, NO_TLS, Flags, Listening
from rmq_pipeline.serving.endpoints import listen
from rmq_pipeline.settings import Settings

if TYPE_CHECKING:
    from rmq_pipeline.metrics.listener import MetricsListener
    from rmq_pipeline.metrics.push import Push

log = logging.getLogger(__name__)

_EXTRA: Final = "otel"


def check_push(settings: Settings) -> None:
    """Refuse the setting otlp_endpoint without the packages that it needs.

    Raises:
        MissingExtraError: the extra is not installed.
    """
    if settings.otlp_endpoint is not None:
        extras.check(_EXTRA)


class Scraping:
    """The listener of the flags, and the push of the settings; neither has to be there."""

    def __init__(self, flags: Flags) -> None:
        """Listen before the home is open, so that scrapes learn that the broker is starting.

        If that fails, ``serve`` tries again: the address may belong to another broker of the home,
        and then opening the home is refused. With TLS the certificate is needed first.
        """
        self._flags = flags
        self._listener: MetricsListener | None = None
        self._push: Push | None = None
        if flags.metrics != NO_ENDPOINT and flags.tls == NO_TLS:
            try:
                self._listener = _listener(flags.metrics)
            except RequestError as error:
                log.debug("no scrapes while the broker starts: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.refuse()
        except Exception:  # the error that ends the start matters more
            log.exception("could not stop the metrics in order")
        finally:
            if self._listener is not None:
                self._listener.shutdown()

    @property
    def address(self) -> str | None:
        """host:port of the listener; None without one."""
        return self._listener.address if self._listener is not None else None

    def ports(self) -> list[int]:
        """Return the port of the listener, if there is one."""
        return [int(self.address.rpartition(":")[2])] if self.address is not None else []

    def serve(
        self, broker: Broker, *, asked: Listening, certificate: Certificate | None = None
    ) -> None:
        """Answer scrapes with the samples of an open broker, and begin to push them.

        Raises:
            RequestError: the address is taken, and this start asked for it.
        """
        if self._flags.metrics != NO_ENDPOINT:
            if self._listener is None:
                self._listener = listen(
                    lambda at, _: _listener(at, certificate),
                    self._flags.metrics,
                    exchangeable=asked.metrics is None,
                )
            address = self._listener.address
            broker.engine.reports["metrics"] = lambda: address
            self._listener.serve(_scrape_of(broker))
        settings = broker.engine.settings
        if settings.otlp_endpoint is not None:
            from rmq_pipeline.metrics.push import Push

            self._push = Push(
                settings.otlp_endpoint,
                interval_s=settings.otlp_interval_s,
                home=str(broker.engine.home.path),
                samples=broker.metrics,
            )

    def refuse(self) -> None:
        """Push a last time; answer scrapes from now on that the broker is stopping."""
        if self._listener is not None:
            self._listener.refuse()
        if self._push is not None:
            self._push.shutdown()


def _listener(address: str, certificate: Certificate | None = None) -> "MetricsListener":
    # Most brokers have no listener, and its modules take 0.1 s to import.
    from rmq_pipeline.metrics.listener import MetricsListener

    return MetricsListener(address, certificate=certificate)


def _scrape_of(broker: Broker) -> Callable[[str | None, str], bytes]:
    """Return the function that answers scrapes; it checks the rights of the verb ``metrics``."""
    from rmq_pipeline.metrics.exposition import exposition

    access, rights = broker.access, declarations(Broker)["metrics"].rights

    def scrape(authorization: str | None, peer: str) -> bytes:
        if access.enabled:
            caller = access.authenticate(authorization)
            if not access.is_unbounded(caller):
                for resource, action in rights.named({}):
                    access.authorize(caller, resource=resource, action=action, peer=peer)
        return exposition(broker.metrics())

    return scrape
