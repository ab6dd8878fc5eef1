"""Things that the pages take for granted: topics, messages, failures, names of an application."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pyarrow as pa

from rmq_pipeline.consumer.window import run_window
from rmq_pipeline.dagster import topic
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.handling.spec import ConsumerSpec
from tests.page_reader import Reader

SYSTEMD: Final = "systemd: tests/test_deployment.py verifies the unit"
ROOT_ONLY: Final = "only root may, and it would change the machine"
#: The first query of docs/operations.md about the failures of a handler.
QUERY_OF_FAILURES: Final = (
    '"SELECT message_id, reason, traceback FROM retrying '
    "WHERE consumer_group = 'GROUP' AND traceback IS NOT NULL\""
)
#: The first line of the pipeline in README.md.
PIPELINE_IMPORT: Final = (
    "from rmq_pipeline.dagster import Outcome, Pipeline, definitions, spark_consumer, topic"
)
#: The log of docs/replication.md in a bucket, and how a store that is not Amazon's is reached.
BUCKET_LOG: Final = "s3://my-bucket/rmq-log"
#: The same in a stream of NATS.
NATS_LOG: Final = "nats://n1.example.com:4222,n2.example.com:4222,n3.example.com:4222/rmq"
MINIO: Final = "scheme=https&endpoint_override=minio.example.com:9000&region=us-east-1"
Step = Callable[[Reader], None]
#: Why commands and blocks are not run.
INSTALLED: Final = "the packages are installed"
KILLED: Final = "a daemon of Dagster dies there: tests/cli/test_supervisor.py"


def nothing(_: Reader) -> None:
    """The page needs no more than a folder."""


@dataclass(frozen=True)
class Page:
    """A page, and how it can be run here."""

    #: Before the first block.
    prepare: Step = nothing
    #: Before a command, or the first line of another block.
    before: Mapping[str, Step] = field(default_factory=dict)
    #: Commands, and first lines of other blocks, and why they cannot be run here.
    not_run: Mapping[str, str] = field(default_factory=dict)
    #: Python after the last block, with the names of the page.
    then: str = ""
    #: Fixtures.
    needs: tuple[str, ...] = ()
    #: Commands whose exit code is not 0, as the page says.
    fails: frozenset[str] = frozenset()
    figures: bool = True
    home: str = "/srv/rmq"


def serve(reader: Reader) -> None:
    """Start the broker of the home."""
    reader.run("rmq broker")


def shop(reader: Reader) -> None:
    """Serve a topic of orders and its consumer group."""
    serve(reader)
    orders(reader, 20)


def orders(reader: Reader, count: int) -> None:
    """Send orders to a broker that serves."""
    client = reader.client
    client.ensure_topic("orders", type="fifo", queues=2)
    client.ensure_group("billing", order="message_group", backoff_ms=[60_000])
    bodies = [json.dumps({"amount": n, "country": ["SE", "NO"][n % 2]}) for n in range(count)]
    groups = [f"customer-{n % 5}" for n in range(count)]
    columns = {"body": bodies, "message_group": groups, "tag": ["paid"] * count}
    client.send("orders", pa.table(columns))
    reader.names |= {"client": client, "pa": pa}


def bill(messages: pa.Table, state: pa.Table) -> Outcome:
    """Fail, as a handler with a fault does."""
    raise KeyError("carrier", messages.num_rows, state.num_rows)


def failed(reader: Reader) -> None:
    """Let a handler fail with the orders; the page names its group, a message and the failure."""
    shop(reader)
    spec = ConsumerSpec(name="billing", topic="orders", group="billing", handler=bill)
    run_window(spec, reader.client, owner="me", idle_s=0.1)
    query = "SELECT message_id, signature FROM retrying"
    (row, *_) = reader.client.sql(query).to_pylist()
    reader.instead |= {
        "GROUP": "billing",
        "MESSAGE_ID": row["message_id"],
        "3f0c8a1b2d4e": row["signature"],
    }


def damaged(reader: Reader) -> None:
    """Damage a frame that dispatch has not read: DuckDB is as it was before the last messages."""
    home = Path(reader.here("/srv/rmq"))
    reader.run("rmq broker")
    reader.client.create_topic("orders", type="fifo", queues=2)
    reader.run("rmq stop")
    database = (home / "state.duckdb").read_bytes()
    reader.run("rmq broker")
    before = reader.client.status()["log_end"]
    for n in (100, 127):
        orders = {"body": ["order"] * n, "message_group": ["anna"] * n}
        reader.client.send("orders", pa.table(orders))
    reader.run("rmq stop")
    (home / "state.duckdb").write_bytes(database)
    (file,) = (home / "log").glob("*.log")
    with file.open("r+b") as log:
        log.seek(4096 + before + 200)
        log.write(b"damage")


def moment(reader: Reader) -> None:
    """Send before and after a moment, which is that of the page."""
    shop(reader)
    reader.run("rmq backup /backup/rmq")
    (now,) = reader.client.sql("SELECT epoch_ms(now()) AS now").to_pylist()
    at = datetime.fromtimestamp(now["now"] / 1000, UTC).isoformat(timespec="milliseconds")
    reader.client.send("orders", pa.table({"body": ["later"], "message_group": ["anna"]}))
    reader.instead |= {"2026-11-28T16:30:00Z": at, "s3://bucket": "s3://lake"}


def measured(reader: Reader) -> None:
    """Send as many orders, and settle as many, as the page's metrics show."""
    orders(reader, 1200)
    left = 1200 - 17
    while left:
        got = reader.client.receive("billing", "orders", limit=left, wait_ms=5000)
        reader.client.ack(got)
        left -= got.num_rows


