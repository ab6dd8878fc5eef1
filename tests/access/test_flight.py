"""The table endpoint with users: every verb asks for its rights, and no more than those."""

from collections.abc import Callable
from typing import Any

import pytest
from pyarrow import flight

from rmq_pipeline import errors, schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.verbs.declaration import declarations
from rmq_pipeline.flight import wire
from rmq_pipeline.flight.channel import SMALL_CALLS
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.verb import Verb
from rmq_pipeline.verbs import VERBS
from tests.access.conftest import PASSWORDS, TOKEN, SignIn, messages
from tests.access.verb_rights import CASES, CLUSTER, SUPER
from tests.waiting import until

Allow = Callable[..., None]


@pytest.fixture(scope="module")
def ann(sign_in: SignIn) -> Client:
    return sign_in("ann")


@pytest.fixture
def arguments(broker: Broker) -> Callable[[str], dict[str, Any]]:
    """The arguments of a verb's case, with a delivery or a half message of their own."""

    def give(verb: str) -> dict[str, Any]:
        args = dict(CASES[verb][0])
        for name, value in args.items():
            if isinstance(value, str) and value == "a delivery":
                broker.send("orders", messages())
                given = broker.receive("billing", "orders", limit=1)
                if name == "outcomes":
                    given = given.select(["receipt_handle"]).append_column("result", [["ack"]])
                args[name] = given
            elif isinstance(value, str) and value == "a half message":
                begun = broker.send_half("pays", messages(), producer_group="p")
                ids = begun.select(["transaction_id"])
                args[name] = (
                    ids if name == "checks" else ids.append_column("resolution", [["rollback"]])
                )
        return args

    return give


def call(client: Client, verb: str, args: dict[str, Any]) -> Exception | None:
    """What it is refused for, whatever that is."""
    try:
        client._connection.call(verb, args)
    except errors.RocketMQError as error:
        return error
    return None


def test_every_verb_has_a_case() -> None:
    declared = declarations(Broker)
    assert set(CASES) | set(SUPER) | {"ping"} == set(VERBS) == set(declared)
    assert {verb for verb, each in declared.items() if each.rights.super_only} == set(SUPER)


@pytest.mark.parametrize("verb", CASES)
def test_a_verb_needs_each_of_its_rights_and_no_more(
    ann: Client, allow: Allow, arguments: Callable[[str], dict[str, Any]], verb: str
) -> None:
    rights = CASES[verb][1]

    for missing in rights:
        allow(*(right for right in rights if right != missing))
        refused = call(ann, verb, arguments(verb))
        resource, _, action = missing.rpartition(" ")

        assert isinstance(refused, errors.ForbiddenError)
        assert f"may not {action} {resource.replace(':', ' ')}" in str(refused)

    allow(*rights)
    assert not isinstance(call(ann, verb, arguments(verb)), errors.AccessError)


def test_who_may_publish_keeps_checks_and_lets_them_go(
    ann: Client, allow: Allow, arguments: Callable[[str], dict[str, Any]]
) -> None:
    allow("topic:pays pub")

    for checks in (arguments("keep_checks")["checks"], schema.CHECK_ID.empty_table()):
        assert call(ann, "keep_checks", {"holder": "h", "checks": checks}) is None


@pytest.mark.parametrize("verb", CASES)
def test_what_is_denied_is_denied(
    ann: Client, allow: Allow, arguments: Callable[[str], dict[str, Any]], verb: str
) -> None:
    allow(*CASES[verb][1], effect="deny")

    assert isinstance(call(ann, verb, arguments(verb)), errors.ForbiddenError)


