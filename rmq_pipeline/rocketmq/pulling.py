"""PullMessage and offsets, for tools that keep their own position in a queue."""

from collections.abc import AsyncGenerator
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker.verbs.on_loop import Place, Poll, check_readable
from rmq_pipeline.errors import OffsetNotFoundError, RequestError
from rmq_pipeline.rocketmq.clients import Caller
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.encoding import messages_of
from rmq_pipeline.rocketmq.protocol import (
    OK,
    Code,
    GetOffsetRequest,
    GetOffsetResponse,
    PullMessageRequest,
    PullMessageResponse,
    QueryOffsetPolicy,
    QueryOffsetRequest,
    QueryOffsetResponse,
    Resource,
    Status,
    UpdateOffsetRequest,
    UpdateOffsetResponse,
)
from rmq_pipeline.rocketmq.receiving import duration_ms, filter_of, poll_ms

#: Offsets that one pull reads; each message may have the maximum size.
BATCH: Final = 32
#: The broker stores no later time, whatever a client sends.
_FAR_MS: Final = limits.TIME_MAX_MS
_EMPTY: Final = Status(code=Code.MESSAGE_NOT_FOUND, message="no new message")


class Pulling:
    """Handlers that read by offset, and return or set offsets of groups and queues."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def pull_message(
        self, request: PullMessageRequest, caller: Caller
    ) -> AsyncGenerator[Any, None]:
        """Yield a status, messages from an offset on, and the offset to continue from."""
        context = self._context
        if request.batch_size < 1 or request.offset < 0:
            raise RequestError(
                f"batch_size {request.batch_size} must be at least 1, and offset"
                f" {request.offset} at least 0."
            )
        until_ms = context.clock.now_ms() + poll_ms(request, caller)
        resource = request.message_queue.topic
        topic = context.bridge.engine.state.topic(_readable(resource, caller)).topic
        table, offset = await self._pulled(request, topic.name, until_ms=until_ms)
        group = caller.named(request.group)
        # A client may make up a name with each pull; counters of such names would fill the memory.
        is_there = group in context.bridge.engine.state.group_ids
        context.bridge.engine.meter.delivered(
            group if is_there else "",
            topic.name,
            size=table["body"],
            pulled=table.num_rows,
        )
        yield PullMessageResponse(status=OK if table.num_rows else _EMPTY)
        for message in messages_of(table, topic=resource, type=topic.type, name=topic.name):
            yield PullMessageResponse(message=message)
        yield PullMessageResponse(next_offset=offset)

    async def _pulled(
        self, request: PullMessageRequest, topic: str, *, until_ms: int
    ) -> tuple[pa.Table, int]:
        """Return the first matching messages, and the offset to continue from.

        Waits until ``until_ms`` for a message.
        """
        context, queue_id, offset = self._context, request.message_queue.id, request.offset
        limit = min(BATCH, request.batch_size)
        wanted, filter_type = filter_of(request.filter_expression)
        poll = self._poll(topic)
        try:
            while True:
                # The topic may have been deleted and created again, maybe before this call entered
                # its line.
                if poll.place.topic_id != self._topic_id(topic):
                    poll.end(0)
                    poll = self._poll(topic)
                    continue
                _, high = await context.bridge.bounds(topic, queue_id)
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
                if table.num_rows or context.clock.now_ms() >= until_ms:
                    return table, offset
                context.bridge.check_open()
                if offset >= high:
                    await poll.sleep(until_ms)
        finally:
            poll.end(0)

    def _poll(self, topic: str) -> Poll:
        """Enter a line of the pull's own: every pull of a queue gets its messages."""
        return self._context.bridge.poll(Place(self._topic_id(topic), 0, object()))

    def _topic_id(self, topic: str) -> int:
        return self._context.bridge.engine.state.topic(topic).topic.topic_id

    async def update_offset(self, request: UpdateOffsetRequest, caller: Caller) -> Any:
        """Commit a group's offset in a queue: the messages before it are done."""
        group = caller.named(request.group)
        topic = caller.named(request.message_queue.topic)
        await self._context.groups.ensure(group, [topic])
        offsets = {request.message_queue.id: request.offset}
        update, run = self._context.broker.update_offsets, self._context.bridge.run
        await run(update, group, topic, offsets=offsets)
        return UpdateOffsetResponse(status=OK)

    async def get_offset(self, request: GetOffsetRequest, caller: Caller) -> Any:
        """Return a group's committed offset in a queue."""
        group = caller.named(request.group)
        topic = _readable(request.message_queue.topic, caller)
        queue_id = request.message_queue.id
        offset = await self._context.bridge.committed_offset(group, topic, queue_id=queue_id)
        if offset is None:
            raise OffsetNotFoundError(
                f"Group {group} has no committed offset in queue {queue_id} of topic {topic}."
            )
        return GetOffsetResponse(status=OK, offset=offset)

    async def query_offset(self, request: QueryOffsetRequest, caller: Caller) -> Any:
        """Return the first or the next offset of a queue, or the offset of a time."""
        topic = _readable(request.message_queue.topic, caller)
        queue_id = request.message_queue.id
        policy = request.query_offset_policy
        if policy == QueryOffsetPolicy.TIMESTAMP:
            at_ms = min(_FAR_MS, duration_ms(request.timestamp))
            offset_at, run = self._context.broker.offset_at, self._context.bridge.run
            offset = await run(offset_at, topic, queue_id, at_ms=at_ms)
        else:
            low, high = await self._context.bridge.bounds(topic, queue_id)
            offset = high if policy == QueryOffsetPolicy.END else low
        return QueryOffsetResponse(status=OK, offset=offset)


def _readable(resource: Resource, caller: Caller) -> str:
    """Return the name of a topic whose messages a client may read.

    Raises:
        IllegalTopicError: it holds scheduled or half messages.
    """
    name = caller.named(resource)
    check_readable(name)
    return name
