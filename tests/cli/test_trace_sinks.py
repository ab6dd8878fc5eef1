"""``rmq trace`` leads from a message to the sink files and rows that came of it."""

import json
from pathlib import Path

import pyarrow as pa

from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling import sink
from rmq_pipeline.lake.publication import publish
from tests.cli.conftest import Rmq, Served


def test_trace_names_the_file_the_run_and_the_rows(
    rmq: Rmq, served: Served, topic: str, group: str, tmp_path: Path
) -> None:
    line = json.dumps({"body": "a"}).encode()
    [sent] = rmq("send", topic, "--file", "-", "--json", stdin=line).json
    with Client(home=served.home) as client:
        window = f"consumer/{group}"
        epoch = client.open_window(window, owner="run-7", duration_ms=60_000)["epoch"]
        got = client.receive(group, topic, window=(window, epoch))
        rows = got.select(["queue_id", "queue_offset", "born_at_ms"])
        files = sink.stage(
            tmp_path, rows, partition_time="born_at_ms", epoch=epoch, batch=0, messages=got
        )
        acks = pa.table({"receipt_handle": got["receipt_handle"], "outcome": ["ack"]})
        client.settle(group, acks, settle_id="1", window=(window, epoch), sink_files=files)
        publish(client, group, sink=tmp_path)

    told = rmq("trace", sent["message_id"], "--sink", str(tmp_path), "--json").json

    file, row = told[-2:]
    (path,) = files["path"].to_pylist()
    assert (file["what"], file["detail"], file["run_id"]) == ("sink_file", path, "run-7")
    assert row["what"] == "sink_row"
    assert json.loads(row["detail"])["queue_offset"] == got["queue_offset"][0].as_py()
    assert json.loads(row["detail"])["path"] == path
