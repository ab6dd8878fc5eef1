"""The web application: routes, the checks of each request, and errors as pages."""

import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qsl

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from rmq_pipeline.access.source import is_address, is_loopback
from rmq_pipeline.errors import (
    AccessError,
    BrokerUnavailableError,
    BusyError,
    NotFoundError,
    RequestError,
    RocketMQError,
    UnauthorizedError,
)
from rmq_pipeline.flight.client import Client
from rmq_pipeline.metrics.exposition import CONTENT_TYPE, exposition
from rmq_pipeline.web import actions, pages
from rmq_pipeline.web.pages import Page, Query
from rmq_pipeline.web.rendering import STATIC, Rendering
from rmq_pipeline.web.sessions import Sessions

log = logging.getLogger(__name__)

COOKIE: Final = "rmq_session"
#: Pause between two looks for a live page: a multiple of the time that the last look took, because
#: the broker has other work, within these limits.
_LOOK_SHARE: Final = 4
LOOK_S: Final = 2.0
_LOOK_MOST_S: Final = 10.0
#: Live pages at a time.
MOST_LIVE: Final = 32
_LIVE_THREADS: Final = 8
_CHART_THREADS: Final = 2
#: Bytes of a form.
_FORM_BYTES: Final = 64 * 1024
_FORM_FIELDS: Final = 50
#: No scripts, styles and frames but the page's own.
_POLICY: Final = (
    "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; form-action 'self';"
    " base-uri 'none'; object-src 'none'"
)
_NO_STORE: Final = (b"cache-control", b"no-store")
_HEADERS: Final = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    _NO_STORE,
)
_STATUS: Final = (
    (UnauthorizedError, 401),
    (AccessError, 403),
    (NotFoundError, 404),
    (BrokerUnavailableError, 503),
    (BusyError, 429),
    (RequestError, 400),
)
Handler = Callable[[Request], Awaitable[Response]]


