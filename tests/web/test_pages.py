"""Pages: the state now and as of a moment, messages with bodies, and errors that say what to do."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rmq_pipeline.web import state
from rmq_pipeline.web.rendering import age, body, short, size, time_of
from tests.incident_night import NIGHT, Night
from tests.web.conftest import Visitor

HALF_PAST_TWO = "2026-03-07 02:30:00"


def test_the_overview_has_groups_and_topics_now(reader: Visitor) -> None:
    page = reader.get("/")

    assert page.status == 200
    # Group, topic, order, lag, oldest, in flight, retrying, parked, dead letters: see question 1.
    assert page.table("Consumer groups") == [
        ["billing", "orders", "message_group", "16", "65 min", "0", "6", "2", "0"],
        ["shipping", "orders", "none", "17", "65 min", "2", "1", "0", "4"],
    ]
    (topic,) = page.table("Topics")
    assert topic == ["orders", "mixed", "1", "23", "0", "2026-03-07 02:26:00.000Z", "0", "0"]
    assert page.table("Background work")[0][:3] == ["consumer/billing", "run-2", "2"]


def test_the_overview_as_of_a_moment(reader: Visitor) -> None:
    page = reader.get("/", at="2026-03-07T02:12Z")

    assert "As of 2026-03-07 02:12:00.000Z" in page.text
    lags = {row[0]: row[3:] for row in page.table("Consumer groups")}
    # The first run of billing holds four of its messages; nothing was dead-lettered yet.
    assert lags["billing"] == ["14", "12 min", "4", "0", "0", "0"]
    assert lags["shipping"][0] == "20"
    (topic,) = page.table("Topics")
    # Messages, scheduled: three wait for their time.
    assert (topic[3], topic[6]) == ("20", "3")


def test_a_time_without_a_zone_is_utc(reader: Visitor) -> None:
    text = reader.get("/", at=HALF_PAST_TWO).text

    assert "As of 2026-03-07 02:30:00.000Z" in text
    assert text == reader.get("/", at=int(NIGHT.timestamp() * 1000) + 9_000_000).text


def test_a_topic_shows_the_newest_messages_with_their_bodies(reader: Visitor) -> None:
    page = reader.get("/topics/orders")

    rows = page.table("Messages")
    assert len(rows) == 23
    assert rows[-1] == [
        "2026-03-07 02:00:00.000Z",
        "0:0",
        "order-0",
        "customer-0",
        "–",
        "key-0",
        "{}",
    ]
    assert page.table("Consumer groups")[0][:2] == ["billing", "16"]


def test_a_topic_has_only_the_messages_of_the_moment(reader: Visitor) -> None:
    page = reader.get("/topics/orders", at="2026-03-07 02:10:00")

    assert len(page.table("Messages")) == 20
    assert page.table("Queues") == [["0", "0", "20", "20"]]


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"key": "key-7"}, ["order-7"]),
        ({"message_id": "order-9"}, ["order-9"]),
        ({"from": "2026-03-07 02:20:00"}, ["order-100", "order-101", "order-102"]),
        ({"key": "key-100", "at": "2026-03-07 02:10:00"}, []),
        ({"key": "none such"}, []),
    ],
)
def test_messages_are_found(reader: Visitor, fields: dict[str, str], found: list[str]) -> None:
    page = reader.get("/topics/orders", **fields)

    assert [row[2] for row in page.table("Messages")] == found
    assert ("No message matches." in page.text) == (not found)


def test_a_group_shows_what_failed_and_why(reader: Visitor) -> None:
    page = reader.get("/groups/billing")

    (queue,) = page.table("Queues")
    assert queue[:6] == ["orders", "0", "5", "20", "23", "16"]
    (parked,) = page.table("Parked")
    assert parked[:4] == ["customer-1", "orders", "parked", "3"]
    assert "CardError card 5 was declined" in parked[5]
    assert sorted(row[2] for row in page.table("Retrying")) == ["6"]
    (dead,) = reader.get("/groups/shipping").table("Dead letters")
    assert dead[0].startswith("Timeout carrier timeout after")
    assert dead[2:4] == ["4", "0"]


def test_the_life_of_a_message_ends_at_the_moment(reader: Visitor) -> None:
    whole = reader.get("/messages/order-5")
    then = reader.get("/messages/order-5", at="2026-03-07 02:14:00")

    assert whole.html.count("<li class=") == 7
    assert then.html.count("<li class=") == 3
    assert "card 5 was declined" in then.text
    assert "park" not in then.text
    assert "JSON" in whole.text
    assert reader.get("/messages/order-5", at="2026-03-07 01:59:00").status == 404


def test_the_search_field_finds_topics_groups_and_messages(reader: Visitor) -> None:
    places = [
        reader.get("/messages", id=each).headers["location"]
        for each in ("orders", "billing", "order-5")
    ]

    assert places == ["/topics/orders", "/groups/billing", "/messages/order-5"]
    assert reader.get("/messages", id="none such").status == 404
    assert reader.get("/messages", id="").status == 400


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/?at=yesterday", 400, "is not a time. Give ISO 8601"),
        ("/?span=9y", 400, "The span '9y' is unknown. Use 1h, 6h, 24h, all."),
        ("/topics/none", 404, "rmq topic"),
        ("/groups/none", 404, "rmq group"),
        ("/topics/orders?queue=x", 400, "is no number of a queue"),
        ("/nowhere", 404, "There is no page /nowhere. Begin at the overview."),
        ("/static/../app.py", 404, "There is no page"),
        ("/plan/none/billing", 404, "There is no such action."),
        ("/live?page=none", 404, "There is no such live page."),
        ("/live?page=topic&path=x", 400, "The request names no topic."),
        ("/messages/order-5?at=2026-03-07", 404, "No message has the id order-5 at that moment."),
    ],
)
def test_an_error_is_a_page_that_says_what_to_do(
    reader: Visitor, path: str, status: int, said: str
) -> None:
    page = reader.get(path)

    assert page.status == status
    assert said in page.text
    assert "Traceback" not in page.text


def test_the_metrics_of_the_broker_are_here_too(reader: Visitor) -> None:
    answer = reader.get("/metrics")

    families = {each.name for each in text_string_to_metric_families(answer.html)}
    assert "rocketmq_consumer_lag_messages" in families
    assert answer.headers["content-type"].startswith("text/plain")


def test_a_part_for_htmx_has_the_error_in_it(reader: Visitor) -> None:
    part = Visitor(reader.url, {"hx-request": "true"}).get("/", at="yesterday")

    assert part.status == 200
    assert part.html.startswith('<div class="notice"')


def test_the_forms_of_a_dead_letter_topic_lead_to_it(night: Night, visitor: Visitor) -> None:
    # After %, `ac` would be read as a byte.
    night.broker.create_group("account")
    page = visitor.get("/topics/%25DLQ%25account")

    assert page.status == 200
    assert page.html.count('action="/topics/%25DLQ%25account"') == 2
    assert visitor.get("/topics/%25DLQ%25account", key="x").status == 200


def test_dead_letters_of_a_topic_that_is_gone_are_counted(night: Night, visitor: Visitor) -> None:
    night.broker.delete_topic("orders", force=True)

    rows = visitor.get("/").table("Consumer groups")

    assert ["shipping", "4"] in [[row[0], row[-1]] for row in rows]


def test_a_large_topic_is_read_within_a_limit(
    visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "BODIES_BYTES", 1)

    rows = visitor.get("/topics/orders").table("Messages")

    # The newest stretches have no body any more: the limit is checked after each.
    assert len(rows) == 23
    assert sorted({row[6] for row in rows}) == ["{}", "–"]


def test_a_name_is_text_not_html(reader: Visitor) -> None:
    page = reader.get("/messages/%3Cscript%3Ealert(1)%3C%2Fscript%3E")

    assert page.status == 404
    assert "<script>alert" not in page.html
    assert "&lt;script&gt;alert" in page.html


@pytest.mark.parametrize(
    ("content", "form", "text", "is_cut"),
    [
        (b'{"b":1,"a":[2]}', "JSON", '{\n  "b": 1,\n  "a": [\n    2\n  ]\n}', False),
        # Names and values are those of the message.
        (b'{"i":1,"i":1.10e400}', "JSON", '{\n  "i": 1,\n  "i": 1.10e400\n}', False),
        (rb'["\ud800,{"]', "JSON", '[\n  "\\ud800,{"\n]', False),
        (b"[" * 99 + b"]" * 99, "JSON", "[" * 99 + "]" * 99, False),
        (b'{"a": [], "b": {} }', "JSON", '{\n  "a": [],\n  "b": {}\n}', False),
        (b"{broken", "text", "{broken", False),
        ("größer".encode(), "text", "größer", False),
        (b"", "text", "", False),
        (b"\xff\x00A", "hex", f"{'00000000  ff 00 41':<59}..A", False),
        (b"[" * 100_000, "text", "[" * 100_000, False),
        (b"a" * 300_000, "text", "a" * 262_144, True),
        # The 262,144th byte is within a character.
        (b"a" + "ö".encode() * 200_000, "text", "a" + "ö" * 131_071, True),
    ],
)
def test_a_body_is_shown_as_what_it_is(content: bytes, form: str, text: str, is_cut: bool) -> None:
    assert body(content) == {"form": form, "text": text, "is_cut": is_cut}


def test_texts_of_times_sizes_and_short_bodies() -> None:
    assert [time_of(each) for each in (None, 0, 1, 1 << 62)] == [
        *("–", "–", "1970-01-01 00:00:00.001Z", "never")
    ]
    assert [age(0, 1), age(1, 60_001), age(1, 180_001), age(1, 90_000_001)] == [
        *("–", "60 s", "3 min", "25 h")
    ]
    assert [size(None), size(1023), size(1536), size(1 << 41)] == [
        *("0 B", "1023 B", "1.5 KiB", "2.0 TiB")
    ]
    assert [short(None), short(b"a\n b"), short(b"\xff" * 9), short(b"x" * 300)] == [
        *("–", "a b", "<9 bytes>", "x" * 200 + "…")
    ]
