"""Where the segments of a home are: in it, or in a root of their own that no other home uses."""

import json
import secrets
from typing import Final

from rmq_pipeline.archive.root import Root, opened
from rmq_pipeline.broker.home import Home
from rmq_pipeline.endpoint import write_json
from rmq_pipeline.errors import ArchiveError

#: In the home: which root it has its segments in. In the root: of which home they are.
FILE: Final = "archive.json"
MARK: Final = "_archive.json"


def archive_of(home: Home, address: str | None) -> Root:
    """The archive of a home.

    Args:
        home: a locked one.
        address: a path, or the URI of a pyarrow file system; None: in the home.

    Raises:
        ArchiveError: the home has its segments elsewhere, or others are there.
    """
    kept = home.path / FILE
    known = json.loads(kept.read_text()) if kept.exists() else None
    if known is None:
        known = {"root": address, "id": secrets.token_hex(16)}
    elif known["root"] != address:
        raise ArchiveError(
            f"{home.path} has its segments in {known['root'] or 'its own folder'},"
            f" not in {address or 'its own folder'}."
        )
    root = opened(home.topics) if address is None else _marked(address, known["id"])
    if not kept.exists():
        write_json(kept, known)
    return root


def _marked(address: str, home_id: str) -> Root:
    try:
        root = opened(address)
    except (ValueError, OSError) as error:
        raise ArchiveError(f"{address} cannot be used: {error}.") from error
    try:
        owner = json.loads(root.read(MARK))["id"]
    except FileNotFoundError:
        if root.folders("") or root.files(""):
            raise ArchiveError(f"{address} is not empty, and no archive.") from None
        root.replace(MARK, json.dumps({"id": home_id}).encode())
    else:
        if owner != home_id:
            raise ArchiveError(f"{address} is the archive of another home.")
    return root
