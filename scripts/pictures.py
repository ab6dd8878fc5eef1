"""Takes the pictures of docs/pictures from a running demo, in headless Chromium.

    .venv/bin/pip install selenium && .venv/bin/python scripts/pictures.py [--days N]

Needs Chromium and its driver (Debian: chromium, chromium-driver). Runs the demo, looks up its runs,
takes a picture of each page, and ends the demo.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from rmq_pipeline.orchestration.graphql import GraphQL

OUT = Path(__file__).resolve().parents[1] / "docs" / "pictures"
RUNS = """query { runsOrError(limit: 200) { ... on Runs { results { runId status jobName } } } }"""
MATERIALIZED = """query ($key: AssetKeyInput!) { assetOrError(assetKey: $key) {
  ... on Asset { assetMaterializations(limit: 50) { timestamp } }
} }"""
LINEAGE = "/locations/__repository__@rmq_pipeline/asset-groups/flights/lineage"
#: Runs by their job, the filter of their log, and what it then shows.
LOGS = (
    ("aircraft_rotations_window", "observ", "OBSERVATION"),
    ("deliver_scheduled", "observ", "OBSERVATION"),
    ("check_transactions", "materializ", "rollback"),
    ("redrive", "materializ", "redrive_id"),
    ("unpark", "materializ", "skipped"),
)
#: Those of them whose last message is opened.
OPENED = ("redrive", "unpark")
PATIENCE_S = 60


def main() -> int:
    """Run the demo, take the pictures; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=2)
    days = parser.parse_args().days
    OUT.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "examples.flights.demo"]
    command += ["--days", str(days), "--keep", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        try:
            url = read_json(demo.stdout)["ui"]
            runs = GraphQL(url).ask(RUNS)["runsOrError"]["results"]
            first = {run["jobName"]: run["runId"] for run in runs if run["status"] == "SUCCESS"}
            with browser() as chromium:
                take_all(chromium, url, first)
        finally:
            demo.send_signal(signal.SIGINT)
            demo.wait(60)
    return 0


def read_json(stream: IO[str]) -> dict[str, Any]:
    """The first JSON object of a stream that goes on."""
    text = ""
    for line in stream:
        text += line
        try:
            found: dict[str, Any] = json.loads(text)
        except ValueError:
            continue
        return found
    raise SystemExit("The demo ended without its facts.")


def browser() -> webdriver.Chrome:
    """A headless Chromium that talks to nobody but us."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "/usr/bin/chromium"
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--no-first-run",
        "--window-size=1600,1100",
    ):
        options.add_argument(flag)
    return webdriver.Chrome(options, Service(shutil.which("chromedriver")))


def take_all(chromium: webdriver.Chrome, url: str, runs: dict[str, str]) -> None:
    """Every picture; ``runs`` has the first run of each job."""
    # The checks of its assets come last.
    take(chromium, url + LINEAGE, "lineage", shows="3 / 3 Passed")
    take(chromium, f"{url}/runs/", "runs", shows="aircraft_rotations")
    for job, logs, shown in LOGS:
        page = f"{url}/runs/{runs[job]}?logs={logs}"
        take(chromium, page, f"run_{job}", shows=shown)
        if job in OPENED:
            open_dialog(chromium, "View full message", waits_for="table table")
            save(chromium, f"run_{job}_message")
    asset = f"{url}/assets/aircraft_rotations?view=events&time={first_window(url)}"
    take(chromium, asset, "materialization", shows="messages_per_second")
    open_dialog(chromium, "Show Markdown", waits_for="img")
    save(chromium, "materialization_plot")


def first_window(url: str) -> str:
    """When the first window of aircraft_rotations ended; the last one is that of the redrive."""
    asset = {"key": {"path": ["aircraft_rotations"]}}
    found = GraphQL(url).ask(MATERIALIZED, asset)["assetOrError"]["assetMaterializations"]
    timestamp: str = found[-1]["timestamp"]
    return timestamp


def open_dialog(chromium: webdriver.Chrome, button: str, *, waits_for: str) -> None:
    """Click a button, and wait for an element of the dialog that it opens."""
    waits_for = f"[role=dialog] {waits_for}, .bp5-dialog {waits_for}"
    chromium.find_elements(By.XPATH, f"//*[contains(text(), '{button}')]")[-1].click()
    WebDriverWait(chromium, PATIENCE_S).until(
        lambda page: page.find_elements(By.CSS_SELECTOR, waits_for)
    )
    chromium.execute_async_script("setTimeout(arguments[0], 1000)")


def take(chromium: webdriver.Chrome, page: str, name: str, *, shows: str) -> None:
    """A picture of a page once it shows a text."""
    chromium.get(page)
    WebDriverWait(chromium, PATIENCE_S).until(
        lambda there: shows in there.find_element(By.TAG_NAME, "body").text
    )
    # The graph moves into its place after its texts are there.
    chromium.execute_async_script("setTimeout(arguments[0], 4000)")
    save(chromium, name)


def save(chromium: webdriver.Chrome, name: str) -> None:
    """What is on the screen."""
    path = OUT / f"{name}.png"
    chromium.save_screenshot(str(path))
    print(f"{path.name}  {path.stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
