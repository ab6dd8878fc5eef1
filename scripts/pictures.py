"""Takes the pictures of docs/pictures from a running demo, with headless Chromium.

    .venv/bin/python scripts/pictures.py [--days N]

Needs `chromium` on the PATH. Runs `rmq demo --keep`, looks up its runs, takes a screenshot of each
page, and ends the demo.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from rmq_pipeline.orchestration.graphql import GraphQL

OUT = Path(__file__).resolve().parents[1] / "docs" / "pictures"
RUNS = """query { runsOrError(limit: 200) { ... on Runs { results { runId status jobName } } } }"""


def main() -> int:
    """Run the demo, take the pictures; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=2)
    days = parser.parse_args().days
    chromium = shutil.which("chromium")
    if chromium is None:
        print("chromium is not on the PATH: install it first.", file=sys.stderr)
        return 1
    OUT.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "examples.flights.demo"]
    command += ["--days", str(days), "--keep", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        try:
            facts = read_json(demo.stdout)
            url = facts["ui"]
            runs = GraphQL(url).ask(RUNS)["runsOrError"]["results"]
            for name, page in pages(runs).items():
                shoot(chromium, url + page, OUT / f"{name}.png")
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


def pages(runs: list[dict[str, str]]) -> dict[str, str]:
    """Picture -> page, for runs of windows that have succeeded."""
    done = {run["jobName"]: run["runId"] for run in runs if run["status"] == "SUCCESS"}
    found = {"lineage": "/asset-groups/", "runs": "/runs/"}
    for job in ("aircraft_rotations_window", "deliver_scheduled"):
        if job in done:
            found[f"run_{job}"] = f"/runs/{done[job]}"
    for asset in ("aircraft_rotations", "departures"):
        found[f"asset_{asset}"] = f"/assets/{asset}?view=events"
    return found


def shoot(chromium: str, url: str, path: Path) -> None:
    """One page as a PNG."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                chromium,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--no-first-run",
                f"--user-data-dir={profile}",
                "--window-size=1600,1100",
                "--virtual-time-budget=15000",
                f"--screenshot={path}",
                url,
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )
    print(f"{path.name}  {path.stat().st_size:,} bytes  {url}")


if __name__ == "__main__":
    sys.exit(main())