def databases(reader: Reader) -> None:
    """Give the log of the page an empty database and empty prefixes of a bucket."""
    url = reader.given["postgres"].new_database()
    host = url.removeprefix("postgresql://rmq@").partition("/")[0]
    store = reader.given["object_store"]
    reader.environment |= store.environment
    log = store.uri("page_of_replication/log")
    at = f"scheme=http&endpoint_override={store.endpoint.removeprefix('http://')}"
    reader.instead |= {
        "s3://bucket/rmq": store.uri("page_of_replication/archive"),
        "s3://my-bucket/rmq-log": log,
        f"{BUCKET_LOG}?{MINIO}": f"{log}?{at}&region=us-east-1",
        NATS_LOG: f"nats://{reader.given['nats_server'].address}/rmq?replicas=1",
        "postgresql://db.example.com/rmq": url,
        "postgresql://db1,db2/rmq": url.replace(host, f"{host},{host}"),
    }


def another_log(reader: Reader) -> None:
    """End the broker and its home: a home belongs to one log."""
    reader.close()
    shutil.rmtree(reader.environment["RMQ_HOME"])


def two_addresses(reader: Reader) -> None:
    """The leader and its standby are broker-1 and broker-2."""
    leader, standby = (reader.instead[f"127.0.0.1:{port}"] for port in (8082, 9082))
    reader.instead |= {"broker-1:8082": leader, "broker-2:8082": standby}


def application(reader: Reader) -> None:
    """Serve orders to an application that stops after the first ones."""
    shop(reader)
    reader.client.ensure_group("audit")
    stop = threading.Event()

    def charge(message: object, context: object) -> str:
        assert message
        assert context
        stop.set()
        return "success"

    def archive(table: pa.Table) -> None:
        if table.num_rows:
            stop.set()

    reader.names |= {"stop": stop, "charge": charge, "archive": archive}


class BankError(Exception):
    """The bank does not answer."""


class Bank:
    """Charges each payment, but the second one not."""

    def __init__(self) -> None:
        self.charged: list[str] = []

    def charge(self, body: bytes, *, idempotency_key: str) -> None:
        if body == b"payment 1":
            raise BankError
        self.charged.append(idempotency_key)


