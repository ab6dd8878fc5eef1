"""The broker's verbs, some calls of which are held up or lost, before or after they are made."""

from __future__ import annotations

from typing import Any

from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import BrokerUnavailableError
from tests.consumer.pieces import Gate


class Between:
    """Stands between a consumer and its broker."""

    def __init__(self, verbs: Broker, *, only: tuple[str, ...] = ()) -> None:
        """Let all calls pass for now.

        Args:
            only: verbs that are noted, held up and lost; none named: all of them.
        """
        self._verbs, self._only = verbs, only
        #: Verbs and how many things each call was about.
        self.calls: list[tuple[str, int]] = []
        self.lost_before = self.lost_after = 0
        self.gate: Gate | None = None
        self.refusal: Exception | None = None
        #: What a call is refused with that is about one of these receipts.
        self.refused_receipts: dict[str, Exception] = {}

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._verbs, name)
        if self._only and name not in self._only:
            return verb

        def call(first: Any, *others: Any, **named: Any) -> Any:
            given = others[0] if others and name == "settle" else first
            self.calls.append((name, len(given)))
            gate, self.gate = self.gate, None
            if gate is not None:
                gate.pass_through()
            if self.refusal is not None:
                raise self.refusal
            for receipt in set(self.refused_receipts).intersection(first):
                raise self.refused_receipts[receipt]
            if self.lost_before:
                self.lost_before -= 1
                raise BrokerUnavailableError("It is away.")
            answer = verb(first, *others, **named)
            if self.lost_after:
                self.lost_after -= 1
                raise BrokerUnavailableError("The answer was lost.")
            return answer

        return call
