"""Pages: the values of each, read from the state at the moment that the request asks for."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote, urlencode

from rmq_pipeline.errors import ForbiddenError, NotFoundError, RequestError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.text import utc_ms
from rmq_pipeline.web.state import Chart, Found, Search, State

#: Lengths of the time that the slider covers, by their names.
SPANS: Final[Mapping[str, int]] = {"1h": 3_600_000, "6h": 21_600_000, "24h": 86_400_000, "all": 0}
#: Steps of the links beside the slider.
JUMPS_MS: Final[Mapping[str, int]] = {
    "−10 min": -600_000,
    "−1 min": -60_000,
    "+1 min": 60_000,
    "+10 min": 600_000,
}


@dataclass(frozen=True)
class Query:
    """Page, moment and search that a request asks for."""

    path: str
    fields: Mapping[str, str]
    #: The moment; None: now.
    at_ms: int | None
    #: The broker's time; 0: that of this machine.
    now_ms: int
    user: str | None = None
    span: str = "1h"
    #: True if the slider was moved: it has its place already.
    is_slider: bool = False
    #: True for the live part of a page only.
    is_live: bool = False

    def name(self, field: str) -> str:
        """Return the topic, group or message that the request names.

        Raises:
            RequestError: it names none.
        """
        if not (found := self.fields.get(field)):
            raise RequestError(f"The request names no {field}.", remedy="Load the page again.")
        return found

    @classmethod
    def parse(
        cls,
        path: str,
        fields: Mapping[str, Any],
        *,
        now_ms: int,
        user: str | None,
        is_slider: bool,
    ) -> "Query":
        """Read a request.

        Raises:
            RequestError: the moment is no time, or the span is unknown.
        """
        texts = {name: str(value) for name, value in fields.items()}
        at = texts.get("at", "").strip()
        at_ms = utc_ms(at) if at else None
        span = texts.get("span") or "1h"
        if span not in SPANS:
            raise RequestError(f"The span {span!r} is unknown.", remedy=f"Use {', '.join(SPANS)}.")
        return cls(path, texts, at_ms, now_ms, user, span, is_slider)

    def as_of_now(self, path: str) -> "Query":
        """Return the same query for now, at another path."""
        return replace(self, at_ms=None, path=path, is_live=True)

    def link(self, **changes: Any) -> str:
        """Return the address of this page with some parameters changed; None removes one."""
        kept = {
            name: value
            for name, value in self.fields.items()
            if name in ("at", "span", "key", "message_id", "from", "queue") and value
        }
        found = {name: value for name, value in {**kept, **changes}.items() if value is not None}
        return f"{self.address}?{urlencode(found)}" if found else self.address

    @property
    def address(self) -> str:
        """The path, quoted for a link."""
        return quote(self.path)

    def to(self, path: str) -> str:
        """Return the address of another page at the same moment."""
        kept = {name: self.fields[name] for name in ("at", "span") if self.fields.get(name)}
        return f"{path}?{urlencode(kept)}" if kept else path


@dataclass(frozen=True)
class Slider:
    """Range and place of the slider, in ms since 1970."""

    from_ms: int
    to_ms: int
    at_ms: int


@dataclass(frozen=True)
class Content:
    """Values of a page for its template."""

    title: str
    template: str
    values: Mapping[str, Any]


Page = Callable[[Client, Query], Content]


def overview(client: Client, query: Query) -> Content:
    """Return topics, groups, windows and the broker's numbers."""
    state = _state(client, query)
    groups, topics = state.groups(), state.topics()
    sums = {
        name: sum(row[name] or 0 for row in groups)
        for name in ("lag", "in_flight", "retrying", "parked", "dead_letters")
    }
    sums["scheduled"] = sum(row["scheduled"] for row in topics)
    sums["last_minute"] = sum(row["last_minute"] for row in topics)
    ages = [row["oldest_unread_at_ms"] for row in groups if row["oldest_unread_at_ms"]]
    return _content(
        "Overview",
        state,
        query=query,
        page="overview",
        groups=groups,
        topics=topics,
        sums=sums,
        oldest_at_ms=min(ages, default=None),
        windows=state.windows(),
        broker=state.broker(),
    )


