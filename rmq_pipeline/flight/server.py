"""The Flight endpoint: decodes a call, calls the broker, encodes the answer."""

import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa

from rmq_pipeline import errors, limits, receipt
from rmq_pipeline.access import Access, Principal
from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.access.rights import Right, checking
from rmq_pipeline.access.source import check_free, listening
from rmq_pipeline.access.users import OWNER
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide.settle_each import ReleaseEach
from rmq_pipeline.broker.verbs import signature
from rmq_pipeline.broker.verbs.declaration import Declaration, declarations
from rmq_pipeline.broker.work.meter import Meter
from rmq_pipeline.broker.work.waiting import watching
from rmq_pipeline.flight import framing, wire
from rmq_pipeline.flight.service import Call, Caller, Intake, Room, Service
from rmq_pipeline.flight.sql_endpoint import SqlEndpoint
from rmq_pipeline.flight.tcp_service import TcpService
from rmq_pipeline.verb import PullResult, Verb

log = logging.getLogger(__name__)

_DECLARED: Final = declarations(Broker)
#: The verb of Flight SQL.
_SQL: Final = _DECLARED["sql"]

#: Estimated bytes of Python objects per byte of JSON, per separator, and per container.
_PARSED: Final = ((b"", 4), (b",", 40), (b":", 40), (b"[", 72), (b"{", 72))


@dataclass(frozen=True, slots=True)
class _Answer:
    """The encoded answer to a call."""

    content: Iterable[bytes]
    #: schema.RECEIVED: messages that are leased to the caller, who receives them with the last
    #: piece.
    leased: pa.Table | None = None


