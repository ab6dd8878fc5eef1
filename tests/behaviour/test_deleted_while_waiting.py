"""Whoever waits at a topic, or as a group, is told when it is deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rmq_pipeline import errors

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

WAIT_MS = 10_000


@pytest.mark.every_endpoint
@pytest.mark.parametrize("what", ["topic", "group"])
def test_a_receive_that_waits_is_told(
    endpoint: Endpoint, topic: Make, group: Make, what: str
) -> None:
    name, readers = topic(), group()
    waiting = endpoint.begin(lambda: endpoint.broker.receive(readers, name, wait_ms=WAIT_MS))

    if what == "topic":
        endpoint.broker.delete_topic(name)
    else:
        endpoint.broker.delete_group(readers)

    with pytest.raises(errors.NotFoundError):
        waiting.result(60)


@pytest.mark.every_endpoint
def test_a_pull_that_waits_is_told(endpoint: Endpoint, topic: Make) -> None:
    name = topic(queues=1)
    waiting = endpoint.begin(lambda: endpoint.broker.pull(name, {0: 0}, wait_ms=WAIT_MS))

    endpoint.broker.delete_topic(name)

    with pytest.raises(errors.TopicNotFoundError):
        waiting.result(60)


@pytest.mark.every_endpoint
def test_a_heartbeat_that_waits_is_told(endpoint: Endpoint, topic: Make, group: Make) -> None:
    name, readers = topic(), group()
    version = endpoint.broker.heartbeat(readers, "one", topics=[name], details={})["version"]
    waiting = endpoint.begin(
        lambda: endpoint.broker.heartbeat(
            readers, "one", topics=[name], details={}, known_version=version, wait_ms=WAIT_MS
        )
    )

    endpoint.broker.delete_group(readers)

    with pytest.raises(errors.ConsumerGroupNotFoundError):
        waiting.result(60)
