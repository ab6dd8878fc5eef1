"""The client and the broker have the same verbs, and what follows from them is fresh."""

import inspect
from pathlib import Path

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.verbs.declaration import declarations
from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.verb import Verb
from rmq_pipeline.verbs import VERBS, Verbs
from scripts import generate_verbs

DECLARED = declarations(Broker)
#: Calls that endpoints make for themselves; no other code makes them.
NOT_AT_THE_DOOR = {
    "call",
    "wind_down",
    "check_serves",
    "when_leading",
    "is_standby",
    "deliveries_of",
    "sql_schema",
    "sql_views",
    "transactions_of",
}
#: What says where, in the order of all verbs.
ORDER = ("group", "from_group", "to_group", "topic", "queue_id", "client_id")


def parameters(method: object) -> list[tuple[str, object, object]]:
    assert callable(method)
    found = inspect.signature(method).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


@pytest.mark.parametrize("verb", DECLARED)
def test_verb_takes_the_same_arguments_at_both_ends(verb: str) -> None:
    assert parameters(getattr(Client, verb)) == parameters(getattr(Broker, verb))


def public(kind: type) -> set[str]:
    """Methods of a class and of those it is made of."""
    return {name for name in dir(kind) if name[0] != "_" and callable(getattr(kind, name))}


def test_every_verb_of_the_broker_has_an_endpoint() -> None:
    ours = {"open", "close", *NOT_AT_THE_DOOR}

    assert public(Broker) - ours == set(DECLARED)


def test_every_verb_of_the_endpoint_is_one_of_the_client() -> None:
    assert set(VERBS) <= public(Client)


@pytest.mark.parametrize("verb", sorted(public(Broker) | public(Client)))
def test_group_comes_before_topic_and_both_before_the_rest(verb: str) -> None:
    kind = Broker if hasattr(Broker, verb) else Client
    given = [
        name
        for name, kind_of, _ in parameters(getattr(kind, verb))
        if kind_of is inspect.Parameter.POSITIONAL_OR_KEYWORD and name != "self"
    ]

    places = [name for name in ORDER if name in given]

    assert given[: len(places)] == places


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_tables_of_the_wire_are_arguments(verb: Verb) -> None:
    names = {name for name, _, _ in parameters(getattr(Client, verb.name))}

    assert names.issuperset([*verb.tables, *verb.table_maps])
    assert names.issuperset(verb.repeatable_with)


def test_the_declared_verbs_are_those_of_the_client() -> None:
    assert {name: each.verb for name, each in DECLARED.items()} == VERBS


@pytest.mark.parametrize("verb", DECLARED)
def test_rights_name_arguments(verb: str) -> None:
    rights, names = DECLARED[verb].rights, {n for n, _, _ in parameters(getattr(Broker, verb))}
    arguments = [rights.settles, rights.ends, rights.publishes, rights.reads]
    arguments += [each[0] for each in (rights.topic, rights.group) if each is not None]
    arguments += ["name"] if rights.window else []
    assert names.issuperset(filter(None, arguments))


@pytest.mark.parametrize("written", ["MODULE", "PAGE"])
def test_what_is_generated_from_the_verbs_is_fresh(written: str) -> None:
    text = getattr(generate_verbs, written.lower())()

    assert getattr(generate_verbs, written).read_text("utf-8") == text, "Run `make verbs`."


def test_a_broker_in_this_process_is_called_by_name(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "home", upkeep="none") as broker:
        anywhere: Verbs = broker
        assert anywhere.call("create_topic", {"name": "t", "queues": 2})["queues"] == 2
        for verb, args in (("drop", {}), ("create_topic", {"name": 1}), ("engine", {})):
            with pytest.raises(RequestError):
                anywhere.call(verb, args)
