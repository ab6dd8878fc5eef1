"""Storage roots of other file systems: object stores, and whatever pyarrow opens by a URI."""

import errno
import functools
import importlib.util
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

import pyarrow as pa
import pyarrow.fs as pafs
from typing_extensions import override

from rmq_pipeline.extras import lacking
from rmq_pipeline.storage.root import Root, StorageRootError, below

#: Schemes of object stores, with obstore's name of each. Object stores have no folders.
OBJECT_STORES: Final = MappingProxyType({"s3": "s3", "gs": "gs", "gcs": "gs"})

#: A call of a store is repeated for as long as this.
_RETRY_S: Final = 30.0


def has_obstore() -> bool:
    """Return True if the package of the extra ``objects`` is installed."""
    return importlib.util.find_spec("obstore") is not None


class RemoteRoot(Root):
    """A folder of a pyarrow file system, such as an object store."""

    def __init__(self, files: pafs.FileSystem, folder: str, *, address: str) -> None:
        self._files = files
        self._folder = folder.rstrip("/")
        self.address = address

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process takes the credentials from its own environment.
        from rmq_pipeline.storage.place import at

        return at, (self.address,)

    def _at(self, path: str) -> str:
        return f"{self._folder}/{path}" if path else self._folder

    @property
    @override
    def has_links(self) -> bool:
        return False

    @property
    @override
    def uri(self) -> str:
        parts = urlsplit(self.address)
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))

    @override
    def location(self, path: str) -> str:
        return str(below(self.address, path))

    @override
    def check_inside(self, path: str) -> None:
        return

    @override
    def create_folder(self, path: str = "") -> None:
        self._files.create_dir(self._at(path), recursive=True)

    @override
    def write(self, path: str, fill: Callable[[Any], object]) -> int:
        with self.create(path) as file:
            fill(file)
            return int(file.tell())

    @override
    def put_if_absent(self, path: str, content: bytes) -> bool:
        if urlsplit(self.address).scheme in OBJECT_STORES:
            raise lacking("objects", "obstore")
        raise StorageRootError(f"{self}: file systems of this kind have no conditional puts.")

    @override
    def names(self, folder: str) -> list[str]:
        found = self._list(folder, recursive=False)
        return [info.base_name for info in found if info.type == pafs.FileType.File]

    @override
    def matching(self, pattern: str) -> list[str]:
        parts = pattern.count("/")
        return [
            path
            for path in self.files("")
            if path.count("/") == parts and PurePosixPath(path).match(pattern)
        ]

    @override
    def delete_unfinished(self, paths: Iterable[str], *, before_ms: int) -> None:
        return

    @override
    def create(self, path: str) -> pa.NativeFile:
        self._files.create_dir(self._at(path).rpartition("/")[0], recursive=True)
        return self._files.open_output_stream(self._at(path), compression=None)

    @override
    def open(self, path: str) -> pa.NativeFile:
        return self._files.open_input_file(self._at(path))

    @override
    def load(self, path: str) -> pa.Buffer:
        with self.open(path) as file:
            return file.read_buffer()

    @override
    def sync(self, path: str) -> None:
        return

    @override
    def sync_folders(self, paths: Iterable[str], *, missing_ok: bool = False) -> None:
        return

    @override
    def rename(self, old: str, new: str) -> None:
        self._files.create_dir(self._at(new).rpartition("/")[0], recursive=True)
        self._files.move(self._at(old), self._at(new))

    @override
    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._files.delete_file(self._at(path))

    @override
    def delete_folder(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._files.delete_dir(self._at(path))

    def _list(self, folder: str, *, recursive: bool) -> list[pafs.FileInfo]:
        selector = pafs.FileSelector(self._at(folder), recursive=recursive, allow_not_found=True)
        found: list[pafs.FileInfo] = self._files.get_file_info(selector)
        return found

    @override
    def files(self, folder: str) -> dict[str, int]:
        start = len(self._folder) + 1
        return {
            info.path[start:]: info.size
            for info in self._list(folder, recursive=True)
            if info.type == pafs.FileType.File
        }

    @override
    def modified_ms(self, folder: str) -> dict[str, int]:
        start = len(self._folder) + 1
        return {
            info.path[start:]: info.mtime_ns // 1_000_000
            for info in self._list(folder, recursive=True)
            if info.type == pafs.FileType.File and info.mtime_ns is not None
        }

    @override
    def folders(self, folder: str) -> list[str]:
        found = self._list(folder, recursive=False)
        return sorted(info.base_name for info in found if info.type == pafs.FileType.Directory)

    @override
    def size(self, path: str) -> int:
        info = self._files.get_file_info(self._at(path))
        if info.type == pafs.FileType.NotFound:
            raise FileNotFoundError(path)
        size: int = info.size
        return size

    @override
    def read(self, path: str) -> bytes:
        with self._files.open_input_stream(self._at(path), compression=None) as file:
            content: bytes = file.read()
        return content

    @override
    def replace(self, path: str, content: bytes) -> None:
        unfinished = f"{path}.new"
        with self.create(unfinished) as file:
            file.write(content)
        self._files.move(self._at(unfinished), self._at(path))


class ObjectRoot(RemoteRoot):
    """A folder of an object store: S3 or Google Cloud Storage.

    pyarrow reads, and writes large files in parts. It has no conditional puts and takes several
    requests for a small file, so the package obstore puts and deletes whole files.
    """

    @functools.cached_property
    def _store(self) -> Any:
        """The store of the bucket."""
        is_s3 = isinstance(self._files, pafs.S3FileSystem)
        region = self._files.region if is_s3 else None
        return store_at(self.address, region=region, retries=5, retry_s=_RETRY_S)

    def _key(self, path: str) -> str:
        return self._at(path).partition("/")[2]

    @override
    def create_folder(self, path: str = "") -> None:
        """Look whether the bucket is there; object stores have no folders."""
        bucket = self._folder.partition("/")[0]
        if not path and self._files.get_file_info(bucket).type == pafs.FileType.NotFound:
            raise FileNotFoundError(errno.ENOENT, "The bucket does not exist", bucket)

    @override
    def create(self, path: str) -> pa.NativeFile:
        return self._files.open_output_stream(self._at(path), compression=None)

    @override
    def write(self, path: str, fill: Callable[[Any], object]) -> int:
        buffer = pa.BufferOutputStream()
        fill(buffer)
        content = buffer.getvalue().to_pybytes()
        self._put(path, content)
        return len(content)

    @override
    def replace(self, path: str, content: bytes) -> None:
        self._put(path, content)

    @override
    def put_if_absent(self, path: str, content: bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError

        try:
            self._put(path, content, mode="create")
        except AlreadyExistsError:
            return False
        return True

    def _put(self, path: str, content: bytes, **options: Any) -> None:
        import obstore
        from obstore import exceptions

        try:
            obstore.put(self._store, self._key(path), content, **options)
        except exceptions.AlreadyExistsError:
            raise
        except exceptions.NotSupportedError as error:
            raise StorageRootError(f"{self} has no conditional puts: {text_of(error)}.") from error
        except exceptions.BaseError as error:
            raise OSError(f"{self} could not store {path}: {text_of(error)}") from error

    @override
    def delete(self, path: str) -> None:
        # pyarrow would write an empty object for the folder of a deleted file.
        import obstore
        from obstore import exceptions

        try:
            obstore.delete(self._store, self._key(path))
        except FileNotFoundError:
            return
        except exceptions.BaseError as error:
            raise OSError(f"{self} could not delete {path}: {text_of(error)}") from error


def store_at(
    address: str, *, region: str | None, retries: int, retry_s: float, **client: Any
) -> Any:
    """Return obstore's store of the bucket at an address.

    Args:
        retries: how often a failed request is repeated, at most.
        retry_s: time in which it is repeated.
        client: options of obstore's HTTP client.
    """
    from obstore.store import from_url

    parts = urlsplit(address)
    kind, bucket = OBJECT_STORES[parts.scheme], parts.netloc.rpartition("@")[2]
    config = _config(address) if kind == "s3" else {}
    if region is not None:
        config["region"] = region
    options: Any = {**client, "allow_http": config.get("endpoint", "").startswith("http://")}
    retry = {"max_retries": retries, "retry_timeout": timedelta(seconds=retry_s)}
    opened: Any = from_url
    return opened(f"{kind}://{bucket}", client_options=options, retry_config=retry, **config)


def text_of(error: Exception) -> str:
    """Return the message of obstore without the internals that follow it."""
    return str(error).partition("\n\nDebug source")[0]


def _config(address: str) -> dict[str, str]:
    """Return obstore's options of an S3 bucket for the options of pyarrow in a URI."""
    parts = urlsplit(address)
    options = dict(parse_qsl(parts.query))
    config = {}
    endpoint = options.get("endpoint_override") or os.environ.get("AWS_ENDPOINT_URL_S3")
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint is not None:
        scheme = options.get("scheme", "https")
        config["endpoint"] = endpoint if "://" in endpoint else f"{scheme}://{endpoint}"
    if parts.username and parts.password:
        config["access_key_id"] = unquote(parts.username)
        config["secret_access_key"] = unquote(parts.password)
    return config
