"""PullMessage and offsets: for tools that keep their own place in a queue."""

from collections.abc import AsyncGenerator
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline.broker.progress import CommittedOffset
from rmq_pipeline.broker.queries import Offsets
from rmq_pipeline.errors import IllegalOffsetError, OffsetNotFoundError, RequestError
from rmq_pipeline.rocketmq.caller import Caller
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.encoding import messages_of
from rmq_pipeline.rocketmq.polls import Place, Watch
from rmq_pipeline.rocketmq.protocol import (
    Code,
    GetOffsetRequest,
    GetOffsetResponse,
    PullMessageRequest,
    PullMessageResponse,
    QueryOffsetPolicy,
    QueryOffsetRequest,
    QueryOffsetResponse,
    Status,
    UpdateOffsetRequest,
    UpdateOffsetResponse,
)
from rmq_pipeline.rocketmq.receiving import duration_ms, filter_of, poll_ms
from rmq_pipeline.rocketmq.status import OK

#: Offsets that one pull looks at: all may be of the largest messages.
BATCH: Final = 32
#: Nothing is stored later than this, whatever a client asks for.
_FAR_MS: Final = 2**52
_EMPTY: Final = Status(code=Code.MESSAGE_NOT_FOUND, message="no new message")


class Pulling:
    """Reading by offset, and offsets of groups and queues."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def pull_message(
        self, request: PullMessageRequest, caller: Caller
    ) -> AsyncGenerator[Any, None]:
        """Status, messages from an offset on, and the offset to go on from."""
        context = self._context
        if request.batch_size < 1 or request.offset < 0:
            raise RequestError("A pull has a batch_size of 1 or more and an offset from 0 on.")
        until_ms = context.clock.now_ms() + poll_ms(request, caller)
        resource = request.message_queue.topic
        topic = context.engine.state.topic(caller.named(resource)).topic
        watch = context.polls.watch(Place(topic.topic_id, 0, object()))
        try:
            table, offset = await self._pulled(request, topic.name, watch=watch, until_ms=until_ms)
        finally:
            watch.end()
        yield PullMessageResponse(status=OK if table.num_rows else _EMPTY)
        for message in messages_of(table, topic=resource, type=topic.type, name=topic.name):
            yield PullMessageResponse(message=message)
        yield PullMessageResponse(next_offset=offset)

    async def _pulled(
        self, request: PullMessageRequest, topic: str, *, watch: Watch, until_ms: int
    ) -> tuple[pa.Table, int]:
        """The first that are there, or come in time, and where to go on."""
        context, queue_id, offset = self._context, request.message_queue.id, request.offset
        limit = min(BATCH, request.batch_size)
        wanted, filter_type = filter_of(request.filter_expression)
        while True:
            _, high = await self._bounds(topic, queue_id)
            table: pa.Table = await context.bridge.run(
                context.broker.read,
                topic,
                queue_id,
                offset=offset,
                limit=limit,
                filter=wanted,
                filter_type=filter_type,
            )
            offset = max(offset, min(high, offset + limit))
            if table.num_rows or context.clock.now_ms() >= until_ms or context.polls.closed:
                return table, offset
            if offset >= high:
                await watch.wait(until_ms)

    async def update_offset(self, request: UpdateOffsetRequest, caller: Caller) -> Any:
        """A group is done with what lies before an offset."""
        group = caller.named(request.group)
        topic = caller.named(request.message_queue.topic)
        await self._context.groups.ensure(group, [topic])
        offsets = {request.message_queue.id: request.offset}
        update, run = self._context.broker.update_offsets, self._context.bridge.run
        await run(update, group, topic, offsets=offsets)
        return UpdateOffsetResponse(status=OK)

    async def get_offset(self, request: GetOffsetRequest, caller: Caller) -> Any:
        """Where a group stands."""
        group = caller.named(request.group)
        topic = caller.named(request.message_queue.topic)
        asked = CommittedOffset(group, topic, request.message_queue.id)
        offset = await self._context.bridge.submit(asked)
        if offset is None:
            raise OffsetNotFoundError(f"Group {group} has read nothing of this queue of {topic}.")
        return GetOffsetResponse(status=OK, offset=offset)

    async def query_offset(self, request: QueryOffsetRequest, caller: Caller) -> Any:
        """Where a queue begins or ends, or what was stored at a moment."""
        topic, queue_id = caller.named(request.message_queue.topic), request.message_queue.id
        policy = request.query_offset_policy
        if policy == QueryOffsetPolicy.TIMESTAMP:
            at_ms = min(_FAR_MS, duration_ms(request.timestamp))
            offset_at, run = self._context.broker.offset_at, self._context.bridge.run
            offset = await run(offset_at, topic, queue_id, at_ms=at_ms)
        else:
            low, high = await self._bounds(topic, queue_id)
            offset = high if policy == QueryOffsetPolicy.END else low
        return QueryOffsetResponse(status=OK, offset=offset)

    async def _bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        _, bounds = await self._context.bridge.submit(Offsets(topic))
        if not 0 <= queue_id < len(bounds):
            raise IllegalOffsetError(f"Topic {topic} has no queue {queue_id}.")
        low, high = bounds[queue_id]
        return low, high