def create(
    sessions: Sessions,
    *,
    host: str,
    is_open: bool = False,
    dagster_url: str | None = None,
    now_ms: Callable[[], int] | None = None,
) -> Starlette:
    """Create the application.

    Args:
        sessions: users, and their clients of the broker.
        host: the address at which it is served. At a loopback address, requests with another
            host name are refused: a page of the internet could have pointed its name here.
        is_open: True if the broker has no users; the same then holds at all addresses.
        dagster_url: address of Dagster's UI, for links to runs.
        now_ms: the broker's clock; this machine's by default.
    """
    web = _Web(sessions, Rendering(dagster_url=dagster_url), now_ms=now_ms)
    routes = [
        Route("/", web.page(pages.overview)),
        Route("/topics/{topic:path}", web.page(pages.topic)),
        Route("/groups/{group:path}", web.page(pages.group)),
        Route("/messages", web.find_message),
        Route("/messages/{message_id:path}", web.page(pages.message)),
        Route("/plan/{action}/{group:path}", web.plan),
        Route("/do/{action}/{group:path}", web.do, methods=["POST"]),
        Route("/live", web.live),
        Route("/charts", web.charts),
        Route("/metrics", web.metrics),
        Route("/sign-in", web.sign_in, methods=["GET", "POST"]),
        Route("/sign-out", web.sign_out, methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    guard = Middleware(Guard, host=host, is_open=is_open)
    return Starlette(
        routes=routes,
        middleware=[guard],
        exception_handlers={RocketMQError: web.refused, HTTPException: web.missing},
    )


class Guard:
    """Refuses requests that another web site has sent, and adds the security headers."""

    def __init__(self, app: ASGIApp, *, host: str, is_open: bool) -> None:
        """Prepare the guard.

        Args:
            app: the application.
            host: the address at which it is served.
            is_open: True if the broker has no users, so that any name could be pointed here to
                use the rights of those who can reach it.
        """
        self._app = app
        self._is_local = is_loopback(host)
        own = {socket.gethostname().lower(), socket.getfqdn().lower(), "localhost"}
        self._names = own if is_open else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def with_headers(message: Any) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                is_static = scope["path"].startswith("/static/")
                added = [each for each in _HEADERS if not (is_static and each == _NO_STORE)]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        if reason := self._reason(Request(scope)):
            await Response(f"{reason}\n", 403)(scope, receive, with_headers)
            return
        try:
            await self._app(scope, receive, with_headers)
        except Exception:
            log.exception("the page %s failed", scope["path"])
            if has_begun:
                raise
            told = "The page failed. The log of the process that serves it has the reason.\n"
            await Response(told, 500)(scope, receive, with_headers)

    def _reason(self, request: Request) -> str | None:
        """Return why the request is refused, or None."""
        named = request.headers.get("host", "").lower()
        host = named.rpartition(":")[0] if not named.endswith("]") and ":" in named else named
        if not self._is_name(host.strip("[]")):
            return f"This page is not served under the name {host!r}."
        site, mode = (request.headers.get(f"sec-fetch-{each}") for each in ("site", "mode"))
        if site == "cross-site" and mode != "navigate":
            return "Another web site has sent this request."
        if request.method in ("GET", "HEAD"):
            return None
        origin = request.headers.get("origin")
        if origin is None or origin.partition("://")[2].lower() != named:
            return "Another web site has sent this form."
        return None

    def _is_name(self, host: str) -> bool:
        if self._is_local:
            return host == "localhost" or is_loopback(host)
        return self._names is None or host in self._names or is_address(host)


class _Web:
    """Handlers of the routes."""

    def __init__(
        self, sessions: Sessions, rendering: Rendering, *, now_ms: Callable[[], int] | None
    ) -> None:
        self._sessions = sessions
        self._rendering = rendering
        self._now_ms = now_ms or (lambda: 0)
        self._redrives = actions.Redrives()
        self._pages: dict[str, Page] = {
            page.__name__: page
            for page in (pages.overview, pages.topic, pages.group, pages.message)
        }
        #: Live pages that are open. Only the event loop changes it.
        self._live = 0
        # Threads of their own: sign-in and files must not wait for what may take long.
        self._for_live = anyio.CapacityLimiter(_LIVE_THREADS)
        self._for_charts = anyio.CapacityLimiter(_CHART_THREADS)

    # ------------------------------------------------------------------------------------- pages

    def page(self, page: Page) -> Handler:
        """Return the handler that shows a page, or only its content for htmx."""

        async def handler(request: Request) -> Response:
            query = self._query(request)
            is_part = request.headers.get("hx-request") == "true"
            html = await anyio.to_thread.run_sync(
                partial(self._show, page, query, client=self._client(request), is_part=is_part)
            )
            return Response(html, media_type="text/html", headers={"vary": "HX-Request"})

        return handler

    def _show(self, page: Page, query: Query, *, client: Client, is_part: bool) -> str:
        content = page(client, query)
        template = "part.html" if is_part else "page.html"
        return self._rendering.page(template, content, query=query)

    def _query(self, request: Request) -> Query:
        session = self._sessions.find(request.cookies.get(COOKIE))
        return Query.parse(
            request.scope["path"],
            {**request.query_params, **request.path_params},
            now_ms=self._now_ms(),
            user=session.user if session is not None else None,
            is_slider=request.headers.get("hx-trigger") == "slider",
        )

    def _client(self, request: Request) -> Client:
        return self._sessions.client(request.cookies.get(COOKIE))

    async def find_message(self, request: Request) -> Response:
        """Go to the page of the message, topic or group that was typed in."""
        wanted = request.query_params.get("id", "").strip()
        if not wanted:
            raise RequestError("No message id was given.", remedy="Type one into the field.")
        found = await anyio.to_thread.run_sync(pages.place_of, self._client(request), wanted)
        return RedirectResponse(found, 303)

    async def charts(self, request: Request) -> Response:
        """Draw the charts of a page, which take longer than the page."""
        query = self._query(request)
        drawn = await anyio.to_thread.run_sync(
            pages.charts_of, self._client(request), query, limiter=self._for_charts
        )
        return Response(self._rendering.charts(drawn), media_type="text/html")

    async def metrics(self, request: Request) -> Response:
        """Answer with the broker's metrics, as its own listener does."""
        table = await anyio.to_thread.run_sync(self._client(request).metrics)
        return Response(exposition(table), headers={"content-type": CONTENT_TYPE})

    # -------------------------------------------------------------------------------------- live

    async def live(self, request: Request) -> Response:
        """Send the live part of a page as server-sent events, each time it has changed."""
        page = self._pages.get(request.query_params.get("page", ""))
        if page is None:
            raise NotFoundError("There is no such live page.", remedy="Load the page again.")
        if self._live >= MOST_LIVE:
            raise BusyError(
                f"{self._live} live pages are open.", remedy="Close some, then load this one again."
            )
        query = self._query(request).as_of_now(request.query_params.get("path", "/"))
        show = partial(self._show_live, page, query, request=request)
        self._live += 1
        try:
            # A stranger is refused here, and holds no place.
            first = await anyio.to_thread.run_sync(show, limiter=self._for_live)
        except BaseException:
            self._live -= 1
            raise
        return StreamingResponse(
            self._events(request, show, first=first),
            media_type="text/event-stream",
        )

    def _show_live(self, page: Page, query: Query, *, request: Request) -> str:
        # The session may have ended since the last look; a look does not prolong it.
        client = self._sessions.client(request.cookies.get(COOKIE), is_used=False)
        content = page(client, query)
        return self._rendering.page("live.html", content, query=query)

    async def _events(
        self, request: Request, show: Callable[[], str], *, first: str
    ) -> AsyncIterator[str]:
        try:
            html, last, took_s = first, "", 0.0
            while not await request.is_disconnected():
                if html != last:
                    lines = "".join(f"data: {line}\n" for line in html.splitlines())
                    yield f"event: live\n{lines}\n"
                else:
                    yield ": unchanged\n\n"
                last = html
                await anyio.sleep(min(max(LOOK_S, _LOOK_SHARE * took_s), _LOOK_MOST_S))
                began_s = anyio.current_time()
                try:
                    html = await anyio.to_thread.run_sync(show, limiter=self._for_live)
                except AccessError:
                    return
                except RocketMQError as error:
                    html = self._rendering.notice(error)
                took_s = anyio.current_time() - began_s
        finally:
            self._live -= 1

    # ----------------------------------------------------------------------------------- actions

    async def plan(self, request: Request) -> Response:
        """Show what an action would do."""
        plan = actions.PLANS.get(request.path_params["action"])
        if plan is None:
            raise NotFoundError("There is no such action.", remedy="Load the page again.")
        group = request.path_params["group"]
        form = dict(request.query_params)
        made = await anyio.to_thread.run_sync(
            partial(plan, self._client(request), group, form=form)
        )
        html = self._rendering.plan(made, group=group)
        return Response(html, media_type="text/html")

    async def do(self, request: Request) -> Response:
        """Carry an action out."""
        action, group = request.path_params["action"], request.path_params["group"]
        does = self._redrives.start if action == "redrive" else actions.DOES.get(action)
        if does is None:
            raise NotFoundError("There is no such action.", remedy="Load the page again.")
        form = await _form(request)
        done = await anyio.to_thread.run_sync(
            partial(does, self._client(request), group, form=form)
        )
        # The page loads its content again on this event.
        return Response(
            self._rendering.done(done, group=group),
            media_type="text/html",
            headers={"HX-Trigger": "acted"},
        )

    # ------------------------------------------------------------------------------------- users

    async def sign_in(self, request: Request) -> Response:
        """Show the form, or check the user and password that it has sent."""
        if request.method == "GET":
            return self._sign_in_form()
        form = await _form(request)
        try:
            secret = await anyio.to_thread.run_sync(
                self._sessions.sign_in, form.get("user", ""), form.get("password", "")
            )
        except UnauthorizedError as error:
            return self._sign_in_form(error)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            COOKIE,
            secret,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    def _sign_in_form(self, error: RocketMQError | None = None) -> Response:
        html = self._rendering.sign_in(error)
        return Response(html, 200 if error is None else 401, media_type="text/html")

    async def sign_out(self, request: Request) -> Response:
        """End the session."""
        self._sessions.sign_out(request.cookies.get(COOKIE))
        answer = RedirectResponse("/sign-in", 303)
        answer.delete_cookie(COOKIE)
        return answer

    # ------------------------------------------------------------------------------------ errors

    async def refused(self, request: Request, error: Exception) -> Response:
        """Answer with the error's text and remedy; an anonymous user gets the sign-in form."""
        assert isinstance(error, RocketMQError)
        is_part = request.headers.get("hx-request") == "true"
        if isinstance(error, UnauthorizedError):
            headers = {"HX-Redirect": "/sign-in"} if is_part else {"location": "/sign-in"}
            return Response(status_code=200 if is_part else 303, headers=headers)
        status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
        if status == 500:
            log.error("the page %s failed", request.url.path, exc_info=error)
        html = (
            self._rendering.notice(error)
            if is_part
            else self._rendering.error(error, user=self._user(request))
        )
        # htmx swaps answers with status 200 only.
        return Response(html, 200 if is_part else status, media_type="text/html")

    def _user(self, request: Request) -> str | None:
        session = self._sessions.find(request.cookies.get(COOKIE))
        return session.user if session is not None else None

    async def missing(self, request: Request, error: Exception) -> Response:
        """Answer a request for a path that does not exist, or with a wrong method."""
        assert isinstance(error, HTTPException)
        told = NotFoundError(
            f"There is no page {request.url.path}.", remedy="Begin at the overview."
        )
        html = self._rendering.error(told, user=self._user(request))
        return Response(html, error.status_code, media_type="text/html")


async def _form(request: Request) -> Mapping[str, str]:
    """Return the fields of a form.

    Raises:
        RequestError: the form is too large, or is not a form.
    """
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind != "application/x-www-form-urlencoded":
        raise RequestError(f"A form of type {kind!r} is not accepted.")
    content = b""
    async for piece in request.stream():
        content += piece
        if len(content) > _FORM_BYTES:
            raise RequestError(f"A form has at most {_FORM_BYTES} bytes.")
    try:
        pairs = parse_qsl(content.decode(), max_num_fields=_FORM_FIELDS, errors="strict")
    except ValueError as error:
        raise RequestError(f"The form cannot be read: {error}.") from error
    return dict(pairs)
