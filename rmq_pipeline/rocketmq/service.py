"""The RPC service: decode a call, authenticate and authorise it, run it, and map its error."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from rmq_pipeline import limits
from rmq_pipeline.errors import BrokerUnavailableError, BusyError, RequestError
from rmq_pipeline.rocketmq import protocol, rights
from rmq_pipeline.rocketmq.clients import Caller, caller_of
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.lite import Lite
from rmq_pipeline.rocketmq.metrics import Metrics
from rmq_pipeline.rocketmq.protocol import status_of
from rmq_pipeline.rocketmq.pulling import Pulling
from rmq_pipeline.rocketmq.receiving import Receiving
from rmq_pipeline.rocketmq.rights import Demands, authorise
from rmq_pipeline.rocketmq.routes import Routes
from rmq_pipeline.rocketmq.sending import Sending
from rmq_pipeline.rocketmq.settling import Settling
from rmq_pipeline.rocketmq.telemetry import Telemetry
from rmq_pipeline.rocketmq.transactions import Checks, Transactions

log = logging.getLogger(__name__)

#: Size limits of requests that differ from GRPC_OTHER_BYTES.
_LARGEST: Final = {
    protocol.SendMessageRequest: limits.GRPC_REQUEST_BYTES,
    protocol.ReceiveMessageRequest: limits.GRPC_RECEIVE_BYTES,
    protocol.PullMessageRequest: limits.GRPC_RECEIVE_BYTES,
}
#: A request of up to this size is accepted even when the limit of all bytes is reached.
_SMALL_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Unary:
    """RPC with one request and one reply, which has a status."""

    name: str
    request: Any
    reply: Any
    handle: Callable[[Any, Caller], Awaitable[Any]]
    demands: Demands


@dataclass(frozen=True, slots=True)
class Streaming:
    """RPC with one request and a stream of frames, one of which has a status."""

    name: str
    request: Any
    reply: Any
    handle: Callable[[Any, Caller], AsyncGenerator[Any, None]]
    demands: Demands


class Service:
    """All RPCs of an endpoint. A request that cannot be decoded gets a reply with a status, too."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._meter = context.bridge.engine.meter
        self._meter.sources.append(context.clients.measure)
        self._closing = False
        self._streams = 0
        #: Unary calls under way, and the bytes of their requests.
        self._calls = 0
        self._bytes = 0
        self._running = 0
        self._idle = asyncio.Event()
        self._checks = Checks(context)
        self._telemetry = Telemetry(context, self._checks)
        self._unary = _unary_rpcs(context, self._telemetry)
        self._streaming = _streaming_rpcs(context)
        self._metrics = Metrics(context)

    def refuse(self) -> None:
        """Answer every further call with the error that the broker is stopping."""
        self._closing = True

    async def idle(self, timeout_s: float) -> None:
        """Wait until no call except telemetry streams is under way, at most ``timeout_s``."""
        if self._running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)

    def close(self) -> None:
        """Stop the background work of the handlers."""
        self._meter.sources.remove(self._context.clients.measure)
        self._checks.close()

    def _begun(self) -> None:
        self._running += 1
        self._idle.clear()

    def _ended(self) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()

    def handlers(self) -> tuple[Any, ...]:
        """Return the handlers for gRPC's server; requests and replies are bytes."""
        methods = {
            rpc.name: grpc.unary_unary_rpc_method_handler(self._replying(rpc))
            for rpc in self._unary
        }
        for rpc in self._streaming:
            methods[rpc.name] = grpc.unary_stream_rpc_method_handler(self._streaming_frames(rpc))
        methods["Telemetry"] = grpc.stream_stream_rpc_method_handler(self._converse)
        own = grpc.method_handlers_generic_handler(protocol.SERVICE, methods)
        return own, self._metrics.handlers(self._caller)

    def refusal(self, path: str, error: Exception) -> bytes | None:
        """Return the serialized reply to a call that is refused unread.

        Args:
            path: of the method, as ``/service/method``.
            error: the reason.

        Returns:
            None for methods of other services.
        """
        service, _, name = path.removeprefix("/").rpartition("/")
        rpcs: dict[str, Unary | Streaming] = {rpc.name: rpc for rpc in self._unary}
        rpcs.update({rpc.name: rpc for rpc in self._streaming})
        if service != protocol.SERVICE or name not in rpcs:
            return None
        answer = rpcs[name].reply(status=status_of(self._explained(error)))
        serialized: bytes = answer.SerializeToString()
        return serialized

    def _replying(self, rpc: Unary) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def reply(raw: bytes, call: Any) -> bytes:
            self._begun()
            self._calls += 1
            self._bytes += len(raw)
            began, failure = time.perf_counter(), None
            try:
                self._admit(len(raw))
                request, caller = self._read(raw, call, kind=rpc.request)
                self._authorise(request, caller, demands=rpc.demands)
                answer = await rpc.handle(request, caller)
            except Exception as error:  # noqa: BLE001 every error becomes a status
                failure = self._explained(error)
                answer = rpc.reply(status=status_of(failure))
            finally:
                self._bytes -= len(raw)
                self._calls -= 1
                self._ended()
            self._meter.called("grpc", rpc.name, began=began, error=failure)
            serialized: bytes = answer.SerializeToString()
            return serialized

        return reply

    def _admit(self, size: int) -> None:
        """Refuse a call when too many are under way, or their requests hold too much memory.

        Small requests are still accepted: acks are small, and settling messages frees space.

        Raises:
            BusyError: the limit of calls or of bytes is reached.
        """
        settings, others, held = self._context.settings, self._calls - 1, self._bytes - size
        if others >= settings.grpc_calls:
            raise BusyError(f"{others} calls are under way, the maximum of the setting grpc_calls.")
        if held and self._bytes > settings.grpc_request_bytes and size > _SMALL_BYTES:
            raise BusyError(
                f"Requests of {held} bytes are under way; the setting grpc_request_bytes is"
                f" {settings.grpc_request_bytes}."
            )

    def _streaming_frames(
        self, rpc: Streaming
    ) -> Callable[[bytes, Any], AsyncGenerator[bytes, None]]:
        async def frames(raw: bytes, call: Any) -> AsyncGenerator[bytes, None]:
            self._begun()
            self._streams += 1
            began, failure = time.perf_counter(), None
            try:
                if self._streams > self._context.settings.grpc_receives:
                    raise BusyError(
                        f"{self._streams - 1} receives are under way, the maximum of the setting"
                        " grpc_receives."
                    )
                request, caller = self._read(raw, call, kind=rpc.request)
                self._authorise(request, caller, demands=rpc.demands)
                # Always close the generator: it releases what its caller has not received.
                async with contextlib.aclosing(rpc.handle(request, caller)) as answers:
                    async for frame in answers:
                        yield frame.SerializeToString()
            except Exception as error:  # noqa: BLE001 every error becomes a status
                failure = self._explained(error)
                yield rpc.reply(status=status_of(failure)).SerializeToString()
            finally:
                self._streams -= 1
                self._ended()
                self._meter.called("grpc", rpc.name, began=began, error=failure)

        return frames

    async def _converse(self, commands: AsyncIterator[bytes], call: Any) -> None:
        """Serve a telemetry stream; after an error, send its status and end the stream."""
        try:
            caller = self._caller(call)
            await self._telemetry.serve(commands, caller, authorise=self._authorise)
        except grpc.aio.InternalError as error:  # a write fails so when its client goes
            log.debug("a client went away during a write: %s", error)
        except Exception as error:  # noqa: BLE001 every error becomes a status
            status = status_of(self._explained(error))
            with contextlib.suppress(grpc.aio.InternalError):
                await call.write(protocol.TelemetryCommand(status=status).SerializeToString())
                await call.abort(grpc.StatusCode.INVALID_ARGUMENT, status.message)

    def _read(self, raw: bytes, call: Any, *, kind: Any) -> tuple[Any, Caller]:
        caller = self._caller(call)
        self._context.clients.seen(caller)
        if len(raw) > (most := _LARGEST.get(kind, limits.GRPC_OTHER_BYTES)):
            raise RequestError(
                f"The {kind.DESCRIPTOR.name} takes {len(raw)} bytes; the limit is {most}."
            )
        try:
            return kind.FromString(raw), caller
        except DecodeError as error:
            raise RequestError(f"The request is not a valid {kind.DESCRIPTOR.name}.") from error

    def _caller(self, call: Any) -> Caller:
        if self._closing:
            raise BrokerUnavailableError("The broker is stopping.")
        return caller_of(call, self._context.access)

    def _authorise(self, request: Any, caller: Caller, *, demands: Demands) -> None:
        access = self._context.access
        if access is not None and access.enabled:
            authorise(access, caller, demands=demands(request, caller))

    def _explained(self, error: Exception) -> Exception:
        return BrokerUnavailableError("The broker is stopping.") if self._closing else error