def topic(client: Client, query: Query) -> Content:
    """Return a topic's queues and messages."""
    state = _state(client, query)
    name = query.name("topic")
    described = state.topic(name)
    fields = query.fields
    search = Search(
        key=fields.get("key", "").strip(),
        message_id=fields.get("message_id", "").strip(),
        from_ms=_moment(fields.get("from", "")),
        queue_id=_number(fields.get("queue", "")),
    )
    readers = [row for row in state.groups() if row["topic"] == name]
    # The messages are not in the live part: they stay as they were found.
    found = Found([]) if query.is_live else state.messages(name, search)
    return _content(
        name,
        state,
        query=query,
        page="topic",
        topic=described,
        search=search,
        messages=found.rows,
        refused=found.refused,
        readers=readers,
    )


def group(client: Client, query: Query) -> Content:
    """Return a group's progress, members, failures and dead letters."""
    state = _state(client, query)
    name = query.name("group")
    described = state.group(name)
    return _content(
        name,
        state,
        query=query,
        page="group",
        group=described,
        queues=state.queues(name),
        holders=state.holders(name),
        retrying=state.retrying(name),
        parked=state.parked(name),
        dead_letters=state.dead_letters(name),
        redrives=state.redrives(name),
        sink=state.sink(name),
        topics=sorted({row["topic"] for row in state.queues(name)}),
    )


def message(client: Client, query: Query) -> Content:
    """Return the life of a message, its body, and the sink files with its rows."""
    state = _state(client, query)
    message_id = query.name("message_id")
    steps = state.life(message_id)
    stored = state.stored(steps)
    return _content(
        message_id,
        state,
        query=query,
        page="message",
        message_id=message_id,
        steps=steps,
        message=stored,
        trace=state.trace(stored),
        sink_rows=state.sink_rows(message_id),
    )


def charts_of(client: Client, query: Query) -> list[Chart]:
    """Return the charts of a page: of a topic, of a group, or of all."""
    state = _state(client, query)
    name, group_name = query.fields.get("topic"), query.fields.get("group")
    charts = [state.activity(topic=name, group=group_name)]
    return charts if name else [*charts, state.lag_over_time(group_name)]


def place_of(client: Client, text: str) -> str:
    """Return the path of the topic, group or message of this name.

    Raises:
        NotFoundError: there is none.
    """
    for describe, kind in ((client.describe_topic, "topics"), (client.describe_group, "groups")):
        with suppress(NotFoundError, RequestError, ForbiddenError):
            describe(text)
            return f"/{kind}/{quote(text, safe='')}"
    State(client).life(text)
    return f"/messages/{quote(text, safe='')}"


def _state(client: Client, query: Query) -> State:
    return State(client, at_ms=query.at_ms, now_ms=query.now_ms)


def _content(title: str, state: State, *, query: Query, page: str, **values: Any) -> Content:
    shared = {"at_ms": state.at_ms, "is_past": state.is_past, "slider": _slider(state, query)}
    return Content(title, f"{page}.html", {**shared, **values, "page_name": page})


def _slider(state: State, query: Query) -> Slider:
    """Return the range of the slider: the span before now, or around the moment."""
    now_ms = query.now_ms or State.present_ms()
    first_ms = min(state.first_ms() or now_ms, now_ms)
    at_ms = min(max(state.at_ms, first_ms), now_ms)
    length_ms = SPANS[query.span]
    if not length_ms:
        return Slider(first_ms, now_ms, at_ms)
    to_ms = now_ms if not state.is_past else min(now_ms, at_ms + length_ms // 2)
    from_ms = max(first_ms, to_ms - length_ms)
    return Slider(from_ms, max(to_ms, from_ms + 1), at_ms)


def _moment(text: str) -> int | None:
    return utc_ms(text) if text.strip() else None


def _number(text: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or len(text) > 9:
        raise RequestError(f"{text!r} is no number of a queue.", remedy="Choose one of the list.")
    return int(text)
