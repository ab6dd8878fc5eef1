"""Sinks in an object store: one of several publishers wins, and every engine reads the rows."""

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import polars as pl
import pyarrow as pa
import pytest

from rmq_pipeline.broker.work import verification
from rmq_pipeline.handling import sink
from rmq_pipeline.lake import compaction, manifest, publication, readers, rows
from rmq_pipeline.storage.place import at
from rmq_pipeline.storage.remote import ObjectRoot
from rmq_pipeline.storage.root import StorageRootError
from tests.lake.test_delta import ROW, begun, staged
from tests.lake.test_delta import rows as of_hours
from tests.object_store import SECRET, ObjectStore


@pytest.fixture
def folder(object_store: ObjectStore, request: pytest.FixtureRequest) -> str:
    return object_store.uri(request.node.name)


def test_every_engine_reads_a_sink_in_a_bucket(folder: str, object_store: ObjectStore) -> None:
    begun(folder, ROW)
    first = staged(folder, of_hours(0, 1, 1))
    manifest.record(folder, 1, add=first)
    gone = first["path"].to_pylist()[:1]
    manifest.record(folder, 2, add=staged(folder, of_hours(2)), remove=gone)
    staged(folder, of_hours(7))  # no settle names it

    options = object_store.storage_options
    table = deltalake.DeltaTable(folder, storage_options=options)

    assert table.version() == 2
    assert sorted(table.to_pyarrow_table()["n"].to_pylist()) == [1, 1, 2]
    assert sorted(pl.read_delta(folder, storage_options=options)["n"]) == [1, 1, 2]
    assert readers.sink_table(folder)["n"].to_pylist() == [1, 1, 2]
    assert min(readers.duckdb_relation(duckdb.connect(), folder).fetchall())[0] == 1
    assert all(path.startswith(folder) for path in readers.sink_paths(folder))
    assert rows.rows_of_message(folder, queue_id=0, queue_offset=0) is None
    assert not [each for each in verification.verify_sink(folder) if each.damage]


def test_one_of_several_publishers_writes_a_version(folder: str) -> None:
    begun(folder, ROW)
    files = [staged(folder, of_hours(n)) for n in range(20)]
    barrier = threading.Barrier(4)

    def publish(_: int) -> int:
        barrier.wait()
        for version, add in enumerate(files, 1):
            while not manifest.record(folder, version, add=add):
                pass
        # All want this name, each with its own content.
        return sum(at(folder).put_if_absent(f"one-{n}", secrets.token_bytes(8)) for n in range(20))

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(publish, range(4)))

    assert sum(won) == 20

    assert manifest.read(folder).version == 20
    assert sorted(readers.sink_table(folder)["n"].to_pylist()) == list(range(20))
    log = at(folder).names(manifest.LOG)
    assert sorted(log) == [f"{version:020}.json" for version in range(21)]


def test_many_versions_have_checkpoints(folder: str, object_store: ObjectStore) -> None:
    begun(folder, ROW)
    add = staged(folder, of_hours(0))
    for version in range(1, 2 * manifest.CHECKPOINT_VERSIONS + 3):
        gone = add["path"].to_pylist() if version > 1 else []
        add = add.set_column(0, "path", pa.array([f"hour=x/{version}.parquet"]))
        manifest.record(folder, version, add=add, remove=gone, columns=ROW)

    table = deltalake.DeltaTable(folder, storage_options=object_store.storage_options)

    assert manifest.read(folder).files["path"].to_pylist() == add["path"].to_pylist()
    assert [uri.rpartition("/")[2] for uri in table.file_uris()] == [f"{version}.parquet"]
    log = at(folder).names(manifest.LOG)
    assert sum(name.endswith("checkpoint.parquet") for name in log) == 2


def test_files_of_dead_windows_are_deleted(folder: str) -> None:
    begun(folder, ROW)
    kept, left = staged(folder, of_hours(0)), staged(folder, of_hours(1))
    manifest.record(folder, 1, add=kept)

    deleted = sink.delete_unnamed(folder, kept, epoch=2)

    assert deleted == left["path"].to_pylist()
    found = [path for path in at(folder).files("") if path.startswith("hour=")]
    assert found == kept["path"].to_pylist()
    publication.delete_staged(folder, kept, named=[])
    publication.delete_staged(folder, kept, named=[])
    assert not at(folder).exists(kept["path"][0].as_py())


def test_files_are_merged(folder: str) -> None:
    files = [staged(folder, of_hours(0), batch=n) for n in range(3)]
    described = [{**file.to_pylist()[0], "at_ms": 0} for file in files]

    merge = compaction.Merge(described[0]["partition"], described)
    (merged,) = compaction.stage(folder, merge, epoch=3).to_pylist()

    assert merged["rows"] == 3
    assert at(folder).size(merged["path"]) == merged["bytes"]


class _Careless(BaseHTTPRequestHandler):
    """An S3 server that accepts everything, and stores nothing: it ignores conditions."""

    protocol_version = "HTTP/1.1"

    def _accept(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_PUT = do_HEAD = do_DELETE = do_GET = _accept  # noqa: N815 - names of http.server

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def careless() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Careless)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    host, port = server.server_address[:2]
    yield f"s3://key:secret@bucket/x?scheme=http&endpoint_override={host!s}:{port}&region=x"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_store_without_conditional_puts_is_refused(careless: str) -> None:
    with pytest.raises(StorageRootError, match="no conditional puts") as told:
        at(careless).check_put_if_absent()

    assert "secret" not in str(told.value)
    assert "s3://***@bucket/x?scheme=http" in str(told.value)


def test_other_file_systems_are_refused() -> None:
    with pytest.raises(StorageRootError, match="no conditional puts"):
        begun("mock:///bucket", ROW)
    with pytest.raises(ValueError, match="was a URI before it became a Path"):
        at(Path("s3://bucket/sink"))


def test_a_damaged_file_and_a_store_that_is_away_are_told_apart(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    folder = store.address("damaged")
    files = [staged(folder, of_hours(0), batch=n).to_pylist()[0] for n in range(2)]
    merge = compaction.Merge(files[0]["partition"], files)
    whole = at(folder).read(files[0]["path"])
    at(folder).replace(files[0]["path"], whole[:-4] + b"XXXX")

    with pytest.raises(compaction.DamagedSinkError, match="is damaged"):
        compaction.stage(folder, merge, epoch=1)
    store.stop()

    with pytest.raises(OSError, match="could not store x") as put:
        at(folder).replace("x", b"")
    assert "Debug source" not in str(put.value)
    with pytest.raises(OSError, match=r"(?i)connect|error sending request") as told:
        compaction.stage(folder, merge, epoch=1)
    assert not isinstance(told.value, compaction.DamagedSinkError)


def test_an_empty_sink_is_named_without_secrets(object_store: ObjectStore) -> None:
    empty = object_store.address("empty")

    with pytest.raises(ValueError, match="has no files") as told:
        readers.duckdb_relation(duckdb.connect(), empty)

    assert SECRET not in str(told.value)


def test_a_lost_answer_refuses_no_store(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ObjectRoot.put_if_absent
    monkeypatch.setattr(ObjectRoot, "put_if_absent", lambda *args: real(*args) and False)

    at(folder).check_put_if_absent()

    assert not at(folder).files("")
