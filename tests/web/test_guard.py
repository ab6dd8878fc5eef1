"""Requests that the page refuses: of other sites, of strangers, of users without the right."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from rmq_pipeline.errors import BusyError
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.web.server import Where
from rmq_pipeline.web.sessions import IDLE_S, Sessions
from tests.incident_night import Night
from tests.web.conftest import Visitor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rmq_pipeline.flight.client import Client
    from rmq_pipeline.web.sessions import Connect

PASSWORD = "correct-horse-battery"


@pytest.fixture
def users(night: Night) -> None:
    """A super user, one who may read orders, and one who may look at all but change nothing."""
    broker = night.broker
    broker.create_user("root", password=PASSWORD, type="super")
    for name in ("orders-only", "viewer"):
        broker.create_user(name, password=PASSWORD)
    broker.put_policy("orders-only", resource="topic:orders", actions=["get", "sub"])
    for resource in ("cluster:*", "topic:*", "group:*"):
        broker.put_policy("viewer", resource=resource, actions=["get", "list"])


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "192.168.1.5:8083", ""])
def test_a_name_that_was_pointed_here_is_refused(reader: Visitor, host: str) -> None:
    answer = Visitor(reader.url, {"host": host}).get("/")

    assert answer.status == 403
    assert "not served under the name" in answer.html


def test_the_names_of_this_machine_are_accepted(reader: Visitor) -> None:
    port = reader.url.rpartition(":")[2]

    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert Visitor(reader.url, {"host": host}).get("/sign-in").status == 200


def test_another_site_cannot_spend_the_brokers_time(reader: Visitor) -> None:
    for path in ("/", "/live?page=overview", "/charts"):
        foreign = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
        assert Visitor(reader.url, foreign).get(path).status == 403
    # A link to the page is followed.
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert Visitor(reader.url, link).get("/").status == 200


@pytest.mark.parametrize("origin", [None, "http://evil.example", "null", "http://127.0.0.1:1"])
def test_a_form_of_another_site_is_refused(
    night: Night, visitor: Visitor, origin: str | None
) -> None:
    answer = visitor.post("/do/unpark/billing", origin=origin)

    assert answer.status == 403
    assert night.broker.sql("FROM parked").num_rows == 1


def test_no_page_runs_foreign_scripts_or_stays_in_a_cache(reader: Visitor) -> None:
    for path in ("/", "/nowhere", "/sign-in"):
        headers = reader.get(path).headers
        assert "default-src 'self'" in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.usefixtures("users")
def test_without_a_user_there_is_only_the_sign_in(night: Night, visitor: Visitor) -> None:
    pages = ("/", "/topics/orders", "/plan/unpark/billing", "/messages?id=order-5")
    for path in (*pages, "/live?page=overview", "/charts", "/metrics"):
        answer = visitor.get(path)
        assert (answer.status, answer.headers["location"]) == (303, "/sign-in")
    assert visitor.post("/do/unpark/billing").status == 303
    assert night.broker.sql("FROM parked").num_rows == 1
    part = Visitor(visitor.url, {"hx-request": "true"}).get("/")
    assert (part.html, part.headers["hx-redirect"]) == ("", "/sign-in")


@pytest.mark.usefixtures("users")
def test_a_wrong_password_is_refused(visitor: Visitor) -> None:
    for user, password in (("root", "wrong"), ("nobody", PASSWORD), ("", ""), ("root", "")):
        answer = visitor.sign_in(user, password)
        assert answer.status == 401
        assert "set-cookie" not in answer.headers
        assert visitor.get("/").status == 303


@pytest.mark.usefixtures("users")
def test_a_user_signs_in_and_out(visitor: Visitor) -> None:
    answer = visitor.sign_in("root", PASSWORD)

    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "root" in visitor.get("/").text
    assert visitor.post("/sign-out").headers["location"] == "/sign-in"
    # The cookie of before is of no use any more.
    assert visitor.get("/").status == 303


@pytest.mark.usefixtures("users")
def test_a_user_sees_and_does_what_the_policies_allow(night: Night, visitor: Visitor) -> None:
    visitor.sign_in("orders-only", PASSWORD)
    overview = visitor.get("/")
    assert overview.status == 403
    assert "User orders-only may not get" in overview.text

    visitor.sign_in("viewer", PASSWORD)
    assert visitor.get("/groups/billing").status == 200
    topic = visitor.get("/topics/orders")
    # The queues may be seen, the bodies not.
    assert topic.table("Queues") == [["0", "0", "23", "23"]]
    assert "User viewer may not sub" in topic.text
    assert "{}" not in topic.text
    message = visitor.get("/messages/order-5")
    assert message.status == 200
    assert "may not sub" in message.text
    refused = visitor.post("/do/unpark/billing")
    assert refused.status == 403
    assert "User viewer may not update" in refused.text
    assert night.broker.sql("FROM parked").num_rows == 1


@pytest.mark.usefixtures("users")
def test_a_redrive_without_the_right_is_refused_at_once(visitor: Visitor) -> None:
    visitor.sign_in("viewer", PASSWORD)

    refused = visitor.post("/do/redrive/shipping")

    assert refused.status == 403
    assert "User viewer may not update" in refused.text


@pytest.mark.usefixtures("users")
def test_a_session_ends_with_its_user(night: Night, visitor: Visitor) -> None:
    visitor.sign_in("viewer", PASSWORD)
    assert visitor.get("/").status == 200

    night.broker.delete_user("viewer")

    assert visitor.get("/").status == 303


def test_a_large_or_strange_form_is_refused(visitor: Visitor) -> None:
    assert visitor.post("/sign-in", user="x" * 100_000).status == 400
    many = {f"field-{number}": "1" for number in range(60)}
    assert visitor.post("/sign-in", **many).status == 400
    strange = Visitor(visitor.url, {"content-type": "multipart/form-data; boundary=x"})
    assert strange.post("/sign-in", user="root").status == 400


@pytest.fixture
def connect(night: Night) -> Iterator[Connect]:
    """Makes real clients of the night's broker."""
    with FlightServer(night.broker, access=night.broker.access) as flight:
        yield Where(flight.address).connect