def _unary_rpcs(context: Context, telemetry: Telemetry) -> tuple[Unary, ...]:
    routes, sending, transactions = Routes(context), Sending(context), Transactions(context)
    settling, lite, pulling = Settling(context), Lite(context), Pulling(context)
    handlers: dict[str, tuple[Callable[..., Any], Demands]] = {
        "QueryRoute": (routes.query_route, rights.route),
        "QueryAssignment": (routes.query_assignment, rights.consume),
        "Heartbeat": (telemetry.heartbeat, rights.consume),
        "NotifyClientTermination": (telemetry.notify_client_termination, rights.consume),
        "SendMessage": (sending.send_message, rights.send),
        "RecallMessage": (sending.recall_message, rights.publish),
        "EndTransaction": (transactions.end_transaction, rights.publish),
        "AckMessage": (settling.ack_message, rights.consume),
        "ChangeInvisibleDuration": (settling.change_invisible_duration, rights.consume),
        "ForwardMessageToDeadLetterQueue": (settling.forward, rights.consume),
        "SyncLiteSubscription": (lite.sync_lite_subscription, rights.consume),
        "UpdateOffset": (pulling.update_offset, rights.consume),
        "GetOffset": (pulling.get_offset, rights.consume),
        "QueryOffset": (pulling.query_offset, rights.look),
    }
    return tuple(
        Unary(
            name,
            getattr(protocol, f"{name}Request"),
            getattr(protocol, f"{name}Response"),
            handle,
            demands,
        )
        for name, (handle, demands) in handlers.items()
    )


def _streaming_rpcs(context: Context) -> tuple[Streaming, ...]:
    handlers: dict[str, tuple[Callable[..., Any], Demands]] = {
        "ReceiveMessage": (Receiving(context).receive_message, rights.consume),
        "PullMessage": (Pulling(context).pull_message, rights.consume),
    }
    return tuple(
        Streaming(
            name,
            getattr(protocol, f"{name}Request"),
            getattr(protocol, f"{name}Response"),
            handle,
            demands,
        )
        for name, (handle, demands) in handlers.items()
    )
