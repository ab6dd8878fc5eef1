"""The night of an incident, served as pages; requests as a browser sends them; and a browser."""

from __future__ import annotations

import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from html import unescape
from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.web.server import PageServer, Where
from tests.incident_night import Night, live_through

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page


@dataclass(frozen=True)
class Answer:
    """An answer as a person sees it."""

    status: int
    html: str
    headers: dict[str, str]

    @property
    def text(self) -> str:
        """The words of the page, without its tags."""
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", self.html)).split())

    def table(self, heading: str) -> list[list[str]]:
        """The rows below a heading."""
        part = self.html.partition(f"<h2>{heading}</h2>")[2].partition("</table>")[0]
        rows = re.findall(r"<tr>(.*?)</tr>", part.partition("<tbody>")[2], re.DOTALL)
        cells = [re.split(r"<td[^>]*>", row)[1:] for row in rows]
        return [[Answer(0, each, {}).text for each in row] for row in cells]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        return None


@dataclass
class Visitor:
    """Sends requests to the page's server, and follows no redirect."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)

    def get(self, path: str, **fields: Any) -> Answer:
        query = f"?{urllib.parse.urlencode(fields)}" if fields else ""
        return self._send(urllib.request.Request(self.url + path + query))

    def post(self, path: str, *, origin: str | None = "", **fields: Any) -> Answer:
        request = urllib.request.Request(
            self.url + path, urllib.parse.urlencode(fields).encode(), method="POST"
        )
        if origin is not None:
            request.add_header("origin", origin or self.url)
        return self._send(request)

    def sign_in(self, user: str, password: str) -> Answer:
        """Sign in; later requests are those of the user."""
        answer = self.post("/sign-in", user=user, password=password)
        self.headers["cookie"] = answer.headers.get("set-cookie", "").partition(";")[0]
        return answer

    def _send(self, request: urllib.request.Request) -> Answer:
        for name, value in self.headers.items():
            request.add_header(name, value)
        opener = urllib.request.build_opener(_NoRedirect)
        try:
            with opener.open(request, timeout=60) as answer:
                return Answer(answer.status, answer.read().decode(), _lower(answer.headers))
        except urllib.error.HTTPError as refused:
            with refused:
                return Answer(refused.code, refused.read().decode(), _lower(refused.headers))


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


@pytest.fixture
def night(tmp_path: Any) -> Iterator[Night]:
    """A night of one's own, to change it."""
    night = Night(tmp_path / "home")
    live_through(night)
    yield night
    night.broker.close()


def serve(night: Night) -> Iterator[str]:
    """Yield the address of the pages of a night."""
    broker = night.broker
    with (
        FlightServer(broker, access=broker.access) as flight,
        PageServer(
            Where(flight.address).connect,
            "127.0.0.1:0",
            dagster_url="http://dagster.example",
            now_ms=night.clock.now_ms,
        ) as page,
    ):
        yield page.url


@pytest.fixture
def visitor(night: Night) -> Iterator[Visitor]:
    for url in serve(night):
        yield Visitor(url)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visitor]:
    """The pages of a night that no test changes."""
    night = Night(tmp_path_factory.mktemp("night") / "home")
    live_through(night)
    for url in serve(night):
        yield Visitor(url)
    night.broker.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("This machine has no Chromium.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def window(chromium: Browser, visitor: Visitor) -> Iterator[Page]:
    """A window on the pages; an error of a script, or one that the policy stops, fails the test."""
    from playwright.sync_api import expect

    page = chromium.new_page(base_url=visitor.url, viewport={"width": 1400, "height": 1000})
    # A live page waits up to 10 s before it looks again, and the machine may be busy.
    page.set_default_timeout(60_000)
    expect.set_options(timeout=60_000)
    failures: list[str] = []
    page.on("pageerror", lambda error: failures.append(str(error)))
    # Other errors of the console are those of the network: a stream that ends, for example.
    page.on(
        "console",
        lambda said: failures.append(said.text) if "Security Policy" in said.text else None,
    )
    yield page
    page.close()
    assert not failures
