"""Addresses and servers that cannot have a commit log."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rmq_pipeline.errors import LogStoreError, RequestError
from rmq_pipeline.store.log.engines.object_store_log import ObjectStoreLog

LEASE_S = 0.3


class _Unconditional(BaseHTTPRequestHandler):
    """A bucket that ignores If-None-Match, as old stores do."""

    objects: dict[str, bytes]
    protocol_version = "HTTP/1.1"

    def _answer(self, status: int, content: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Sat, 28 Nov 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_PUT(self) -> None:
        size = int(self.headers["Content-Length"])
        self.objects[self.path.partition("?")[0]] = self.rfile.read(size)
        self._answer(200)

    def do_GET(self) -> None:
        if "list-type" in self.path:
            self._answer(200, b"<ListBucketResult></ListBucketResult>")
            return
        found = self.objects.get(self.path.partition("?")[0])
        self._answer(404) if found is None else self._answer(200, found)

    do_HEAD = do_GET  # noqa: N815 the name of the server's base class

    def do_DELETE(self) -> None:
        self.objects.pop(self.path, None)
        self._answer(204)

    def log_message(self, *_: object) -> None:
        return


@pytest.mark.usefixtures("object_store")
def test_a_bucket_without_conditional_puts_is_refused() -> None:
    objects: dict[str, bytes] = {}
    handler = type("Bucket", (_Unconditional,), {"objects": objects})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    at = f"s3://bucket/log?scheme=http&endpoint_override=127.0.0.1:{server.server_port}"
    try:
        store = ObjectStoreLog(
            f"{at}&region=us-east-1", timeout_s=2.0, lease_s=LEASE_S, home_format=1
        )
        with pytest.raises(LogStoreError, match=r"no conditional puts.*If-None-Match"):
            store.look()
        store.close()
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    assert not [path for path in objects if "log.json" in path]


@pytest.mark.parametrize(
    "address",
    [
        "s3://bucket",
        "s3:///log",
        "s3://key:hunter2@bucket/log",
        "s3://bucket/log?secret_key=hunter2",
        "s3://bucket/log?session_token=hunter2",
        "gs://bucket/log",
    ],
)
def test_an_address_that_is_none_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises(RequestError, match="log_store") as refused:
        ObjectStoreLog(address, timeout_s=1.0, lease_s=LEASE_S, home_format=1)

    assert "hunter2" not in str(refused.value)


def test_a_server_that_is_not_there_is_named() -> None:
    at = "s3://bucket/log?scheme=http&endpoint_override=127.0.0.1:1&region=us-east-1"
    store = ObjectStoreLog(at, timeout_s=0.5, lease_s=LEASE_S, home_format=1)

    with pytest.raises(LogStoreError, match=r"127\.0\.0\.1:1.*cannot be reached"):
        store.look()
    store.close()
