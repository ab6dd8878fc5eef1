"""A small SVG chart of a window over time, for a materialization's metadata."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 640
PANEL_HEIGHT: Final = 130
LEFT: Final = 64
RIGHT: Final = 16
TOP: Final = 26
BOTTOM: Final = 22
_STYLE: Final = (
    "text{font:11px sans-serif;fill:#555}.title{font-weight:bold;fill:#333}"
    ".grid{stroke:#ddd}.axis{stroke:#999}"
)


@dataclass(frozen=True)
class Series:
    """One panel: values over seconds since the window began, of equal length."""

    title: str
    seconds: Sequence[float]
    values: Sequence[float]
    color: str = "#4f43dd"


def svg(panels: Sequence[Series]) -> str:
    """Draw the panels below each other, with one time axis."""
    end = max((max(panel.seconds, default=0.0) for panel in panels), default=0.0) or 1.0
    height = PANEL_HEIGHT * len(panels)
    drawn = "".join(
        _panel(panel, top=index * PANEL_HEIGHT, end=end) for index, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}"><style>{_STYLE}</style>'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>{drawn}</svg>'
    )


def markdown(panels: Sequence[Series]) -> str:
    """Return the chart as an inline image in Markdown, which Dagster's UI shows."""
    data = base64.b64encode(svg(panels).encode()).decode()
    return f"![{'; '.join(panel.title for panel in panels)}](data:image/svg+xml;base64,{data})"


def _panel(panel: Series, *, top: int, end: float) -> str:
    bottom = top + PANEL_HEIGHT - BOTTOM
    peak = _round_up(max(panel.values, default=0.0))
    width, height = WIDTH - LEFT - RIGHT, bottom - top - TOP

    def x(seconds: float) -> float:
        return LEFT + width * seconds / end

    def y(value: float) -> float:
        return bottom - height * value / peak

    parts = [f'<text class="title" x="{LEFT}" y="{top + 16}">{html.escape(panel.title)}</text>']
    for share in (0.0, 0.5, 1.0):
        at = y(peak * share)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_short(peak * share)}</text>'
        )
    parts += [
        f'<text x="{x(end * share):.1f}" y="{bottom + 15}" text-anchor="middle">'
        f"{_short(end * share)} s</text>"
        for share in (0.0, 0.5, 1.0)
    ]
    points = [(x(s), y(v)) for s, v in zip(panel.seconds, panel.values, strict=True)]
    line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    if points:
        area = f"{points[0][0]:.1f},{bottom} {line} {points[-1][0]:.1f},{bottom}"
        parts.append(f'<polygon points="{area}" fill="{panel.color}" fill-opacity="0.15"/>')
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{panel.color}" stroke-width="1.5"/>'
        )
        parts += [
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2" fill="{panel.color}"/>' for px, py in points
        ]
    return "".join(parts)


def _round_up(value: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 1.0
    while power < value:
        power *= 10
    while power / 10 >= value:
        power /= 10
    return next(power * step for step in (0.2, 0.5, 1.0) if power * step >= value)


def _short(value: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:.3g}"