class FlightServer:
    """Serves any object that has the broker's verbs; it accepts calls once it is constructed."""

    def __init__(
        self,
        broker: Any,
        address: str = "127.0.0.1:0",
        *,
        token: str | None = None,
        access: Access | None = None,
        certificate: Certificate | None = None,
        insecure: bool = False,
        allowed: limits.FlightLimits = limits.FlightLimits(),
        tcp_port: int | None = 0,
    ) -> None:
        """Listen.

        Args:
            broker: has the verbs of ``Broker`` as methods, which are called from many threads; and
                ``engine``, if it leases messages.
            address: host:port; port 0 chooses a free port.
            token: token of the home's owner; a call with another token is refused.
            access: access control; without it every caller may call every verb.
            certificate: encrypts connections.
            insecure: listen beyond loopback even without access control.
            allowed: limits of the calls.
            tcp_port: port of plain connections; 0 chooses a free one, None takes none.

        Raises:
            RequestError: the address is invalid or in use, or is beyond loopback without access
                control.
        """
        host, port = listening(address, guarded=insecure or bool(access and access.enabled))
        check_free(host, port)
        self._broker = broker
        engine = getattr(broker, "engine", None)
        self._meter: Meter | None = getattr(engine, "meter", None)
        #: Refuses what a standby does not answer.
        self._check_serves: Callable[..., None] | None = getattr(broker, "check_serves", None)
        self._token = token
        self._access = access
        self._closing = threading.Event()
        self._room = Room(allowed)
        self._silent_s = allowed.silent_s
        #: By thread: schema.RECEIVED that is being written to a caller.
        self._giving: dict[int, pa.Table] = {}
        #: True when the broker is about to close: messages leased from now on are released at once.
        self._is_over = False
        named = f"[{host}]" if ":" in host else host
        self._tcp: TcpService | None = None
        if tcp_port is not None:
            self._tcp = self._plain(host, tcp_port, certificate=certificate, allowed=allowed)
        try:
            self._service = self._grpc(f"{named}:{port}", certificate=certificate, allowed=allowed)
        except BaseException:
            if self._tcp is not None:
                self._tcp.stop()
            raise
        self.port = self._service.port
        self.address = f"{named}:{self.port}"

    def _plain(
        self,
        host: str,
        port: int,
        *,
        certificate: Certificate | None,
        allowed: limits.FlightLimits,
    ) -> TcpService:
        return TcpService(
            host,
            port,
            exchange=self.exchange,
            greet=self._greet,
            certificate=certificate,
            silent_s=allowed.silent_s,
        )

    def _grpc(
        self, address: str, *, certificate: Certificate | None, allowed: limits.FlightLimits
    ) -> Service:
        return Service(
            address,
            exchange=self.exchange,
            sign_in=self._sign_in,
            sql=SqlEndpoint(self, self._room, silent_s=allowed.silent_s),
            announce=self._announce,
            certificate=certificate,
            calls=allowed.calls,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def refuse(self) -> None:
        """Refuse all calls from now on, waiting ones too, because the broker is stopping."""
        self._closing.set()

    def shutdown(self) -> None:
        """Refuse new calls, wait for running ones, stop listening."""
        self.refuse()
        if self._tcp is not None:
            self._tcp.stop()
        self._service.shutdown()
        if self._tcp is not None:
            self._tcp.wait()

    def exchange(self, call: Call) -> Iterator[bytes]:
        """Carry out one call (see ``wire``), and yield its answer.

        Raises:
            RocketMQError: the call is refused before its body was read completely.
            ForeignAction: it is an action of Flight SQL.
        """
        said = Intake(call, silent_s=self._silent_s)
        try:
            answer = self._answer(call, said)
        except framing.ForeignAction:
            raise
        except Exception as error:
            refused = (
                error
                if isinstance(error, errors.RocketMQError)
                else self._translated("A call", error)
            )
            if not said.is_over:
                raise refused from error
            yield wire.refusal(refused)
            return
        if answer.leased is None:
            yield from answer.content
            return
        this = threading.get_ident()
        self._giving[this] = answer.leased
        if self._is_over:
            self.take_back()
        is_sent = False
        try:
            for piece in answer.content:
                if this not in self._giving:
                    raise errors.BrokerUnavailableError("The broker is stopping.")
                yield piece
            # A caller reads to the end of the stream; one that cancelled before did not get the
            # messages.
            is_sent = call.is_active()
        finally:
            leased = self._giving.pop(this, None)  # None: ``take_back`` has released them
            if leased is not None and not is_sent:
                self._take_back(leased)

    def take_back(self) -> None:
        """Release messages leased to callers that do not read their answers to the end.

        A receive that leases messages later releases them itself.
        """
        self._is_over = True
        for thread in list(self._giving):
            if (leased := self._giving.pop(thread, None)) is not None:
                self._take_back(leased)

    def _take_back(self, leased: pa.Table) -> None:
        """Release messages that were not delivered to their caller; the attempt does not count."""
        receipts = receipt.decode(leased.column("receipt_handle"))
        try:
            self._broker.engine.submit(ReleaseEach(receipts))
        except errors.RocketMQError as error:
            log.warning("The leases of a caller that has gone could not be released: %s", error)

    def _answer(self, call: Call, said: Intake) -> _Answer:
        if self._closing.is_set():
            raise errors.BrokerUnavailableError("The broker is stopping.")
        # The headers name the caller: nothing is read from a caller without rights.
        caller = self._caller(call.headers)
        command = said.command()
        own = _parsed_bytes(command)
        with self._room.hold(own, caller=_named(caller, call)):
            parsed = wire.read_command(command)
            del command  # The call may wait for a minute.
            with self._counted(parsed.verb.name):
                _check_waiting(parsed, own)
                return self._obeyed(call, said, command=parsed, caller=caller, own=own)

    def admit(self, call: Caller) -> Principal | None:
        """Return the caller of Flight SQL; its headers must allow the verb ``sql``.

        Raises:
            RocketMQError: the call is refused.
        """
        if self._closing.is_set():
            raise errors.BrokerUnavailableError("The broker is stopping.")
        caller = self._caller(call.headers)
        self._authorize(_SQL, _SQL.rights.named({}), caller=caller, call=call)
        return caller

    def ask(self, call: Caller, method: str, *, args: dict[str, Any]) -> Any:
        """Call a method of the broker for Flight SQL, with the rights and limits of ``sql``.

        Raises:
            RocketMQError: the broker refuses it.
        """
        with self._counted(_SQL.verb.name):
            return self._call(_SQL, args, caller=self.admit(call), call=call, method=method)

    @contextmanager
    def _counted(self, verb: str) -> Iterator[None]:
        """Count a call and its duration, until its answer or its refusal."""
        began = time.perf_counter()
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
            raise
        finally:
            if self._meter is not None:
                self._meter.called("flight", verb, began=began, error=failure)

    def _obeyed(
        self,
        call: Call,
        said: Intake,
        *,
        command: wire.Command,
        caller: Principal | None,
        own: int,
    ) -> _Answer:
        verb, plain, lengths = command
        if call.is_action and not verb.quick:
            raise errors.RequestError(
                f"{verb.name} is not a Flight action: call it by do_exchange."
            )
        size = sum(length for _, length in lengths)
        _check_waiting(command, own + size)
        said.expect(size)
        declared = _DECLARED[verb.name]
        self._authorize(declared, declared.rights.named(plain), caller=caller, call=call)
        if self._check_serves is not None:
            self._check_serves(verb.name, leader_only=wire.LEADER_ONLY in call.headers)
        named = _named(caller, call)
        with self._room.hold(size, caller=named, own=own):
            body = said.body(lambda rate: self._room.check_share(named, bytes_per_s=rate))
            args = wire.arguments(verb, plain, parts=framing.cut(body, lengths))
            del body  # Arguments that are copies must not keep the body alive.
            result = self._call(declared, args, caller=caller, call=call)
            leased = _leased(verb, args, result=result)
        if isinstance(result, PullResult):
            result = result.to_table()
        if not isinstance(result, pa.Table):
            return _Answer([wire.value(result)])
        return _Answer(wire.pieces(result, whole=call.is_action), leased=leased)

    def _caller(self, headers: Mapping[str, str]) -> Principal | None:
        """Return the caller; None if there is no access control.

        A user's credentials take precedence over the token of the home.

        Raises:
            BrokerUnavailableError: the token belongs to another broker, or to another start of this
                one.
            UnauthorizedError: the credentials are wrong or missing.
        """
        token = headers.get(wire.TOKEN)
        is_owner = False
        if token and self._token:
            is_owner = hmac.compare_digest(token.encode(), self._token.encode())
            if not is_owner:
                raise errors.BrokerUnavailableError("Another broker answers at this address.")
        if self._access is None or not self._access.enabled:
            return None
        authorization = headers.get("authorization")
        if is_owner and not authorization:
            return OWNER
        return self._access.authenticate(authorization)

    def _greet(self, headers: Mapping[str, str]) -> None:
        """Refuse a plain connection whose calls would be refused."""
        if self._closing.is_set():
            raise errors.BrokerUnavailableError("The broker is stopping.")
        self._caller(headers)

    def _announce(self, call: Caller) -> bytes:
        """Return the port of plain connections and their key; nothing if there are none."""
        self._greet(call.headers)
        return b"" if self._tcp is None else self._tcp.announcement()

    def ports(self) -> list[int]:
        """Return the ports that this endpoint listens at."""
        return [self.port] if self._tcp is None else [self.port, self._tcp.port]

    def _sign_in(self, authorization: str | None) -> str:
        """Exchange a password for a token; return an empty string without access control."""
        principal = self._access.sign_in(authorization) if self._access is not None else None
        return "" if self._access is None or principal is None else self._access.token(principal)

    def _authorize(
        self,
        declared: Declaration,
        rights: Iterable[Right],
        *,
        caller: Principal | None,
        call: Caller,
    ) -> None:
        if self._access is None or self._access.is_unbounded(caller):
            return
        if declared.rights.super_only:
            self._access.authorize_super(caller)
        for resource, action in rights:
            self._access.authorize(caller, resource=resource, action=action, peer=call.peer)

    def _call(
        self,
        declared: Declaration,
        args: dict[str, Any],
        *,
        caller: Principal | None,
        call: Caller,
        method: str | None = None,
    ) -> object:
        """Call the method of a verb, or another one with the rights of this verb."""
        name = declared.verb.name
        does: Callable[..., object] = getattr(self._broker, method or name)
        signature.check(name, does, args=args)

        def is_gone() -> bool:
            return not call.is_active()

        try:
            rights = declared.rights.of(args, self._broker)
            authorize = partial(self._authorize, declared, caller=caller, call=call)
            authorize(rights)
            with watching(is_gone, is_closing=self._closing.is_set), checking(authorize):
                result = does(**args)
        except errors.RocketMQError:
            raise
        except Exception as error:
            raise self._translated(name, error) from error
        # A caller that acks with its receive must not take the acks for refused.
        waits = not args.get("ack") and (args.get("wait_ms") or name == "receive")
        if self._closing.is_set() and waits and _has_nothing(result, args):
            raise errors.BrokerUnavailableError("The broker is stopping.")
        return result

    def _translated(self, name: str, error: Exception) -> errors.RocketMQError:
        if self._closing.is_set():
            return errors.BrokerUnavailableError("The broker is stopping.")
        log.error("%s failed", name, exc_info=error)
        return errors.RocketMQError(f"{name} failed: {type(error).__name__}: {error}.")


def _parsed_bytes(command: bytes) -> int:
    """Estimate the memory of a parsed command, in bytes."""
    return sum(each * (command.count(sign) if sign else len(command)) for sign, each in _PARSED)


def _named(caller: Principal | None, call: Caller) -> str:
    """Return the calling user, or the address of the call."""
    return call.peer if caller is None else caller.name


def _check_waiting(command: wire.Command, size: int) -> None:
    """Refuse a call that waits and holds much memory meanwhile.

    Raises:
        RequestError: the call would do so.
    """
    if command.plain.get("wait_ms") and size > limits.FLIGHT_WAITING_BYTES:
        raise errors.RequestError(
            f"The arguments of {command.verb.name} take {size} bytes of memory, and a call that"
            f" waits may hold {limits.FLIGHT_WAITING_BYTES}.",
            remedy="Name fewer topics or queues in one call, or ack in a call of its own.",
        )


def _leased(verb: Verb, args: dict[str, Any], *, result: object) -> pa.Table | None:
    """Return messages that must be released if this answer is lost.

    A receive with an attempt id may be repeated, and then returns the same messages.
    """
    if verb.name != "receive" or not isinstance(result, pa.Table) or args.get("attempt_id"):
        return None
    return result if result.num_rows else None


def _has_nothing(result: object, args: Mapping[str, Any]) -> bool:
    """Return True if a call that waited has an empty result."""
    match result:
        case pa.Table():
            return not result.num_rows
        case PullResult():
            return not result.messages.num_rows
        case {"version": version}:
            return bool(version == args.get("known_version"))
    return False
