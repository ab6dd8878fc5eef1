"""Takes docs/pictures/shop_lineage.png: the lineage of a new project, in headless Chromium.

    .venv/bin/python -m scripts.shop_picture

Needs Chromium and a JDK. Writes a project as `rmq init shop` does, starts it with `rmq up`, sends
two orders, waits until both consumers have written them, and takes the picture.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

from rmq_pipeline import scaffold

RMQ = str(Path(sys.executable).with_name("rmq"))
OUT = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "shop_lineage.png"
LINEAGE = "/locations/__repository__@shop/asset-groups/shop/lineage"
PATIENCE_S = 300


def main() -> None:
    """Run the project, take the picture, end the project."""
    folder = Path(tempfile.mkdtemp(prefix="rmq_shop_"))
    scaffold.write("shop", folder)
    with subprocess.Popen(
        [RMQ, "up", "--port", "0", "--flight", "127.0.0.1:0", "--grpc", "none", "--ui", "none"],
        cwd=folder / "shop",
        stdout=subprocess.PIPE,
        text=True,
    ) as project:
        try:
            assert project.stdout is not None
            url = next(
                found[1]
                for line in project.stdout
                if (found := re.match(r"Dagster  (http\S+)", line))
            )
            os.environ["RMQ_HOME"] = str(folder / "shop" / ".rmq")
            send_orders()
            take(url + LINEAGE)
        finally:
            project.send_signal(signal.SIGINT)
            project.wait(60)
            shutil.rmtree(folder, ignore_errors=True)


def send_orders() -> None:
    """Send an order of two customers each, once the sensor has created the topic."""
    for customer, amount in (("anna", 12.5), ("ben", 3)):
        body = f'{{"amount": {amount}}}'
        send = [RMQ, "send", "orders", "--body", body, "--message-group", customer]
        end = time.monotonic() + PATIENCE_S
        while subprocess.run(send, stdout=subprocess.DEVNULL, check=False).returncode:
            if time.monotonic() > end:
                raise SystemExit(f"The topic was not there within {PATIENCE_S} s.")
            time.sleep(0.5)


def take(page_url: str) -> None:
    """Take the picture once both consumers have a materialization and their checks a result."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page(viewport={"width": 1400, "height": 1400})
        page.goto(page_url)
        text = page.locator("body")
        for shown in ("3 / 5 Passed", "3 / 4 Passed"):
            expect(text).to_contain_text(shown, timeout=1000 * PATIENCE_S)
        page.get_by_text("Hide navigation").click()
        page.reload()
        expect(text).to_contain_text("3 / 5 Passed", timeout=1000 * PATIENCE_S)
        expect(text).not_to_contain_text("Loading", timeout=1000 * PATIENCE_S)
        # The graph moves into its place after its texts are there.
        page.wait_for_timeout(4000)
        page.screenshot(path=OUT, clip={"x": 50, "y": 100, "width": 1350, "height": 1150})
        browser.close()
    print(f"{OUT.name}  {OUT.stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