def test_tables_of_what_is_refused_by_name_are_not_kept(
    ann: Client, allow: Allow, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []
    put_together = wire.arguments

    def seen(verb: Verb, *args: Any, **more: Any) -> dict[str, Any]:
        kept.append(verb.name)
        return put_together(verb, *args, **more)

    monkeypatch.setattr(wire, "arguments", seen)

    allow("topic:pays pub")
    assert isinstance(call(ann, "send", CASES["send"][0]), errors.ForbiddenError)
    assert kept == []

    allow("topic:orders pub")
    assert call(ann, "send", CASES["send"][0]) is None
    assert kept == ["send"]


@pytest.mark.parametrize("verb", SUPER)
def test_users_and_policies_are_for_super_users(
    ann: Client, sign_in: SignIn, allow: Allow, verb: str
) -> None:
    allow("* all")

    refused = call(ann, verb, SUPER[verb])

    assert isinstance(refused, errors.ForbiddenError)
    assert "not a super user" in str(refused)
    assert call(sign_in("root"), "list_users", {}) is None
    assert not isinstance(call(sign_in("root"), "delete_user", {"name": "x"}), errors.AccessError)


@pytest.mark.parametrize("verb", [*CASES, *SUPER, "ping"])
def test_without_credentials_nothing_is_answered(sign_in: SignIn, verb: str) -> None:
    refused = call(sign_in(), verb, {})

    assert isinstance(refused, errors.UnauthorizedError)


@pytest.mark.parametrize(
    ("user", "password"), [("ann", PASSWORDS["root"]), ("ann", "wrong"), ("bob", PASSWORDS["ann"])]
)
def test_a_wrong_password_is_refused(sign_in: SignIn, user: str, password: str) -> None:
    with pytest.raises(errors.UnauthorizedError) as refused:
        sign_in(user, password=password).ping()

    assert password not in str(refused.value)


def test_super_users_may_do_everything(sign_in: SignIn) -> None:
    root = sign_in("root")

    assert root.send("orders", messages(2)).num_rows == 2
    assert root.list_users()["name"].to_pylist() == ["ann", "root"]


def test_a_reader_of_the_home_may_do_everything(sign_in: SignIn) -> None:
    owner = sign_in(token=TOKEN)

    assert owner.send("orders", messages()).num_rows == 1
    assert "ann" in owner.list_users()["name"].to_pylist()


def test_credentials_count_for_more_than_the_token(sign_in: SignIn, allow: Allow) -> None:
    allow("topic:orders pub")
    ann = sign_in("ann", token=TOKEN)

    ann.send("orders", messages())
    with pytest.raises(errors.ForbiddenError):
        ann.list_topics()
    with pytest.raises(errors.UnauthorizedError):
        sign_in("ann", token=TOKEN, password="wrong").ping()


def test_the_token_of_another_start_is_none(sign_in: SignIn) -> None:
    for client in (sign_in(token="stale"), sign_in("root", token="stale")):
        with pytest.raises(errors.BrokerUnavailableError, match="Another broker"):
            client.ping()


def test_rights_change_while_a_client_is_connected(
    ann: Client, allow: Allow, broker: Broker
) -> None:
    allow("topic:orders pub")
    ann.send("orders", messages())

    allow()
    with pytest.raises(errors.ForbiddenError, match="no policy allows it"):
        ann.send("orders", messages())
    broker.alter_user("ann", disabled=True)
    with pytest.raises(errors.UnauthorizedError):
        ann.ping()
    broker.alter_user("ann", disabled=False)
    assert ann.ping()


def test_the_address_that_a_call_comes_from_counts(ann: Client, allow: Allow) -> None:
    allow("topic:orders pub", sources=("127.0.0.0/8",))
    ann.send("orders", messages())

    allow("topic:orders pub", sources=("10.0.0.0/8",))
    with pytest.raises(errors.ForbiddenError):
        ann.send("orders", messages())


def test_receipts_given_as_a_list_are_looked_at_too(
    ann: Client, allow: Allow, broker: Broker
) -> None:
    broker.send("orders", messages())
    handles = broker.receive("billing", "orders", limit=1)["receipt_handle"].to_pylist()
    allow("topic:orders sub")
    request = wire.Request(wire.find("ack"), {"receipts": handles})

    with pytest.raises(errors.ForbiddenError, match="group billing"):
        ann._connection._once(request, [])


def test_what_a_receive_acks_needs_rights_of_its_own(
    ann: Client, allow: Allow, broker: Broker
) -> None:
    broker.ensure_topic("events", queues=1)
    broker.ensure_group("auditors")
    broker.send("events", messages())
    delivery = broker.receive("auditors", "events")
    mine, theirs = (
        ["topic:orders sub", "group:billing sub"],
        ["topic:events sub", "group:auditors sub"],
    )

    for missing, said in zip(theirs, ("topic events", "group auditors"), strict=True):
        allow(*mine, *(right for right in theirs if right != missing))
        with pytest.raises(errors.ForbiddenError, match=f"may not sub {said}"):
            ann.receive("billing", "orders", ack=delivery)

    allow(*mine, *theirs)
    ann.receive("billing", "orders", ack=delivery)
    with pytest.raises(errors.ReceiptHandleError):
        broker.ack(delivery)


def test_rights_hold_for_each_call_over_tcp(
    sign_in: SignIn, allow: Allow, broker: Broker, endpoint: FlightServer
) -> None:
    broker.create_user("eve", password="password-of-eve")
    eve, ann = sign_in("eve", password="password-of-eve"), sign_in("ann")
    for _ in range(SMALL_CALLS):
        eve.ping()
        ann.ping()
    tcp = endpoint._tcp
    assert tcp is not None
    before = set(tcp._open)
    allow("topic:orders pub")

    assert ann.send("orders", messages()).num_rows == 1
    with pytest.raises(errors.ForbiddenError, match="eve may not pub topic orders"):
        eve.send("orders", messages())
    allow()
    with pytest.raises(errors.ForbiddenError, match="ann may not pub topic orders"):
        ann.send("orders", messages())
    broker.delete_user("eve")
    with pytest.raises(errors.UnauthorizedError):
        eve.ping()
    # That ended the connection of the user who is no more, and nobody else's.
    until(lambda: len(before - set(tcp._open)) == 1)


def test_checks_of_every_topic_are_background_work(ann: Client, allow: Allow) -> None:
    allow("topic:* pub")
    assert isinstance(call(ann, "fetch_checks", {}), errors.ForbiddenError)

    allow(f"{CLUSTER} update")
    assert call(ann, "fetch_checks", {}) is None


def test_topics_that_are_no_list_are_refused(ann: Client, allow: Allow) -> None:
    """Rights are asked for the topics of a list: a mapping of them has none that is looked at."""
    allow("topic:* pub")
    for topics in ({"pays": 1}, "pays"):
        refused = call(ann, "fetch_checks", {"topics": topics})

        assert type(refused) is errors.RequestError
    allow("topic:* sub", "group:billing sub")
    args = {**CASES["heartbeat"][0], "topics": {"pays": 1}}
    assert type(call(ann, "heartbeat", args)) is errors.RequestError


def test_dead_letters_are_for_those_who_may_consume_as_the_group(ann: Client, allow: Allow) -> None:
    args = {"topic": "%DLQ%billing", "queue_id": 0, "offset": 0, "limit": 1}
    allow("topic:* sub")
    assert isinstance(call(ann, "read", args), errors.ForbiddenError)

    allow("group:billing sub")
    assert call(ann, "read", args) is None


def test_arguments_of_the_wrong_kind_open_nothing(ann: Client, allow: Allow) -> None:
    allow("topic:orders pub", "topic:orders sub")
    for verb, args in (
        ("send", {"topic": ["orders", "pays"], "messages": messages()}),
        ("send", {"topic": None, "messages": messages()}),
        ("send", {"topic": {"orders": 1}, "messages": messages()}),
        ("send", {"messages": messages()}),
        ("read", {"topic": 7}),
        ("receive", {"topic": "orders", "group": ["billing"]}),
        ("ping", {"": [1], "topic": "pays"}),
    ):
        refused = call(ann, verb, args)

        assert isinstance(refused, errors.ForbiddenError if verb != "ping" else errors.RequestError)


class _Silent(flight.ClientAuthHandler):  # type: ignore[misc]
    """Shakes hands with what the headers say."""

    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        pass

    def get_token(self) -> bytes:
        return b""


def test_a_flight_client_buys_a_token(endpoint: FlightServer, broker: Broker) -> None:
    foreign = flight.FlightClient(f"grpc://{endpoint.address}")
    header = foreign.authenticate_basic_token("root", PASSWORDS["root"])
    options = flight.FlightCallOptions(headers=[header])

    def ask() -> Any:
        command = wire.request("list_topics", {}).command()
        descriptor = flight.FlightDescriptor.for_command(command)
        writer, reader = foreign.do_exchange(descriptor, options)
        with writer:
            writer.done_writing()
            return wire.read_answer([chunk.app_metadata for chunk in reader])

    assert "orders" in ask()["name"].to_pylist()
    with pytest.raises(flight.FlightUnauthenticatedError):
        foreign.authenticate_basic_token("root", "wrong")
    # Else a token that somebody has seen would buy the next one for ever.
    with pytest.raises(flight.FlightUnauthenticatedError, match="no user and password"):
        foreign.authenticate(_Silent(), options)
    broker.alter_user("root", password="another-password")
    with pytest.raises(flight.FlightUnauthenticatedError, match="this name and password"):
        ask()
    broker.alter_user("root", password=PASSWORDS["root"])
    foreign.close()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_beyond_loopback_users_are_needed(broker: Broker, address: str) -> None:
    served = FlightServer(broker, address, access=broker.access)
    bound = served.address
    served.shutdown()

    assert int(bound.rpartition(":")[2]) > 0


def test_beyond_loopback_without_users_is_for_those_who_say_so(tmp_path: Any) -> None:
    from rmq_pipeline.access import Access

    off = Access.open(tmp_path)
    with pytest.raises(errors.RequestError, match="no access control"):
        FlightServer(object(), "0.0.0.0:0", access=off)

    FlightServer(object(), "0.0.0.0:0", access=off, insecure=True).shutdown()
