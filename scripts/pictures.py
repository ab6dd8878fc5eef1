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
LINEAGE = "/assets/late_summary?view=lineage&lineageScope=upstream&lineageDepth=5"
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
            with browser() as chromium:
                take_all(chromium, url, {run["jobName"]: run["runId"] for run in runs[::-1]})
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
    take(chromium, url + LINEAGE, "lineage", shows="late_summary")
    take(chromium, f"{url}/runs/", "runs", shows="aircraft_rotations")
    for job in ("aircraft_rotations_window", "deliver_scheduled"):
        if job in runs:
            page = f"{url}/runs/{runs[job]}?logs=observ"
            take(chromium, page, f"run_{job}", shows="OBSERVATION")
    asset = f"{url}/assets/aircraft_rotations?view=events"
    take(chromium, asset, "materialization", shows="messages_per_second")
    chromium.find_element(By.XPATH, "//*[contains(text(), 'Show Markdown')]").click()
    WebDriverWait(chromium, PATIENCE_S).until(
        lambda page: page.find_elements(By.CSS_SELECTOR, "[role=dialog] img, .bp5-dialog img")
    )
    save(chromium, "materialization_plot")


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
