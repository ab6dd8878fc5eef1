"""The chart of a window."""

import base64
from xml.etree import ElementTree as ET

from rmq_pipeline.orchestration import plot

SVG = "{http://www.w3.org/2000/svg}"


def test_chart_is_an_image_in_markdown() -> None:
    text = plot.markdown([plot.Series("done", [1.0, 2.0], [3.0, 4.0])])

    head, _, data = text.partition("data:image/svg+xml;base64,")
    assert head == "![done]("
    assert b"<svg" in base64.b64decode(data.removesuffix(")"))


def test_a_point_lies_where_its_value_says() -> None:
    root = ET.fromstring(plot.svg([plot.Series("done", [0.0, 10.0], [0.0, 20.0])]))

    first, last = root.iter(f"{SVG}circle")
    bottom = plot.PANEL_HEIGHT - plot.BOTTOM
    assert (float(first.attrib["cx"]), float(first.attrib["cy"])) == (plot.LEFT, bottom)
    assert (float(last.attrib["cx"]), float(last.attrib["cy"])) == (
        plot.WIDTH - plot.RIGHT,
        plot.TOP,
    )


def test_titles_are_escaped() -> None:
    root = ET.fromstring(plot.svg([plot.Series("a < b & c", [1.0], [1.0])]))

    assert any("a < b & c" in (text.text or "") for text in root.iter(f"{SVG}text"))


def test_nothing_to_show_is_an_empty_chart() -> None:
    root = ET.fromstring(plot.svg([plot.Series("done", [], [])]))

    assert any("done" in (text.text or "") for text in root.iter(f"{SVG}text"))
    assert not list(root.iter(f"{SVG}circle"))
