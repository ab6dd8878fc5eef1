"""SyncLiteSubscription: the lite topics that a client subscribes to."""

from functools import partial
from typing import Any, Final

from rmq_pipeline.broker.verbs.on_loop import check_client, check_names
from rmq_pipeline.errors import NotFoundError, RequestError
from rmq_pipeline.rocketmq.clients import LIVE_WITH_STREAM_MS, Caller
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.protocol import (
    OK,
    LiteSubscriptionAction,
    SyncLiteSubscriptionRequest,
    SyncLiteSubscriptionResponse,
)

_ACTIONS: Final = {
    LiteSubscriptionAction.PARTIAL_ADD: "add",
    LiteSubscriptionAction.PARTIAL_REMOVE: "remove",
    LiteSubscriptionAction.COMPLETE_ADD: "replace",
    LiteSubscriptionAction.COMPLETE_REMOVE: "clear",
}


class Lite:
    """Lite subscriptions of clients; they end when their client dies.

    The broker stores subscriptions without a time limit. A client gets a new id at each start, and
    repeats its subscriptions every 30 s, so the subscriptions of old ids have to be removed here.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        #: Consumer groups and topics of each client that has subscribed.
        self._known: dict[str, set[tuple[str, str]]] = {}
        state = context.bridge.engine.state
        for group_id, topic_id in list(state.subscriptions):
            where = (state.groups[group_id].name, state.topics[topic_id].topic.name)
            for client_id in state.subscriptions.clients(group_id, topic_id):
                self._known.setdefault(client_id, set()).add(where)
        #: By this time every live client has called since this endpoint started.
        self._complete_ms = context.clock.now_ms() + LIVE_WITH_STREAM_MS
        context.clients.on_gone(self._forget)

    async def sync_lite_subscription(
        self, request: SyncLiteSubscriptionRequest, caller: Caller
    ) -> Any:
        """Add, remove, replace or clear a client's lite topics."""
        topic, group = caller.named(request.topic), caller.named(request.group)
        action = _ACTIONS.get(request.action)
        if action is None:
            raise RequestError(f"Subscription action {request.action} is unknown.")
        names = () if action == "clear" else check_names(request.lite_topic_set)
        client_id = check_client(caller.client_id)
        await self._context.groups.ensure(group, [topic])
        await self._context.bridge.sync_lite(
            group, topic, client_id=client_id, action=action, names=names
        )
        self._known.setdefault(client_id, set()).add((group, topic))
        self._forget_gone()
        return SyncLiteSubscriptionResponse(status=OK)

    def _forget_gone(self) -> None:
        if self._context.clock.now_ms() >= self._complete_ms:
            for client_id in list(self._known):
                if not self._context.clients.is_live(client_id):
                    self._forget(client_id)

    def _forget(self, client_id: str) -> None:
        for group, topic in self._known.pop(client_id, ()):
            self._context.bridge.start(partial(self._clear, group, topic, client_id=client_id))

    async def _clear(self, group: str, topic: str, *, client_id: str) -> None:
        sync = self._context.bridge.sync_lite
        try:
            await sync(group, topic, client_id=client_id, action="clear")
        except NotFoundError:  # the group or the topic was deleted, too
            return
