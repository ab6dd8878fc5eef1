"""One RPC: its message types, its handler, and the permissions it needs."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rmq_pipeline.rocketmq.authorising import Demands
from rmq_pipeline.rocketmq.caller import Caller


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
