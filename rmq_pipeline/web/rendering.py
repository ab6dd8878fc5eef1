"""HTML of the pages: templates, and the texts of times, sizes and bodies in them."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode
from uuid import UUID

from jinja2 import Environment, PackageLoader, StrictUndefined

from rmq_pipeline import __version__
from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.text import format_ms, speakable, text_of
from rmq_pipeline.web import charts
from rmq_pipeline.web.actions import Plan
from rmq_pipeline.web.pages import JUMPS_MS, SPANS, Content, Query
from rmq_pipeline.web.state import Chart

STATIC: Final = Path(__file__).with_name("static")
#: Bytes of a body in a table; the page of the message has more.
_SHORT: Final = 200
#: Bytes of a body on its page.
_LONG: Final = 256 * 1024
#: Bytes of a body that is no text.
_HEX: Final = 4096
_HEX_COLUMNS: Final = 16
#: JSON that is nested deeper is shown as it is.
_MOST_DEPTH: Final = 20
_PART: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
#: Times beyond this are "never", such as the end of the invisible time of a parked message.
_NEVER_MS: Final = 253_402_300_800_000


class Rendering:
    """Fills the templates."""

    def __init__(self, *, dagster_url: str | None) -> None:
        self._templates = Environment(
            loader=PackageLoader("rmq_pipeline.web"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "time": time_of,
            "age": age,
            "count": count,
            "bytes": size,
            "path": lambda text: quote(str(text), safe=""),
            "body": body,
            "short": short,
            "chart": charts.svg,
            "live": live,
            "is_run": is_run,
            "traceback": traceback_of,
        }
        self._templates.globals |= {
            "version": __version__,
            "dagster_url": (dagster_url or "").rstrip("/"),
            "static": _static,
            "spans": tuple(SPANS),
            "jumps": JUMPS_MS,
        }

    def page(self, template: str, content: Content, *, query: Query) -> str:
        """Render a page, its content for htmx, or its live part."""
        return self._templates.get_template(template).render(
            **content.values, body_template=content.template, title=content.title, query=query
        )

    def charts(self, charts: Sequence[Chart]) -> str:
        """Render charts side by side."""
        return self._templates.get_template("charts.html").render(charts=charts)

    def notice(self, error: RocketMQError) -> str:
        """Render an error within a page."""
        return self._templates.get_template("notice.html").render(error=error)

    def error(self, error: RocketMQError, *, user: str | None) -> str:
        """Render an error as a page."""
        return self._templates.get_template("error.html").render(error=error, user=user)

    def sign_in(self, error: RocketMQError | None) -> str:
        """Render the form for user and password."""
        return self._templates.get_template("sign_in.html").render(error=error)

    def plan(self, plan: Plan, *, group: str) -> str:
        """Render the effect of an action, with the button that carries it out."""
        return self._templates.get_template("plan.html").render(plan=plan, group=group)

    def done(self, sentence: str, *, group: str) -> str:
        """Render the result of an action."""
        return self._templates.get_template("done.html").render(sentence=sentence, group=group)


def _static(name: str) -> str:
    """Return the address of a file; it changes with the version, because browsers keep it."""
    return f"/static/{name}?{urlencode({'v': __version__})}"


def live(page: Mapping[str, str], fields: Mapping[str, str]) -> str:
    """Return the parameters of the live part of a page."""
    return urlencode({**fields, **page})


def is_run(text: str) -> bool:
    """Return True if a text is the id of a Dagster run; other owners have names of their own."""
    try:
        return str(UUID(text)) == text
    except ValueError:
        return False


def traceback_of(detail: str | None) -> str:
    """Return the traceback in the detail of an event; "" if it has none."""
    try:
        found = json.loads(detail or "{}")
    except ValueError:
        return ""
    traceback = found.get("traceback") if isinstance(found, dict) else None
    return speakable(traceback) if isinstance(traceback, str) else ""


def time_of(at_ms: int | None) -> str:
    """Format a time in UTC; a dash for none."""
    if at_ms is None or at_ms <= 0:
        return "–"
    return "never" if at_ms >= _NEVER_MS else format_ms(at_ms).replace("T", " ")


def age(at_ms: int | None, now_ms: int) -> str:
    """Format the time from ``at_ms`` to ``now_ms`` with its largest unit."""
    if at_ms is None or at_ms <= 0:
        return "–"
    seconds = max(0, now_ms - at_ms) / 1000
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def count(number: float | None) -> str:
    """Format a number with spaces between thousands; a dash for none."""
    return "–" if number is None else f"{number:,}".replace(",", " ")


def size(number: int | None) -> str:
    """Format a number of bytes."""
    value = float(number or 0)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def body(content: bytes) -> Mapping[str, Any]:
    """Return a body as text to show: its form (JSON, text or hex), and True if it was cut."""
    text = _beginning(content, _LONG)
    if text is None:
        return {"form": "hex", "text": _hex(content[:_HEX]), "is_cut": len(content) > _HEX}
    if len(content) <= _LONG and text.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            json.loads(text)
            return {"form": "JSON", "text": _indented(text) or text, "is_cut": False}
    return {"form": "text", "text": text, "is_cut": len(content) > _LONG}


def _indented(text: str) -> str | None:
    """Return JSON with line breaks, its names and values as they are; None if it is nested deeply.

    Parsed and written again, repeated names would be lost, and numbers would look different.
    """
    parts: list[str] = []
    depth = 0
    for part in _PART.findall(text):
        if part in ("{", "["):
            depth += 1
            parts.append(part + "\n" + "  " * depth)
        elif part in ("}", "]"):
            depth -= 1
            if parts and parts[-1].strip() in ("{", "["):
                parts[-1] = parts[-1].strip() + part
            else:
                parts.append("\n" + "  " * depth + part)
        elif part == ",":
            parts.append(part + "\n" + "  " * depth)
        else:
            parts.append(": " if part == ":" else part)
        if depth > _MOST_DEPTH:
            return None
    return "".join(parts)


def _beginning(content: bytes, limit: int) -> str | None:
    """Return the first bytes as text, without a divided last character; None if they are none."""
    if len(content) <= limit:
        return text_of(content)
    text = content[:limit].decode(errors="ignore")
    # Without the rest of a divided character, the text has all bytes up to its end.
    return text if content.startswith(text.encode()) and limit - len(text.encode()) < 4 else None


def _hex(content: bytes) -> str:
    lines = []
    for at in range(0, len(content), _HEX_COLUMNS):
        row = content[at : at + _HEX_COLUMNS]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:08x}  {row.hex(' '):<{3 * _HEX_COLUMNS}} {letters}")
    return "\n".join(lines)


def short(content: bytes | None) -> str:
    """Return the beginning of a body on one line."""
    if content is None:
        return "–"
    text = _beginning(content, _SHORT)
    if text is None:
        return f"<{len(content)} bytes>"
    return " ".join(text.split()) + ("…" if len(content) > _SHORT else "")
