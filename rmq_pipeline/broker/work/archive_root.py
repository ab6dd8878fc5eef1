"""Location of a home's segments: in the home, or in a root that no other home uses."""

import secrets
from pathlib import Path
from typing import Final

from rmq_pipeline import durable_files
from rmq_pipeline.archive.root import Root, opened
from rmq_pipeline.broker.work.home import Home
from rmq_pipeline.errors import ArchiveError

#: FILE, in the home: root of its segments. MARK, in the root: id of the home it belongs to.
FILE: Final = "archive.json"
MARK: Final = "_archive.json"


def archive_of(home: Home, address: str | None) -> Root:
    """Return the archive of a home.

    Args:
        home: a locked home.
        address: path, or URI of a pyarrow file system; None: in the home.

    Raises:
        ArchiveError: the home's segments are elsewhere, or the root belongs to another home.
    """
    kept = home.path / FILE
    known = _known(kept)
    if known is None:
        known = {"root": address, "id": secrets.token_hex(16)}
    elif known["root"] != address:
        raise ArchiveError(
            f"{home.path} has its segments in {known['root'] or 'its own folder'},"
            f" not in {address or 'its own folder'}."
        )
    root = opened(home.topics) if address is None else _marked(address, str(known["id"]))
    if not kept.exists():
        durable_files.write_json(kept, known)
    return root


def _known(file: Path) -> dict[str, str | None] | None:
    try:
        known = durable_files.load_json(file.read_bytes())
        return {"root": known["root"], "id": known["id"]}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError) as error:
        raise durable_files.DamagedFileError(f"{file} is damaged: {error}.") from error


def _marked(address: str, home_id: str) -> Root:
    try:
        root = opened(address)
    except (ValueError, OSError) as error:
        raise ArchiveError(f"{address} cannot be used: {error}.") from error
    try:
        owner = durable_files.load_json(root.read(MARK))["id"]
    except FileNotFoundError:
        if root.folders("") or root.files(""):
            raise ArchiveError(f"{address} is not empty and not an archive.") from None
        root.replace(MARK, durable_files.dump_json({"id": home_id}))
    except (ValueError, KeyError) as error:
        raise durable_files.DamagedFileError(f"{address}/{MARK} is damaged: {error}.") from error
    else:
        if owner != home_id:
            raise ArchiveError(f"{address} is the archive of another home.")
    return root