def payments(reader: Reader) -> None:
    """Serve a topic of payments, and know a bank."""
    serve(reader)
    declared = topic("payments", type="fifo", queues=1)
    client = reader.client
    client.create_topic("payments", type="fifo", queues=1)
    client.create_group("charges", backoff_ms=[3_600_000])
    keys = [[("payment", f"p-{n}")] for n in range(3)]
    columns = {"body": [f"payment {n}" for n in range(3)], "message_group": ["anna"] * 3}
    types = pa.map_(pa.string(), pa.string())
    client.send("payments", pa.table({**columns, "properties": pa.array(keys, types)}))
    known = {"payments": declared, "bank": Bank(), "BankError": BankError, "client": client}
    reader.names |= known


def charged(reader: Reader) -> None:
    """Let the consumer of the page charge, and send a payment again."""
    spec = replace(reader.names["charge"].spec, sink=None)
    run_window(spec, reader.client, owner="me", idle_s=0.1)
    assert reader.names["bank"].charged == ["p-0", "p-2"]
    properties = pa.array([[("payment", "p-0")]], pa.map_(pa.string(), pa.string()))
    again = {"body": ["payment 0"], "message_group": ["ben"], "properties": properties}
    reader.client.send("payments", pa.table(again))


def machines(reader: Reader) -> None:
    """The broker's machine has a home that listens on loopback."""
    reader.run("rmq broker --home /var/lib/rmq/home --upkeep dagster")


def one_machine(reader: Reader) -> None:
    """The home of another layout of the page."""
    reader.close()
    shutil.rmtree(reader.here("/var/lib/rmq"))
    reader.run("rmq broker --home /var/lib/rmq")


def project_topics(reader: Reader) -> None:
    """Create the topics, as Dagster's sensor does."""
    reader.client.create_topic("orders", type="fifo")


def components_project(reader: Reader) -> None:
    """Write a project as `create-dagster` does."""
    defs = reader.folder / "shop" / "defs"
    defs.mkdir(parents=True)
    (reader.folder / "pyproject.toml").write_text(
        '[project]\nname = "shop"\nversion = "0.1.0"\n'
        '[tool.dg]\ndirectory_type = "project"\n'
        '[tool.dg.project]\nroot_module = "shop"\n'
        'code_location_target_module = "shop.definitions"\n'
        'registry_modules = ["rmq_pipeline.dagster"]\n',
        "utf-8",
    )
    for file in (defs / "__init__.py", defs.parent / "__init__.py"):
        file.touch()
    (defs.parent / "definitions.py").write_text(
        "from pathlib import Path\n\nimport dagster as dg\n\n\n@dg.definitions\n"
        "def defs() -> dg.Definitions:\n"
        "    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)\n",
        "utf-8",
    )
    reader.environment["PYTHONPATH"] += f"{os.pathsep}{reader.folder}"


def billing_topic(reader: Reader) -> None:
    """Create the topic, as Dagster's sensor does."""
    reader.client.create_topic("billing_topic")


def python_project(reader: Reader) -> None:
    """Go to a project of `rmq init`, and move its pipeline to a module of its own."""
    reader.close()
    paths = reader.environment["PYTHONPATH"].removesuffix(f"{reader.folder}")
    reader.run("rmq init shop --directory another")
    reader.run("cd another/shop")
    reader.environment["PYTHONPATH"] = f"{paths}{reader.folder}"
    package = reader.folder / "shop"
    (package / "defs").mkdir()
    (package / "defs" / "__init__.py").touch()
    whole = (package / "definitions.py").read_text("utf-8")
    pipeline = whole.replace("import Pipeline, definitions", "import Pipeline")
    pipeline = pipeline.replace("defs = definitions([PIPELINE])\n", "")
    (package / "pipeline.py").write_text(pipeline, "utf-8")


