"""Publication of a sink: the manifest repeats for readers what the broker has settled."""

import contextlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.errors import (
    BusyError,
    ConsumerGroupNotFoundError,
    ForbiddenError,
    SinkChangedError,
)
from rmq_pipeline.lake import manifest
from rmq_pipeline.lake.manifest import checked, named_below
from rmq_pipeline.storage.place import Place, at
from rmq_pipeline.verbs import Verbs

logger = logging.getLogger(__name__)

#: Grace period of replaced files, for readers of an older manifest.
GRACE_MS: Final = 10 * 60_000
_TRIES: Final = 20


def publish(verbs: Verbs, group: str, *, sink: Place, columns: pa.Schema | None = None) -> pa.Table:
    """Write the broker's current list to the manifest, and return the list.

    Args:
        columns: of the sink's rows; None: those of its files.
    """
    for _ in range(_TRIES):
        # Read first, so that the broker's list is at least as new as the manifest.
        known = manifest.known(sink)
        listed = named_below(verbs.sink_files(group), sink=sink)
        if manifest.publish(sink, listed, known=known, columns=columns):
            return listed
    raise BusyError(f"Other publishers of the sink {at(sink)} were faster {_TRIES} times.")


@dataclass(frozen=True, slots=True)
class Converted:
    """What ``convert`` found and did."""

    state: Literal["converted", "already a Delta table", "unknown to the broker"]
    #: The consumer group of the sink, and its version; None if nothing was written.
    group: str | None = None
    version: int | None = None
    files: int | None = None


def convert(verbs: Verbs, *, sink: Place, likely: str = "") -> Converted:
    """Make a sink of an older format a Delta table, unless it is one; repeating it is harmless.

    A window or a compaction may publish the sink meanwhile. A sink without a file that the broker
    lists stays as it is: it is empty, or another broker's.

    Args:
        sink: the sink's folder, with a manifest.
        likely: the group that is looked at first.

    Raises:
        ValueError: a newer version of this library wrote the manifest.
        DamagedFileError: a file of the manifest is damaged.
    """
    if manifest.is_table(sink):
        return Converted("already a Delta table")
    group = group_of(verbs, sink=sink, likely=likely)
    if group is None:
        return Converted("unknown to the broker")
    listed = publish(verbs, group, sink=sink)
    return Converted("converted", group, manifest.version_of(listed), listed.num_rows)


def group_of(verbs: Verbs, *, sink: Place, likely: str = "") -> str | None:
    """Return the group that wrote files of a folder: their names are unique; None if there is none.

    Groups whose files the caller may not see are skipped.

    Args:
        sink: the sink's folder.
        likely: the group that is looked at first.
    """
    found = pa.array(at(sink).matching("hour=*/*.parquet"), pa.string())
    groups = sorted(verbs.list_groups()["name"].to_pylist(), key=lambda name: name != likely)
    for group in groups if len(found) else ():
        with contextlib.suppress(ForbiddenError, ConsumerGroupNotFoundError):
            for removed in (False, True):
                listed = verbs.sink_files(group, removed=removed)["path"]
                if pc.any(pc.is_in(listed, value_set=found)).as_py():
                    return str(group)
    return None


def publish_version(
    verbs: Verbs,
    group: str,
    *,
    sink: Place,
    version: int,
    add: pa.Table,
    remove: Sequence[str],
    columns: pa.Schema | None = None,
    is_rearranged: bool = False,
) -> None:
    """Add one version to the manifest, and earlier ones that are still missing.

    The arguments are those of ``manifest.record``.
    """
    if not manifest.record(
        sink, version, add=add, remove=remove, columns=columns, is_rearranged=is_rearranged
    ):
        publish(verbs, group, sink=sink, columns=columns)


