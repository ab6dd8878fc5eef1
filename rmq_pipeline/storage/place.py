"""Which root lies at an address: a local path, or a URI."""

import functools
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias
from urllib.parse import parse_qsl, quote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from rmq_pipeline.storage.local import LocalRoot
from rmq_pipeline.storage.remote import OBJECT_STORES, ObjectRoot, RemoteRoot, has_obstore
from rmq_pipeline.storage.root import Address, Root, address_of, below, shown

#: A root, or its address.
Place: TypeAlias = Root | Address


def at(place: Place) -> Root:
    """Return the root at an address; nothing is created or read.

    Raises:
        ValueError: pyarrow does not support the URI, or it became a Path.
    """
    if isinstance(place, Root):
        return place
    address = address_of(place)
    return LocalRoot(address) if isinstance(address, Path) else _remote(address, os.getpid())


def opened(address: str | Path) -> Root:
    """Open the root at a local path, or at the URI of a pyarrow file system; create its folder.

    Raises:
        ValueError: pyarrow does not support the URI.
    """
    place = address_of(address)
    root = at(place.absolute() if isinstance(place, Path) else place)
    root.create_folder()
    return root


@functools.lru_cache(maxsize=64)
def _remote(address: str, _process: int) -> Root:
    """Return the root at a URI. A forked process opens its own connections."""
    if urlsplit(address).scheme in {"abfs", "abfss"}:
        # The part before the @ is a container, or a user with a password.
        raise ValueError(f"{shown(address)}: Azure's stores have not been tried, and are refused.")
    try:
        files, path = pafs.FileSystem.from_uri(_with_region(address))
    except OSError as error:
        if not address.startswith("s3://"):
            raise
        raise OSError(f"{shown(address)} cannot be opened: {error}. Set AWS_REGION.") from None
    except pa.ArrowException as error:
        # The message of pyarrow may repeat the URI with its secrets.
        why = str(error).replace(address, shown(address))
        raise ValueError(f"pyarrow cannot open {shown(address)!r}: {why}.") from None
    if urlsplit(address).scheme in OBJECT_STORES and has_obstore():
        return ObjectRoot(files, path, address=address)
    return RemoteRoot(files, path, address=address)


def _with_region(address: str) -> str:
    """Name the region of a bucket: pyarrow would ask Amazon for it, which may be away."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    options = address.partition("?")[2]
    if not address.startswith("s3://") or not region or "region" in dict(parse_qsl(options)):
        return address
    return f"{address}{'&' if options else '?'}region={quote(region)}"


def make_temporary(parent: Address, *, prefix: str) -> Address:
    """Return a new folder below another one, which is created."""
    if isinstance(parent, str):
        return below(parent, f"{prefix}{secrets.token_hex(6)}")
    parent.mkdir(parents=True, exist_ok=True)
    # Tasks may run in another working directory.
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).absolute()


def delete_temporary(folder: Address) -> None:
    """Delete a folder and its files; what cannot be deleted only costs space."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with suppress(OSError):
        at(folder).delete_folder("")
