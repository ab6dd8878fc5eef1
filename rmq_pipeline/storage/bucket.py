"""Objects of a folder in an object store, read and written by obstore within time limits.

``ObjectRoot`` waits long and reads by pyarrow, as files want it. A commit log wants to know soon
that a store does not answer, and whether an object is there.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from rmq_pipeline.storage.remote import store_at, text_of
from rmq_pipeline.storage.root import shown

#: Times that a request is repeated after an error of the network or the server.
_RETRIES: Final = 2
#: How stores say that there is no bucket, which is no missing object.
_NO_BUCKET: Final = "NoSuchBucket"


class BucketError(Exception):
    """A store of objects does not answer, or refuses a request; callers translate it."""

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "Check the address and the network; the request may have been executed.",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class Bucket:
    """A folder of a bucket. Thread-safe. All methods raise BucketError."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        """Prepare the bucket; nothing is read.

        Args:
            address: URI; credentials come from the environment.
            timeout_s: longest time of one try of a request.
        """
        parts = urlsplit(address)
        self.address = shown(address)
        self._folder = parts.path.strip("/")
        region = dict(parse_qsl(parts.query)).get("region")
        self._store = store_at(
            address,
            region=region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
            retries=_RETRIES,
            retry_s=timeout_s,
            timeout=timedelta(seconds=timeout_s),
            connect_timeout=timedelta(seconds=timeout_s),
        )

    def _key(self, name: str) -> str:
        return f"{self._folder}/{name}" if self._folder else name

    def put_if_absent(self, name: str, content: bytes) -> bool:
        """Put an object; return False if there is one of this name.

        After a lost answer, False may mean the caller's own object: read it.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        try:
            with self._answering(name):  # one put: a multipart upload has no condition
                key = self._key(name)
                obstore.put(self._store, key, content, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        return True

    def put(self, name: str, content: bytes) -> None:
        """Put an object, or replace it."""
        import obstore

        with self._answering(name):
            obstore.put(self._store, self._key(name), content, use_multipart=False)

    def read(self, name: str, *, start: int = 0, length: int | None = None) -> bytes | None:
        """Return an object or the bytes of a range; None if there is no object of this name.

        Args:
            start: before the end of the object, if there is a length.
            length: most bytes to read; None: all.
        """
        import obstore

        try:
            with self._answering(name):
                key = self._key(name)
                if length is None:
                    return bytes(obstore.get(self._store, key).bytes())
                return bytes(obstore.get_range(self._store, key, start=start, length=length))
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        """Return True if there is an object of this name."""
        import obstore

        try:
            with self._answering(name):
                obstore.head(self._store, self._key(name))
        except FileNotFoundError:
            return False
        return True

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, if they exist."""
        import obstore

        if not names:
            return
        try:
            with self._answering(names[0]):
                obstore.delete(self._store, [self._key(name) for name in names])
        except FileNotFoundError:
            return

    def some(self, most: int) -> list[str]:
        """Return names of objects in the folder; a listing may lag behind."""
        import obstore

        start = len(self._folder) + 1 if self._folder else 0
        with self._answering(""):
            pages: Any = obstore.list(self._store, self._folder or None, chunk_size=max(most, 1))
            found = (each["path"][start:] for page in pages for each in page)
            return list(islice(found, most))

    @contextmanager
    def _answering(self, name: str) -> Iterator[None]:
        """Translate errors of obstore; AlreadyExistsError and FileNotFoundError pass."""
        from obstore import exceptions

        try:
            yield
        except exceptions.AlreadyExistsError:
            raise
        except (exceptions.UnauthenticatedError, exceptions.PermissionDeniedError) as error:
            raise BucketError(
                f"{self.address} refuses the credentials, or a right of them: {_short(error)}.",
                remedy="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of a user that may get,"
                " put, delete and list objects there.",
            ) from error
        except (FileNotFoundError, exceptions.NotFoundError) as error:
            if _NO_BUCKET in str(error):
                raise BucketError(
                    f"The bucket of {self.address} does not exist.",
                    remedy="Create the bucket, or correct the address and the region.",
                ) from error
            raise FileNotFoundError(name) from error
        except exceptions.BaseError as error:
            raise BucketError(f"{self.address} cannot be reached: {_short(error)}.") from error


def _short(error: Exception) -> str:
    return " ".join(text_of(error).split())[:300].rstrip(".")