def replace(
    verbs: Verbs,
    group: str,
    *,
    sink: Place,
    replacement_id: str,
    add: pa.Table,
    remove: Sequence[str],
    partitions: Sequence[str] = (),
    window: tuple[str, int] | None = None,
    reason: str = "",
    is_rearranged: bool = False,
) -> dict[str, Any]:
    """Replace files of a sink by staged ones, in the broker and in the manifest.

    Deletes staged files that the sink does not use: those of a refused replacement, and those of a
    replacement that was made before under the same id.

    Args:
        add: schema.SINK_FILE, staged under names that no window's files have (``stage``'s names
            begin with ``part-``, and are swept by the next window).
        window: name and epoch of the window under which the caller works.
        is_rearranged: the new files have the rows of the old ones.

    Returns:
        As ``replace_sink_files``: {"version", "added", "removed"}.

    Raises:
        SinkChangedError: nothing was changed.
    """
    try:
        answer = verbs.replace_sink_files(
            group,
            replacement_id=replacement_id,
            add=add,
            remove=remove,
            partitions=partitions,
            window=window,
            reason=reason,
        )
    except SinkChangedError:
        known = [verbs.sink_files(group, removed=removed) for removed in (False, True)]
        named = [path for files in known for path in files["path"].to_pylist()]
        delete_staged(sink, add, named=named)
        raise
    if answer["added"] == add["path"].to_pylist():
        publish_version(
            verbs,
            group,
            sink=sink,
            version=answer["version"],
            add=add,
            remove=answer["removed"],
            is_rearranged=is_rearranged,
        )
    else:
        delete_staged(sink, add, named=answer["added"])
        publish(verbs, group, sink=sink)
    return answer


def delete_staged(sink: Place, staged: pa.Table, *, named: Sequence[str]) -> None:
    """Delete staged files except those in ``named``."""
    root, kept = at(sink), set(named)
    for path in staged["path"].to_pylist():
        if path not in kept:
            root.delete(checked(root, path))


def sweep(sink: Place, *, prefix: str, epoch: int, kept: Collection[str]) -> list[str]:
    """Delete files that dead windows staged and no settle named.

    Args:
        sink: the sink's folder.
        prefix: of the files' names; the epoch follows: ``part-000007-…``.
        epoch: files of this epoch and later ones are kept.
        kept: paths that are kept.

    Returns:
        The paths deleted, relative to the sink.
    """
    root, kept = at(sink), set(kept)
    unnamed = [
        path
        for path in root.matching(f"hour=*/{prefix}-*.parquet")
        if path not in kept and _epoch_of(path) < epoch
    ]
    for path in unnamed:
        root.delete(path)
    return unnamed


def _epoch_of(path: str) -> int:
    epoch = path.rpartition("/")[2].split("-")[1]
    return int(epoch) if epoch.isdigit() else 0


def replaced_files(verbs: Verbs, group: str, *, grace_ms: int) -> dict[str, bool]:
    """Return the removed files that the broker remembers, each with True if its grace is over."""
    removed = named_below(verbs.sink_files(group, removed=True), sink=group)
    now_ms = listed_at_ms(removed)
    over = [at_ms + grace_ms <= now_ms for at_ms in removed["removed_at_ms"].to_pylist()]
    return dict(zip(removed["path"].to_pylist(), over, strict=True))


def listed_at_ms(listed: pa.Table) -> int:
    """Return the time at which the broker answered ``sink_files``, by its clock, in ms."""
    return int(listed.schema.metadata[b"at_ms"])


def delete_replaced(
    verbs: Verbs, group: str, *, sink: Place, grace_ms: int = GRACE_MS
) -> list[str]:
    """Delete removed files whose grace is over, once the manifest no longer lists them.

    Returns:
        The paths that were deleted.
    """
    counting = set(publish(verbs, group, sink=sink)["path"].to_pylist())
    root = at(sink)
    deleted = []
    for path, over in replaced_files(verbs, group, grace_ms=grace_ms).items():
        if over and path not in counting and root.exists(checked(root, path)):
            root.delete(path)
            deleted.append(path)
    if deleted:
        logger.info("replaced files deleted group=%s files=%d", group, len(deleted))
    return deleted
