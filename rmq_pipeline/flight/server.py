"""The table door: decode a call, ask the broker, encode the answer."""

import hmac
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import flight
from typing_extensions import override

from rmq_pipeline import errors, limits, receipt
from rmq_pipeline.access import Access, Principal
from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.access.source import check_free, listening
from rmq_pipeline.access.user import OWNER
from rmq_pipeline.broker.settling.each import GiveBack
from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.flight import wire
from rmq_pipeline.flight.handshake import Handshake, Headers, authorization_of
from rmq_pipeline.flight.permissions import RIGHTS, Right
from rmq_pipeline.pulled import Pulled

log = logging.getLogger(__name__)

#: How long a long poll may wait before it looks whether its caller is still there.
SLICE_MS = 1_000


@dataclass(frozen=True, slots=True)
class _Answer:
    """What is written to a caller: pieces of a table, or what stands for another value."""

    content: bytes | Iterable[wire.Piece]
    #: schema.RECEIVED that its caller does not have before all is written.
    leased: pa.Table | None = None


class FlightServer(flight.FlightServerBase):
    """Serves any object that has the broker's verbs; it answers as soon as it is made."""

    def __init__(
        self,
        broker: Any,
        address: str = "127.0.0.1:0",
        *,
        token: str | None = None,
        clock: Clock | None = None,
        access: Access | None = None,
        certificate: Certificate | None = None,
        insecure: bool = False,
    ) -> None:
        """Listen.

        Args:
            broker: has the verbs of ``wire.VERBS`` as methods; they are called from many threads.
                And its ``engine``, where it leases.
            address: host:port; port 0 picks a free one.
            token: a call that carries another token is refused; one that carries it is its owner's.
            clock: the broker's, for the slices of a long poll.
            access: who may do what; without it everybody may do everything.
            certificate: connections are encrypted with it.
            insecure: listen beyond loopback even if everybody may do everything.

        Raises:
            RequestError: the address is none, or taken, or lies beyond loopback where everybody
                may do everything.
        """
        host, port = listening(address, guarded=insecure or bool(access and access.enabled))
        check_free(host, port)
        self._broker = broker
        self._token = token
        self._clock = clock or SystemClock()
        self._access = access
        self._closing = threading.Event()
        scheme = "grpc" if certificate is None else "grpc+tls"
        named = f"[{host}]" if ":" in host else host
        super().__init__(
            f"{scheme}://{named}:{port}",
            auth_handler=Handshake(),
            middleware={Headers.NAME: Headers(access)} if access else None,
            tls_certificates=[(certificate.chain, certificate.key)] if certificate else None,
        )
        self.address = f"{named}:{self.port}"

    def ping(self) -> dict[str, Any]:
        """Which process answers here."""
        return {"pid": os.getpid()}

    def refuse(self) -> None:
        """From now on answer every call, waiting ones too, that the broker is stopping."""
        self._closing.set()

    @override
    def shutdown(self) -> None:
        """Refuse new calls, wait for running ones, stop listening."""
        self.refuse()
        super().shutdown()

    @override
    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Carry out one call (see ``wire``)."""
        writer.begin(wire.PIECE)
        try:
            answer = self._answer(context, descriptor.command, reader=reader)
        except errors.RocketMQError as error:
            writer.write_metadata(pa.py_buffer(wire.error_answer(error)))
            return
        is_sent = False
        try:
            _write(answer.content, writer)
            # A caller reads to the end, which comes after this: who cancelled does not have it.
            is_sent = answer.leased is None or not context.is_cancelled()
        finally:
            if answer.leased is not None and not is_sent:
                self._take_back(answer.leased)

    def _take_back(self, leased: pa.Table) -> None:
        """Give back, uncounted, what its caller has not been given after all."""
        receipts = receipt.decode(leased.column("receipt_handle"))
        try:
            self._broker.engine.submit(GiveBack(receipts))
        except errors.RocketMQError as error:
            log.warning("What was leased to a caller that has gone stays leased: %s", error)

    def _answer(
        self,
        context: flight.ServerCallContext,
        command: bytes,
        *,
        reader: flight.MetadataRecordBatchReader,
    ) -> _Answer:
        # All input is read before anything is answered: a client that still writes would see a
        # broken stream instead of the answer.
        pieces = wire.read_pieces(reader)
        try:
            if self._closing.is_set():
                raise errors.BrokerUnavailableError("The broker is stopping.")
            verb, plain, token = wire.read_command(command)
            caller = self._caller(token, context)
            self._authorize(verb, RIGHTS[verb.name].named(plain), caller=caller, context=context)
        except errors.RocketMQError:
            for _ in pieces:  # what is refused is not kept
                pass
            raise
        args = wire.arguments(verb, plain, pieces=list(pieces))
        result = self._call(verb, args, caller=caller, context=context)
        if isinstance(result, Pulled):
            result = result.to_table()
        if not isinstance(result, pa.Table):
            return _Answer(wire.value_answer(result))
        return _Answer(wire.pack(wire.ANSWER, result), leased=_leased(verb, args, result=result))

    def _caller(self, token: str | None, context: flight.ServerCallContext) -> Principal | None:
        """Who calls; None: somebody, and everybody may do everything.

        A user's credentials count for more than the token of the home.

        Raises:
            BrokerUnavailableError: the token is of another broker, or of another start of this one.
            UnauthorizedError: the credentials are not right, or there are none.
        """
        is_owner = False
        if token and self._token:
            is_owner = hmac.compare_digest(str(token).encode(), self._token.encode())
            if not is_owner:
                raise errors.BrokerUnavailableError("Another broker answers at this address.")
        if self._access is None or not self._access.enabled:
            return None
        authorization = authorization_of(context)
        if is_owner and authorization is None:
            return OWNER
        return self._access.authenticate(authorization)

    def _authorize(
        self,
        verb: wire.Verb,
        rights: Iterable[Right],
        *,
        caller: Principal | None,
        context: flight.ServerCallContext,
    ) -> None:
        if self._access is None or self._access.is_unbounded(caller):
            return
        if RIGHTS[verb.name].super_only:
            self._access.authorize_super(caller)
        for resource, action in rights:
            self._access.authorize(caller, resource=resource, action=action, peer=context.peer())

    def _call(
        self,
        verb: wire.Verb,
        args: dict[str, Any],
        *,
        caller: Principal | None,
        context: flight.ServerCallContext,
    ) -> object:
        owner = self if verb.name == "ping" else self._broker
        method: Callable[..., object] = getattr(owner, verb.name)
        try:
            rights = RIGHTS[verb.name].of(args, self._broker)
            self._authorize(verb, rights, caller=caller, context=context)
            if verb.long_poll and _is_long(args.get("wait_ms")):
                return self._poll(verb, args, is_cancelled=context.is_cancelled)
            return method(**args)
        except errors.RocketMQError:
            raise
        except Exception as error:
            raise self._translated(verb.name, error, bound=(method, args)) from error

    def _poll(
        self, verb: wire.Verb, args: dict[str, Any], *, is_cancelled: Callable[[], bool]
    ) -> object:
        """Wait in slices, so that a caller that has gone is noticed before its time is up."""
        until_ms = self._clock.now_ms() + args["wait_ms"]
        method: Callable[..., object] = getattr(self._broker, verb.name)
        while True:
            left_ms = max(0, until_ms - self._clock.now_ms())
            result = method(**{**args, "wait_ms": min(left_ms, SLICE_MS)})
            if is_cancelled():
                if verb.tells_of_loss:
                    group, client_id = args["group"], args["client_id"]
                    getattr(self._broker, verb.tells_of_loss)(group, client_id)
                return result
            following = _following(result, args)
            if left_ms <= SLICE_MS or self._closing.is_set() or following is None:
                return result
            args = following
            method = getattr(self._broker, verb.waits_with or verb.name)

    def _translated(
        self, name: str, error: Exception, *, bound: tuple[Callable[..., object], dict[str, Any]]
    ) -> errors.RocketMQError:
        if self._closing.is_set():
            return errors.BrokerUnavailableError("The broker is stopping.")
        if isinstance(error, TypeError):
            method, args = bound
            try:
                inspect.signature(method).bind(**args)
            except TypeError as unbound:
                return errors.RequestError(f"{name}: {unbound}.")
        log.error("%s failed", name, exc_info=error)
        return errors.RocketMQError(f"{name} failed: {type(error).__name__}: {error}.")


def _write(content: bytes | Iterable[wire.Piece], writer: flight.MetadataRecordBatchWriter) -> None:
    if isinstance(content, bytes):
        writer.write_metadata(pa.py_buffer(content))
        return
    for name, piece in content:
        writer.write_with_metadata(piece, pa.py_buffer(name.encode()))


def _leased(verb: wire.Verb, args: dict[str, Any], *, result: pa.Table) -> pa.Table | None:
    """What is leased to nobody where this answer gets lost.

    An attempt with an id may be made again, and is given the same messages then.
    """
    is_lease = verb.name == "receive" and result.num_rows and not args.get("attempt_id")
    return result if is_lease else None


def _following(result: object, args: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments to wait on with after a slice that has brought nothing; None after another."""
    if isinstance(result, pa.Table):
        return None if result.num_rows else args
    if isinstance(result, Pulled):
        return None if result.messages.num_rows else {**args, "positions": result.next_offsets}
    if isinstance(result, dict) and result.get("version", -1) == args.get("known_version"):
        return args
    return None


def _is_long(wait_ms: object) -> bool:
    # What is out of range is for the broker to refuse.
    return isinstance(wait_ms, int) and SLICE_MS < wait_ms <= limits.POLL_MAX_MS
