"""Line charts as SVG, drawn on the server, with titles that say the values."""

from types import MappingProxyType
from typing import Final

from markupsafe import Markup

from rmq_pipeline.text import format_ms
from rmq_pipeline.web.state import Chart, Series

_WIDTH: Final = 560
_HEIGHT: Final = 150
_LEFT: Final = 48
_RIGHT: Final = 8
_TOP: Final = 10
_BOTTOM: Final = 22
#: Colors of page.css; further lines repeat them.
_COLORS: Final = 6
#: The same line has the same color in every chart.
_COLOR_OF: Final = MappingProxyType({"stored": 0, "acked": 1, "failed": 2})
#: Lines that a legend names.
_NAMED: Final = 12


def svg(chart: Chart) -> Markup:
    """Draw a chart; each point has a title with its time and value."""
    lines = chart.lines[:_NAMED]
    peak = _round_up(max((max(line.values, default=0.0) for line in lines), default=0.0))
    drawn = Markup("").join(
        _line(line, _color(line, number), chart=chart, peak=peak)
        for number, line in enumerate(lines)
    )
    named = Markup("").join(
        Markup('<span class="key line{}">{}</span>').format(_color(line, number), line.name)
        for number, line in enumerate(lines)
    )
    return Markup(
        '<figure class="chart"><figcaption>{} {}</figcaption>'
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}{}</svg></figure>'
    ).format(chart.title, named, _WIDTH, _HEIGHT, chart.title, _axes(chart, peak), drawn)


def _color(line: Series, number: int) -> int:
    return _COLOR_OF.get(line.name, number % _COLORS)


def _axes(chart: Chart, peak: float) -> Markup:
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = _y(peak * share, peak)
        parts.append(
            Markup(
                '<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>'
                '<text x="{}" y="{}" text-anchor="end">{}</text>'
            ).format(_LEFT, _WIDTH - _RIGHT, y, y, _LEFT - 6, y + 4, _short(peak * share))
        )
        at_ms = chart.from_ms + int((chart.to_ms - chart.from_ms) * share)
        anchor = {0.0: "start", 1.0: "end"}.get(share, "middle")
        parts.append(
            Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>').format(
                _x(share), _HEIGHT - 6, anchor, format_ms(at_ms)[11:16]
            )
        )
    return Markup("").join(parts)


def _line(line: Series, color: int, *, chart: Chart, peak: float) -> Markup:
    steps = max(1, len(line.values) - 1)
    points = [
        (_x(number / steps), _y(value, peak), value) for number, value in enumerate(line.values)
    ]
    path = " ".join(f"{x},{y}" for x, y, _ in points)
    span_ms = chart.to_ms - chart.from_ms
    dots = Markup("").join(
        Markup('<circle cx="{}" cy="{}" r="5"><title>{} {} {}</title></circle>').format(
            x,
            y,
            format_ms(chart.from_ms + span_ms * number // steps)[11:19],
            line.name,
            f"{value:g}",
        )
        for number, (x, y, value) in enumerate(points)
    )
    return Markup('<g class="line{}"><polyline points="{}"/>{}</g>').format(color, path, dots)


def _x(share: float) -> float:
    return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * share, 1)


def _y(value: float, peak: float) -> float:
    return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / peak, 1)


def _round_up(value: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten, at least 1."""
    power = 1.0
    while power < value:
        power *= 10
    return next(power * step for step in (0.2, 0.5, 1.0) if power * step >= max(value, 1.0))


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
