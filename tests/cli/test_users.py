"""``rmq user``, ``rmq acl``, and what ``rmq broker`` is told about endpoints."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Rmq, Served, end, serve

ANY = "127.0.0.1:0"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A broker of its own: users would shut out the other tests."""
    served = serve(tmp_path_factory.mktemp("users") / "home", "--grpc", "none")
    yield served
    end(served)


@pytest.fixture
def rmq(no_broker: Rmq, guarded: Served, monkeypatch: pytest.MonkeyPatch) -> Rmq:
    monkeypatch.setenv("RMQ_HOME", str(guarded.home))
    return no_broker


def test_users(rmq: Rmq) -> None:
    assert "every caller may do everything" in rmq("user", "list").text

    created = rmq("user", "create", "carl", "--super", "--json").json
    told = rmq("user", "create", "dora").text
    bob = rmq("user", "create", "bob", "--password-file", "-", "--json", stdin=b"bobs-password\n")
    renewed = rmq("user", "alter", "carl", "--new-password", "--normal", "--json").json
    rmq("user", "alter", "bob", "--disable")
    listed = rmq("user", "list", "--json")

    assert created["type"] == "super"
    assert renewed["type"] == "normal"
    assert created["password"] != renewed["password"]
    assert "Keep the password" in told
    assert bob.json["disabled"] is False
    assert {user["name"]: user["disabled"] for user in listed.json} == {
        "bob": True,
        "carl": False,
        "dora": False,
    }
    for shown in (bob.text, listed.text, rmq("user", "list").text):
        assert "password" not in shown
        assert renewed["password"] not in shown
    for name in ("bob", "carl", "dora"):
        assert f"Deleted user {name}" in rmq("user", "delete", name).text


def test_policies(rmq: Rmq) -> None:
    rmq("user", "create", "bob")
    rmq("acl", "allow", "bob", "topic:o*", "--actions", "pub,sub", "--from", "10.0.0.0/8")
    rmq("acl", "deny", "bob", "topic:orders", "--actions", "sub")

    policies = rmq("acl", "list", "bob", "--json").json
    may = rmq("acl", "test", "bob", "topic:orders", "pub", "--from", "10.1.1.1")
    may_not = rmq("acl", "test", "bob", "topic:orders", "sub", "--from", "10.1.1.1", "--json")

    assert [policy["effect"] for policy in policies] == ["allow", "deny"]
    assert "10.0.0.0/8" in rmq("acl", "list").text
    assert may.code == 0
    assert "bob may pub topic:orders: the policy on topic:o* allows it" in may.text
    assert may_not.code == 1
    assert json.loads(may_not.out)["policy"]["effect"] == "deny"
    assert "Deleted 1 policies of user bob" in rmq("acl", "delete", "bob", "topic:orders").text
    assert rmq("acl", "delete", "bob", "topic:orders").code == 1
    assert "with 1 policies" in rmq("user", "delete", "bob").text


@pytest.mark.parametrize(
    "wrong",
    [
        ["user", "create", "a b"],
        ["user", "create", "bob", "--password-file", "-"],
        ["user", "alter", "nobody", "--disable"],
        ["acl", "allow", "nobody", "topic:a", "--actions", "pub"],
        ["acl", "test", "nobody", "topic:a", "pub"],
        ["acl", "list", "--flight", "grpc+tls://127.0.0.1"],
    ],
)
def test_what_is_wrong_is_told(rmq: Rmq, wrong: list[str]) -> None:
    told = rmq(*wrong)

    assert told.code == 1
    assert "Error" in told.err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--flight", "0.0.0.0:0"], "no access control"),
        (["--grpc", "0.0.0.0:0"], "no access control"),
        (["--grpc-tls", "0.0.0.0:0", "--tls", "self-made"], "no access control"),
        (["--grpc-tls", ANY], "has no certificate"),
        (["--tls-cert", "x.pem"], "--tls-key"),
        (["--tls", "yes"], "self-made"),
        (["--tls-cert", "x.pem", "--tls-key", "y.pem"], "cannot be read"),
    ],
)
def test_what_cannot_be_served_is_refused(
    no_broker: Rmq, home: Path, flags: list[str], why: str
) -> None:
    told = no_broker("broker", "--home", str(home), *flags)

    assert told.code == 1
    assert why in told.err
    assert not home.exists()