def known_bills(reader: Reader) -> None:
    """Name a schema and a function of an application."""
    schema = pa.schema([("text", pa.string()), ("born_at_ms", pa.int64())])
    reader.names |= {"BILL": schema, "bills_of": lambda messages: messages.select(["body"])}


def another_home(reader: Reader) -> None:
    """Serve an empty home: the list of commands is no story with the script before it."""
    reader.run("rmq stop")
    reader.close()
    reader.environment["RMQ_HOME"] = reader.here("/srv/another")
    reader.run("rmq broker")


def one_order(reader: Reader) -> None:
    """Write a file of orders."""
    order = {"body": "order", "message_group": "anna", "keys": ["42"]}
    (reader.folder / "orders.ndjson").write_text(json.dumps(order) + "\n", "utf-8")


def first_id(reader: Reader) -> None:
    """Name a message."""
    (row, *_) = reader.client.sql("SELECT message_id FROM messages").to_pylist()
    reader.instead["MESSAGE_ID"] = row["message_id"]


def page_of(reader: Reader) -> None:
    """Give the web page a broker without users and TLS."""
    reader.instead["grpc+tls://rmq.example.com:8082"] = reader.instead["127.0.0.1:8082"]


def collector(reader: Reader) -> None:
    """Serve; no collector answers."""
    shop(reader)
    reader.instead["http://collector:4318"] = "http://127.0.0.1:9"


