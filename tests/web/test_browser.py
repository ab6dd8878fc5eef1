"""The pages in headless Chromium, clicked as a person would."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.incident_night import NIGHT, Night

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.slow


def cell(window: Page, group: str, column: int) -> Locator:
    """A cell of the overview's groups."""
    return window.locator(f"tr:has(a:text-is('{group}')) td").nth(column)


def move_slider(window: Page, at_ms: int) -> None:
    """Move the slider, as a drag of its thumb does."""
    window.locator("#slider").evaluate(
        "(slider, at) => { slider.value = at;"
        " slider.dispatchEvent(new Event('input', {bubbles: true})); }",
        at_ms,
    )


def test_the_slider_shows_the_state_as_of_a_moment(window: Page) -> None:
    window.goto("/?span=all")
    expect(cell(window, "billing", 3)).to_have_text("16")
    at_ms = int(NIGHT.timestamp() * 1000) + (2 * 60 + 12) * 60_000

    move_slider(window, at_ms)

    window.get_by_text("As of 2026-03-07 02:12:00.000Z").wait_for()
    expect(cell(window, "billing", 3)).to_have_text("14")
    assert f"at={at_ms}" in window.url
    window.get_by_text("+10 min").click()
    window.get_by_text("As of 2026-03-07 02:22:00.000Z").wait_for()
    expect(cell(window, "billing", 3)).to_have_text("13")
    # The other pages keep the moment; the way back goes to now.
    window.locator("td a", has_text="billing").click()
    window.get_by_text("As of 2026-03-07 02:22:00.000Z").wait_for()
    window.locator("#now").click()
    window.locator(".moment.now").wait_for()


def test_a_message_is_found_and_its_life_is_shown(window: Page) -> None:
    window.goto("/")
    window.locator("td a", has_text="orders").first.click()
    window.get_by_label("Key").fill("key-5")
    window.get_by_role("button", name="Find").click()
    window.locator("#messages a", has_text="order-5").click()

    window.locator("h1", has_text="order-5").wait_for()
    steps = ["stored", "lease", "retry", "lease", "park", "lease", "ack"]
    expect(window.locator(".timeline li strong")).to_have_text(steps)
    expect(window.locator("#body")).to_have_text("{}")


def test_a_parked_message_group_is_unparked(window: Page, night: Night) -> None:
    window.goto("/groups/billing")
    window.locator("button.unpark").click()
    dialog = window.locator("dialog")
    expect(dialog).to_contain_text("1 parked messages are delivered again")
    dialog.get_by_role("button", name="Cancel").click()
    assert night.broker.sql("FROM parked").num_rows == 1

    window.locator("button.unpark").click()
    dialog.locator("#confirm").click()

    dialog.locator("#done").wait_for()
    assert night.broker.sql("FROM parked").num_rows == 0
    dialog.get_by_role("button", name="Close").click()
    # The live part follows.
    window.locator("#parked").wait_for(state="detached")


def test_dead_letters_are_redriven(window: Page, night: Night) -> None:
    window.goto("/groups/shipping")
    window.locator("button.redrive").click()
    dialog = window.locator("dialog")
    expect(dialog).to_contain_text("4 dead letters are delivered to shipping again")

    dialog.locator("#confirm").click()

    dialog.locator("#done").wait_for()
    dialog.get_by_role("button", name="Close").click()
    window.locator("#redrives td", has_text="redrive-").wait_for()
    night.settle("shipping", night.receive("shipping", 100))
    expect(window.locator("#redrives tbody td").nth(3)).to_have_text("4")


def test_offsets_are_reset(window: Page, night: Night) -> None:
    window.goto("/groups/billing")
    window.get_by_label("Time (UTC)").fill("2026-03-07 02:25:00")
    window.locator("#reset").click()
    dialog = window.locator("dialog")
    expect(dialog).to_contain_text("0 messages are delivered again, 0 are skipped")

    dialog.locator("#confirm").click()

    dialog.locator("#done").wait_for()
    assert night.broker.committed_offsets("billing", "orders")[0][0] == 20


def test_the_overview_follows_the_broker(window: Page, night: Night) -> None:
    window.goto("/")
    expect(cell(window, "billing", 3)).to_have_text("16")

    night.send(range(200, 205), message_group=lambda n: f"customer-{n}")

    expect(cell(window, "billing", 3)).to_have_text("21")


def test_an_opened_traceback_stays_open(window: Page, night: Night) -> None:
    got = night.receive("shipping", 100)
    night.settle("shipping", got, "retry", reason="no", traceback="Traceback: line 1")
    window.goto("/groups/shipping")
    window.locator("summary").first.click()

    night.send(range(300, 301))

    # The end of the queue, in the live part.
    expect(window.locator("h2:text-is('Queues') + table td").nth(4)).to_have_text("24")
    expect(window.locator("details").first).to_have_attribute("open", "")
