"""The door and the broker have the same verbs."""

import inspect

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.flight import wire
from rmq_pipeline.flight.client import Client

VERBS = sorted(set(wire.VERBS) - {"ping"})


def parameters(method: object) -> list[tuple[str, object, object]]:
    assert callable(method)
    found = inspect.signature(method).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


@pytest.mark.parametrize("verb", VERBS)
def test_verb_takes_the_same_arguments_at_both_ends(verb: str) -> None:
    assert parameters(getattr(Client, verb)) == parameters(getattr(Broker, verb))


def test_every_verb_of_the_broker_has_a_door() -> None:
    ours = {"open", "close", *VERBS}

    methods = {name for name, value in vars(Broker).items() if callable(value)}
    assert {name for name in methods if name[0] != "_"} <= ours


@pytest.mark.parametrize("verb", wire.VERBS.values(), ids=wire.VERBS)
def test_tables_of_the_wire_are_arguments(verb: wire.Verb) -> None:
    names = {name for name, _, _ in parameters(getattr(Client, verb.name))}

    assert names.issuperset([*verb.tables, *verb.table_maps])
    assert names.issuperset(verb.repeatable_with)
    assert not verb.long_poll or "wait_ms" in names