PAGES: Final = {
    "docs/operations.md": Page(
        before={
            "rmq repair /srv/rmq --dry-run": damaged,
            f"rmq sql {QUERY_OF_FAILURES}": failed,
        },
        fails=frozenset({"rmq repair /srv/rmq --dry-run"}),
        not_run={"$ rmq up --log-format json 2> up.log": KILLED},
        figures=False,
    ),
    "docs/sql.md": Page(shop),
    "docs/access.md": Page(shop),
    "docs/backup.md": Page(
        moment,
        needs=("object_store",),
        then="assert backups.execute_in_process().success",
        figures=False,
    ),
    "docs/consumers.md": Page(
        application,
        before={
            "from rmq_pipeline import PushConsumer": lambda reader: orders(reader, 5),
            "from rmq_pipeline.consumer import MessageQueue, PullConsumer": lambda reader: (
                reader.names["stop"].clear()
            ),
        },
        then="assert orders_done.execute_in_process().success",
    ),
    "docs/projects.md": Page(
        before={
            "rmq send orders --body '{\"amount\": 12.5}' --message-group anna": project_topics,
        },
        not_run={
            "pip install 'rmq_pipeline[all]' pytest": INSTALLED,
            "pytest": "half a minute: tests/test_tutorial.py runs the same tests",
        },
        then="assert len(defs.resolve_asset_graph().get_all_asset_keys()) > 10",
        home="",
    ),
    "docs/replication.md": Page(
        databases,
        before={
            "export RMQ_FLIGHT=broker-1:8082,broker-2:8082": two_addresses,
            "rmq broker --home /srv/rmq-2 --log postgresql://db.example.com/rmq": Reader.close,
            "rmq broker --log 'postgresql://db1,db2/rmq?target_session_attrs=read-write'": (
                Reader.close
            ),
            f"rmq broker --log {BUCKET_LOG} --standby": another_log,
            f"rmq broker --log '{BUCKET_LOG}?{MINIO}'": Reader.close,
            f"rmq broker --log {NATS_LOG} --standby": another_log,
        },
        needs=("postgres", "object_store", "nats_server"),
        not_run={
            "pip install 'rmq_pipeline[broker,postgres]'": INSTALLED,
            "pip install 'rmq_pipeline[broker,postgres,objects]'": INSTALLED,
            "pip install 'rmq_pipeline[broker,objects]'": INSTALLED,
            "pip install 'rmq_pipeline[broker,nats]'": INSTALLED,
            "export NATS_CREDS=/etc/rmq/leader.creds": "the server of the tests has no users",
            "export AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=… AWS_REGION=eu-central-1": (
                "the store of the tests has keys of its own"
            ),
        },
        figures=False,
    ),
    "docs/routes.md": Page(),
    "docs/metrics.md": Page(
        before={
            "curl -s http://127.0.0.1:9464/metrics | grep -v '^#' | grep orders": measured,
            "rmq broker --set otlp_endpoint=http://collector:4318 --set otlp_interval_s=30": (
                collector
            ),
        },
        not_run={
            "# prometheus.yml": "Prometheus reads it; tests/metrics/test_deploy.py has its rules",
            "pip install 'rmq_pipeline[otel]'": INSTALLED,
        },
    ),
    "docs/idempotency.md": Page(
        payments,
        before={"from rmq_pipeline.idempotency import acks, mark": charged},
        then="assert got['seen_before'].to_pylist() == [True]",
    ),
    "docs/in_dagster.md": Page(
        lambda reader: reader.names.update(look_up=lambda _: {"paid"}),
        then=(
            "from rmq_pipeline.dagster import definitions\n"
            "graph = definitions([SHOP]).resolve_asset_graph()\n"
            "assert 'payments_checks' in {key.path[-1] for key in graph.get_all_asset_keys()}"
        ),
    ),
    "docs/components.md": Page(
        components_project,
        before={
            "rmq send billing_topic --body hello": billing_topic,
            "from pathlib import Path": python_project,
        },
        not_run={"pip install 'rmq_pipeline[all]' dagster-dg-cli": INSTALLED},
        home="",
    ),
    "docs/deployment.md": Page(
        before={
            "rmq user create dagster --super --home /var/lib/rmq/home": machines,
            "rmq backup /backup/rmq --home /var/lib/rmq --keep 14d": one_machine,
        },
        not_run={
            "$ sudo cp deploy/systemd/rmq.service /etc/systemd/system/": SYSTEMD,
            "sudo useradd --system --home-dir /srv/shop rmq": ROOT_ONLY,
            "python -m venv /srv/shop/.venv": INSTALLED,
            "/srv/shop/.venv/bin/pip install 'rmq_pipeline[all]' "
            "'dagster-postgres>=0.29.27,<0.30' /srv/shop": INSTALLED,
            "sudo chown -R rmq /srv/shop": ROOT_ONLY,
            "pip install 'dagster-postgres>=0.29.27,<0.30'": INSTALLED,
            "$ cp .gitignore .containerignore": "podman: tests/test_deployment.py reads the file",
            "$ sudo systemctl stop rmq": SYSTEMD,
        },
    ),
    "docs/web_page.md": Page(
        before={
            "rmq ui --flight grpc+tls://rmq.example.com:8082 --dagster "
            "https://dagster.example.com": page_of,
        },
    ),
    "docs/traces.md": Page(
        before={
            "from opentelemetry import trace": collector,
        },
        not_run={"pip install 'rmq_pipeline[otel]'": INSTALLED},
    ),
    "docs/flight_sql.md": Page(
        shop,
        not_run={"pip install adbc-driver-flightsql adbc-driver-manager": INSTALLED},
        then=(
            "assert len(found) == len(newest) == 20\nassert parked.num_rows == len(failed) == 0\n"
        ),
    ),
    "README.md": Page(
        before={
            PIPELINE_IMPORT: known_bills,
            "rmq status": serve,
            "rmq topic create orders --type fifo": another_home,
            "rmq send orders --file orders.ndjson": one_order,
            "rmq trace MESSAGE_ID": first_id,
        },
        not_run={
            "$ make setup   # .venv, and a JDK if there is one": "this checkout has it all",
            "pip install 'rmq_pipeline[all]' pytest": INSTALLED,
            "rmq top": "it fills a terminal until q: tests/cli/test_top.py",
            "rmq tail orders -f": "it follows the topic until Ctrl-C: tests/cli/test_tail.py",
        },
        then="assert len(defs.resolve_asset_graph().get_all_asset_keys()) > 10",
    ),
}
