"""Refuse calls without valid credentials before their requests are read.

gRPC reads the request of a unary method, up to GRPC_REQUEST_BYTES, before it calls the handler. A
handler of a request stream reads on demand, so the refusing handlers take streams and read nothing.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from typing_extensions import override

from rmq_pipeline.access.access import Access
from rmq_pipeline.errors import AccessError

#: Returns a method's serialized reply to a refused call, or None if the method has no status field.
Refusal = Callable[[str, AccessError], bytes | None]


class Authenticating(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Interceptor that checks the credentials in the headers of each call."""

    def __init__(self, access: Access, refusal: Refusal) -> None:
        self._access = access
        self._refusal = refusal

    @override
    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Return the handler of the method, or a handler that refuses the call."""
        handler = await continuation(details)
        if handler is None or handler.request_streaming or not self._access.enabled:
            return handler
        headers = dict(details.invocation_metadata or ())
        try:
            self._access.authenticate_mq(
                headers.get("authorization"), headers.get("x-mq-date-time")
            )
        except AccessError as error:
            answer = self._refusal(details.method, error)
            if answer is None:
                return _aborting(str(error))
            return _refusing(answer, streams=handler.response_streaming)
        return handler


def _aborting(said: str) -> Any:
    """Return a handler that ends the call with UNAUTHENTICATED and reads nothing."""

    async def end(_: AsyncIterator[bytes], call: Any) -> bytes:
        await call.abort(grpc.StatusCode.UNAUTHENTICATED, said)
        raise AssertionError("abort raises")

    return grpc.stream_unary_rpc_method_handler(end)


def _refusing(answer: bytes, *, streams: bool) -> Any:
    """Return a handler that replies with ``answer`` and reads nothing."""

    async def reply(_: AsyncIterator[bytes], call: Any) -> bytes:  # noqa: ARG001
        return answer

    async def replies(_: AsyncIterator[bytes], call: Any) -> AsyncIterator[bytes]:  # noqa: ARG001
        yield answer

    if streams:
        return grpc.stream_stream_rpc_method_handler(replies)
    return grpc.stream_unary_rpc_method_handler(reply)