@pytest.mark.usefixtures("users")
def test_sessions_are_few_and_end_when_they_are_not_used(connect: Connect) -> None:
    now_s = iter(range(100))
    sessions = Sessions(connect, now=lambda: float(next(now_s)), most=3)
    secrets = [sessions.sign_in("root", PASSWORD) for _ in range(4)]

    assert len(set(secrets)) == 4
    assert [sessions.find(each) is not None for each in secrets] == [False, True, True, True]
    assert sessions.find("") is None
    moment_s = [0.0]
    late = Sessions(connect, now=lambda: moment_s[0])
    secret = late.sign_in("root", PASSWORD)
    for moment_s[0] in (1.0, IDLE_S, 2 * IDLE_S):
        assert late.find(secret) is not None
    moment_s[0] = 3 * IDLE_S + 1
    assert late.find(secret) is None
    for each in (sessions, late):
        each.close()


@pytest.mark.usefixtures("users")
def test_few_sign_ins_ask_the_broker_at_a_time(connect: Connect) -> None:
    answering = threading.Event()
    asking = threading.Semaphore(0)

    def slow(user: str | None, password: str | None) -> Client:
        if user is not None:
            asking.release()
            answering.wait(30)
        return connect(user, password)

    sessions = Sessions(slow, patience_s=0.0)
    with ThreadPoolExecutor(4) as pool:
        first = [pool.submit(sessions.sign_in, "root", PASSWORD) for _ in range(4)]
        for _ in first:
            assert asking.acquire(timeout=30)

        with pytest.raises(BusyError, match="Too many sign-ins"):
            sessions.sign_in("root", PASSWORD)

        answering.set()
        assert all(sessions.find(each.result(30)) for each in first)
    assert sessions.find(sessions.sign_in("root", PASSWORD))
    sessions.close()
