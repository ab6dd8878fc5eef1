"""Dagster's history in PostgreSQL, as docs/deployment.md has it: runs, ticks, and backoff."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import dagster as dg
import pyarrow as pa
import pytest

from rmq_pipeline import scaffold
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.sink import read_sink
from rmq_pipeline.orchestration.upkeep_assets import WINDOW_TAG
from tests.cli.conftest import RMQ
from tests.free_address import free_port

# The backoff of windows is read from the run storage: these tests run here with PostgreSQL, too.
from tests.orchestration.test_backoff import (  # noqa: F401 - collected here
    now,
    test_a_success_ends_the_backoff,
    test_each_failure_in_a_row_doubles_the_pause,
    test_no_run_has_failed,
)

if TYPE_CHECKING:
    from tests.conftest import Eventually
    from tests.postgres_server import PostgresServer

pytestmark = [pytest.mark.slow, pytest.mark.dagster]

PAGE: Final = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text("utf-8")
CONSUMER: Final = f"""SELECT r.status FROM runs AS r JOIN run_tags AS t USING (run_id)
    WHERE t.key = '{WINDOW_TAG}' AND t.value = 'invoices'"""


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    return postgres.new_database()


@pytest.fixture
def dagster_url(database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The variable of the page, with the driver that it names."""
    (named,) = re.findall(r"^\$ export DAGSTER_PG_URL=(\S+?)://", PAGE, re.MULTILINE)
    monkeypatch.setenv("DAGSTER_PG_URL", url := f"{named}://{database.partition('://')[2]}")
    return url


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A new project without Spark, and the page's addition to its dagster.yaml."""
    scaffold.write("shop", tmp_path)
    folder = tmp_path / "shop"
    code = folder / "shop" / "definitions.py"
    code.write_text(code.read_text().replace("[customer_totals, invoices]", "[invoices]"))
    (addition,) = re.findall(r"^```yaml[^\n]*\n(storage:\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    with (folder / "dagster_home" / "dagster.yaml").open("a") as file:
        file.write(addition)
    return folder


@pytest.fixture
def instance(shop: Path, dagster_url: str) -> Iterator[dg.DagsterInstance]:
    assert dagster_url
    with dg.DagsterInstance.from_config(str(shop / "dagster_home")) as instance:
        yield instance


@pytest.fixture
def up(shop: Path, dagster_url: str) -> Iterator[subprocess.Popen[str]]:
    ports = ["--port", str(free_port()), "--flight", "127.0.0.1:0", "--grpc", "none"]
    started = subprocess.Popen(
        [RMQ, "up", "--home", "home", *ports, "--ui", "none"],
        cwd=shop,
        env={**os.environ, "DAGSTER_PG_URL": dagster_url, "RMQ_HOME": str(shop / "home")},
        stdout=subprocess.PIPE,
        text=True,
    )
    yield started
    started.terminate()
    started.communicate(timeout=60)


def test_a_project_runs_with_its_history_in_postgres(
    up: subprocess.Popen[str],
    shop: Path,
    postgres: PostgresServer,
    database: str,
    eventually: Eventually,
) -> None:
    assert up.stdout is not None
    next(line for line in up.stdout if line.startswith("Dagster  http"))
    with Client(home=shop / "home") as client:
        body = json.dumps({"amount": 3}).encode()
        eventually(lambda: "orders" in client.list_topics()["name"].to_pylist())
        client.send("orders", pa.table({"body": [body], "message_group": ["anna"]}))

    eventually(lambda: ("SUCCESS",) in postgres.execute(CONSUMER, url=database))

    assert read_sink(shop / "home" / "sinks" / "invoices")["text"].to_pylist() == ["3.00 EUR"]
    [(ticks,)] = postgres.execute("SELECT count(*) FROM job_ticks", url=database)
    assert ticks > 0
    # SQLite's files, which Dagster makes without the setting.
    assert not list((shop / "dagster_home").rglob("*.db"))
