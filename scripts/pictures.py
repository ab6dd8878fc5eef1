"""Takes the pictures of docs/pictures from a running demo, in headless Chromium.

    .venv/bin/pip install selenium && .venv/bin/python -m scripts.pictures [--days N] [--only …]

Needs Chromium and its driver (Debian: chromium, chromium-driver). Runs the demo, looks up its runs,
takes a picture of each page, and ends the demo. Then it plays the example of a replay
(rmq_pipeline/examples/flights/replaying.py), and takes the pictures of that.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from rmq_pipeline.examples.flights import replaying
from rmq_pipeline.examples.flights.pipeline import AIRCRAFT_ROTATIONS
from rmq_pipeline.orchestration.graphql import GraphQL

_Found = TypeVar("_Found")
OUT = Path(__file__).resolve().parents[1] / "docs" / "pictures"
RUNS = """query { runsOrError(limit: 200) { ... on Runs { results { runId status jobName } } } }"""
MATERIALIZED = """query ($key: AssetKeyInput!) { assetOrError(assetKey: $key) {
  ... on Asset { assetMaterializations(limit: 50) { timestamp } }
} }"""
LINEAGE = "/locations/__repository__@rmq_pipeline/asset-groups/flights/lineage"
#: Runs by their job, the filter of their log, and what it then shows.
LOGS = (
    ("aircraft_rotations_window", "observ", "OBSERVATION"),
    ("check_transactions", "materializ", "rollback"),
    ("redrive", "materializ", "redrive_id"),
    ("unpark", "materializ", "skipped"),
)
#: Those of them whose last message is opened: a page of theirs shows little else.
OPENED = ("redrive", "unpark")
PATIENCE_S = 60
REPLAY_S = 300


def main() -> int:
    """Run the demo, take the pictures; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=2)
    parser.add_argument("--only", choices=("demo", "replay"))
    asked = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if asked.only != "replay":
        take_demo(asked.days)
    if asked.only != "demo":
        take_replay()
    return 0


def take_demo(days: int) -> None:
    """The pictures of a demo of so many days."""
    command = [sys.executable, "-P", "-m", "rmq_pipeline.examples.flights.demo"]
    command += ["--days", str(days), "--keep", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        facts: dict[str, Any] = {}
        try:
            facts = read_json(demo.stdout)
            url = facts["ui"]
            runs = GraphQL(url).ask(RUNS)["runsOrError"]["results"]
            first = {run["jobName"]: run["runId"] for run in runs if run["status"] == "SUCCESS"}
            with browser() as chromium:
                take_all(chromium, url, first)
        finally:
            demo.send_signal(signal.SIGINT)
            demo.wait(60)
            if facts:
                shutil.rmtree(Path(facts["home"]).parent, ignore_errors=True)


def take_replay() -> None:
    """A mistake of two hours, what a dry run says of it, and the replay that mends it."""
    folder = Path(tempfile.mkdtemp(prefix="rmq_pictures_"))
    try:
        with replaying.story(folder) as dagster, browser() as chromium:
            graphql = dagster.graphql
            for mode in ("dry_run", "replace"):
                backfill = replaying.launch(graphql, AIRCRAFT_ROTATIONS, mode=mode)
                run = wait_for(partial(succeeded, graphql, backfill))
                if mode == "dry_run":
                    page = f"{dagster.url}/runs/{run}?logs=materializ"
                    open_page(chromium, page, shows="14:00 UTC")
                    open_dialog(chromium, "View full message", waits_for="table table")
                    save(chromium, "run_replay_message")
            wait_for(lambda: graphql.materializations(["topic_log", "departures"]))
            for asset in ("topic_log/departures", "replay_aircraft_rotations"):
                name = asset.replace("/", "_")
                chosen = f"view=partitions&partition={replaying.HOURS[0]}"
                page = f"{dagster.url}/assets/{asset}?{chosen}"
                take(chromium, page, f"partitions_{name}", shows=replaying.HOURS[0])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def succeeded(graphql: GraphQL, backfill: str) -> str:
    """The run of a backfill, once it is a success; empty until then."""
    _, runs = graphql.backfill(backfill)
    return "".join(run["runId"] for run in runs if run["status"] == "SUCCESS")


def wait_for(condition: Callable[[], _Found]) -> _Found:
    """What a condition gives, once that is something."""
    end = time.monotonic() + REPLAY_S
    while not (found := condition()):
        if time.monotonic() > end:
            raise SystemExit(f"Not within {REPLAY_S} s.")
        time.sleep(0.5)
    return found


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
        open_page(chromium, page, shows=shown)
        if job not in OPENED:
            save(chromium, f"run_{job}")
        else:
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
    """A picture of a page."""
    open_page(chromium, page, shows=shows)
    save(chromium, name)


def open_page(chromium: webdriver.Chrome, page: str, *, shows: str) -> None:
    """Open a page, and wait until it shows a text and loads no more."""

    def is_there(there: webdriver.Chrome) -> bool:
        text = there.find_element(By.TAG_NAME, "body").text
        return shows in text and "Loading" not in text

    chromium.get(page)
    WebDriverWait(chromium, PATIENCE_S).until(is_there)
    # The graph moves into its place after its texts are there.
    chromium.execute_async_script("setTimeout(arguments[0], 4000)")


def save(chromium: webdriver.Chrome, name: str) -> None:
    """What is on the screen."""
    path = OUT / f"{name}.png"
    chromium.save_screenshot(str(path))
    print(f"{path.name}  {path.stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
