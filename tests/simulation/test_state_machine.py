"""Histories of all verbs, with crashes in them: the broker keeps what the model promises.

Each kind of consumer group has its share of them. RMQ_SIMULATION_HISTORIES sets how many there are
in all, by chance then; else they are always the same ones.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as profile
from hypothesis.stateful import rule, run_state_machine_as_test

from tests.simulation.archiving import Archiving
from tests.simulation.model.consumer import Consumer
from tests.simulation.scenery import CONSUMERS

HISTORIES = int(os.environ.get("RMQ_SIMULATION_HISTORIES", "0"))
STEPS = 50


class Histories(Archiving):
    """And what must be true now and then, and in the end."""

    @rule()
    def take_all(self) -> None:
        """All that may come comes: nothing is forgotten."""
        self.deliver_scheduled(1_000, None)
        self.revive(None)
        for consumer in self.model.consumers:
            expected = consumer.deliverable(self.now)
            with self.unhurried(consumer):
                self.empty(consumer)
            left = consumer.deliverable(self.now)
            assert not left, f"{consumer.name}: {left} of {expected} did not come"

    def teardown(self) -> None:
        """Drain the rest; a history that went wrong is left alone."""
        try:
            if sys.exc_info()[0] is None and hasattr(self, "model"):
                self.finish()
        finally:
            self.crashing.end()
            shutil.rmtree(self.folder)

    def finish(self) -> None:
        """Every message is acknowledged or dead in the end, and each as the model says."""
        while self.model.scheduled or any(
            consumer.having("open") or consumer.having("parked")
            for consumer in self.model.consumers
        ):
            self.crashing.clock.advance(5_000)
            for number in range(len(self.model.consumers)):
                self.unpark(number, None, False)
            self.take_all()
            for number, consumer in enumerate(self.model.consumers):
                while consumer.leased() and self.held(consumer, [True]):
                    self.settle(number, ["ack"], None, False, False, [None], {}, None, None)
        self.crashing.crash()
        self.crashing.clock.advance(5_000)
        self.take_all()
        for number, consumer in enumerate(self.model.consumers):
            assert not consumer.leased()
            self.look(number)
            self.assert_dead(consumer)
        for name, topic in self.model.topics.items():
            assert self.stored(name) == Counter(list(topic.stored)), name
        given_up = {n: 1 for n, half in self.model.halves.items() if half.state == "given_up"}
        assert self.stored("TRANS_CHECK_MAX_TIME_TOPIC") == given_up

    def assert_dead(self, consumer: Consumer) -> None:
        """All that died, as often as it did; with a message what followed it, in order."""
        letters: dict[int, list[int]] = defaultdict(list)
        for offset, number in self.dead_letters(consumer):
            letters[number].append(offset)
        times, at = Counter[int](), []
        for number in consumer.deaths:
            assert len(letters[number]) > times[number], f"{consumer.name}: {number} is not dead"
            at.append(letters[number][times[number]])
            times[number] += 1
        assert sum(map(len, letters.values())) == len(at), consumer.name
        for line in consumer.lines:
            offsets = [at[death] for death in line]
            assert offsets == sorted(offsets), f"{consumer.name}: {line}"

    def stored(self, topic: str) -> Counter[int]:
        """How often each message lies in a topic."""
        return Counter(number for queue in self.listed(topic) for _, number in queue)


@pytest.mark.parametrize("first", CONSUMERS)
def test_whatever_happens_the_promises_hold(first: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "rmq_pipeline")  # every planted failure would be told of
    run_state_machine_as_test(
        type("Histories", (Histories,), {"first": first}),
        settings=profile(
            max_examples=-(-(HISTORIES or 18) // len(CONSUMERS)),
            stateful_step_count=STEPS,
            derandomize=not HISTORIES,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
