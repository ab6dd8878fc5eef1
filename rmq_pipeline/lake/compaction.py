"""Compaction of sinks: small files of an hour are merged, and deleted after a grace period.

While an hour still gets files, many files of similar size are merged, so that each row is
rewritten only a few times. Once the hour is quiet, all its small files are merged.
"""

import hashlib
import logging
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rmq_pipeline import checked_parquet
from rmq_pipeline.errors import OperatorError, SinkChangedError
from rmq_pipeline.lake import manifest
from rmq_pipeline.lake.manifest import checked, named_below
from rmq_pipeline.lake.publication import (
    GRACE_MS,
    delete_replaced,
    listed_at_ms,
    publish,
    replace,
    replaced_files,
    sweep,
)
from rmq_pipeline.limits import MIB
from rmq_pipeline.storage.local import LocalRoot
from rmq_pipeline.storage.place import Place, at
from rmq_pipeline.storage.root import Root
from rmq_pipeline.verbs import Verbs

logger = logging.getLogger(__name__)

#: Prefix of merged files' names; the epoch of the compaction follows.
PREFIX: Final = "merged"
#: Files up to this size are one tier; each further tier reaches up to eight times the size.
_TIER_BYTES: Final = 64 * 1024
_TIER_FACTOR: Final = 8
_GROUP_BYTES: Final = 64 * MIB


class DamagedSinkError(OperatorError):
    """Files of a sink are damaged; all that could be merged without them was merged."""

    remedy = (
        "Restore the files from a copy, or replay their hours into the sink (docs/replay.md)."
        " `rmq verify` names all damaged files."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Thresholds of a compaction."""

    #: Approximate size of a merged file; files of at least half of it are not merged.
    target_bytes: int = 128 * MIB
    #: Files of one tier that are merged while the hour still gets files.
    least_files: int = 16
    #: An hour is quiet when it got no file for this long.
    quiet_ms: int = 10 * 60_000
    #: Grace period after which replaced files are deleted.
    grace_ms: int = GRACE_MS


DEFAULT: Final = Rules()


@dataclass(frozen=True, slots=True)
class Merge:
    """Files of one partition to be merged into one."""

    partition: str
    #: Rows of ``sink_files``, in its order.
    files: list[dict[str, Any]]

    @property
    def paths(self) -> list[str]:
        """The files' paths, relative to the sink."""
        return [file["path"] for file in self.files]

    @property
    def replacement_id(self) -> str:
        """Id of the replacement; the same files give the same id."""
        names = "\n".join(self.paths).encode()
        return f"compact/{hashlib.sha256(names).hexdigest()[:32]}"


@dataclass(slots=True)
class Compacted:
    """Counts of a compaction."""

    merged_files: int = 0
    made_files: int = 0
    rows: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    #: Merges that were dropped because the sink changed meanwhile.
    given_up: int = 0
    #: Replaced files whose grace was over, and staged files of dead compactions.
    deleted_files: int = 0
    swept_files: int = 0


def plan(listed: pa.Table, *, rules: Rules = DEFAULT) -> list[Merge]:
    """Return the merges that are worth doing, from the result of ``sink_files``."""
    now_ms = listed_at_ms(listed)
    partitions: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in named_below(listed, sink="compaction").to_pylist():
        if file["bytes"] is not None and file["rows"] is not None:
            partitions[file["partition"]].append(file)
    return [
        merge
        for partition, files in partitions.items()
        for merge in _of_partition(partition, files, now_ms=now_ms, rules=rules)
    ]


def _of_partition(
    partition: str, files: list[dict[str, Any]], *, now_ms: int, rules: Rules
) -> Iterator[Merge]:
    small = [file for file in files if file["bytes"] < rules.target_bytes // 2]
    if len(small) < 2:
        return
    if max(file["at_ms"] for file in files) + rules.quiet_ms <= now_ms:
        yield from _cut(partition, small, target_bytes=rules.target_bytes)
        return
    tiers: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for file in small:
        tiers[_tier(file["bytes"])].append(file)
    for alike in tiers.values():
        if len(alike) >= rules.least_files:
            yield from _cut(partition, alike, target_bytes=rules.target_bytes)


def _tier(size: int) -> int:
    tier, limit = 0, _TIER_BYTES
    while size > limit:
        tier, limit = tier + 1, limit * _TIER_FACTOR
    return tier


def _cut(partition: str, files: Sequence[dict[str, Any]], *, target_bytes: int) -> Iterator[Merge]:
    chosen: list[dict[str, Any]] = []
    size = 0
    for file in files:
        if size + file["bytes"] > target_bytes and len(chosen) > 1:
            yield Merge(partition, chosen)
            chosen, size = [], 0
        chosen.append(file)
        size += file["bytes"]
    if len(chosen) > 1:
        yield Merge(partition, chosen)


def is_due(verbs: Verbs, group: str, *, sink: Place, rules: Rules = DEFAULT) -> bool:
    """Return whether there are files to merge or to delete."""
    if plan(verbs.sink_files(group), rules=rules):
        return True
    root, replaced = at(sink), replaced_files(verbs, group, grace_ms=rules.grace_ms)
    return any(over and root.exists(checked(root, path)) for path, over in replaced.items())


def compact(
    verbs: Verbs,
    group: str,
    *,
    sink: Place,
    window: tuple[str, int],
    rules: Rules = DEFAULT,
    going_on: Callable[[], bool] = lambda: True,
) -> Compacted:
    """Merge small files, and delete files whose grace is over.

    Args:
        verbs: flight.client.Client, or the broker itself.
        group: the consumer group of the sink.
        sink: the sink's folder.
        window: name and epoch of the window. It allows one compaction of a sink at a time; the next
            compaction deletes the files that a dead one staged.
        rules: thresholds.
        going_on: called before each merge; False stops the compaction.

    Raises:
        FencedError: another holder has taken over the window.
        DamagedSinkError: some files are damaged. It is raised last, when the rest is done.
    """
    done = Compacted()
    damage: list[str] = []
    listed = publish(verbs, group, sink=sink)
    known = {*listed["path"].to_pylist(), *replaced_files(verbs, group, grace_ms=rules.grace_ms)}
    done.swept_files = len(sweep(sink, prefix=PREFIX, epoch=window[1], kept=known))
    for merge in plan(listed, rules=rules):
        if not going_on():
            break
        try:
            staged = stage(sink, merge, epoch=window[1])
        except DamagedSinkError as error:
            logger.error("merge dropped group=%s error=%s", group, error.message)  # noqa: TRY400
            damage.append(error.message)
            continue
        try:
            replace(
                verbs,
                group,
                sink=sink,
                replacement_id=merge.replacement_id,
                add=staged,
                remove=merge.paths,
                window=window,
                reason="compaction",
                is_rearranged=True,
            )
        except SinkChangedError as error:
            # A replay has replaced one of the files. The next compaction plans with the new list.
            logger.info("merge dropped, because the sink changed group=%s error=%s", group, error)
            done.given_up += 1
            continue
        _count(done, merge, staged=staged)
    done.deleted_files = len(delete_replaced(verbs, group, sink=sink, grace_ms=rules.grace_ms))
    if damage:
        raise DamagedSinkError(" ".join(damage))
    return done


def _count(done: Compacted, merge: Merge, *, staged: pa.Table) -> None:
    (made,) = staged.to_pylist()
    done.merged_files += len(merge.files)
    done.made_files += 1
    done.rows += made["rows"]
    done.bytes_before += sum(file["bytes"] for file in merge.files)
    done.bytes_after += made["bytes"]


def stage(sink: Place, merge: Merge, *, epoch: int) -> pa.Table:
    """Write the rows of several files to one, in order, and sync it; one row of schema.SINK_FILE.

    Raises:
        DamagedSinkError: a file is damaged; it is named, and no merged file is left.
        ValueError: the files hold more or fewer rows than the broker listed.
    """
    root = at(sink)
    folder = checked(root, merge.paths[0]).rpartition("/")[0]
    whole = f"{folder}/{PREFIX}-{epoch:06}-{uuid.uuid4().hex[:12]}.parquet"
    expected = sum(file["rows"] for file in merge.files)
    try:
        rows = _write(root, whole, paths=[checked(root, path) for path in merge.paths])
        if rows != expected:
            raise ValueError(
                f"{len(merge.files)} files of {root}/{folder} have {rows} rows, not {expected}."
            )
    except BaseException:
        root.delete(whole)
        raise
    root.sync_folders([folder])
    described = {
        "path": whole,
        "rows": rows,
        "bytes": root.size(whole),
        "partition": merge.partition,
        "offsets": _united([file["offsets"] for file in merge.files]),
    }
    return manifest.as_files([described])


def _write(sink: Root, whole: str, *, paths: Sequence[str]) -> int:
    schemas = [_schema(sink, path) for path in paths]
    united = pa.unify_schemas(schemas, promote_options="permissive")
    rows = 0
    with (
        sink.create(whole) as file,
        checked_parquet.writer(file, united, compression="zstd") as writer,
    ):
        for group in _row_groups(sink, paths, united=united):
            writer.write_table(group, row_group_size=max(1, group.num_rows))
            rows += group.num_rows
    sink.sync(whole)
    return rows


def _row_groups(sink: Root, paths: Sequence[str], *, united: pa.Schema) -> Iterator[pa.Table]:
    """Yield all rows in order, in tables of about 64 MiB."""
    gathered: list[pa.Table] = []
    size = 0
    for path in paths:
        for batch in _batches(sink, path):
            gathered.append(pa.Table.from_batches([batch]))
            size += batch.nbytes
            if size >= _GROUP_BYTES:
                yield _one(gathered, united)
                gathered, size = [], 0
    if gathered:
        yield _one(gathered, united)


def _schema(sink: Root, path: str) -> pa.Schema:
    try:
        with sink.open(path) as file:
            return pq.read_schema(file)
    except (OSError, ValueError) as error:  # Arrow's errors, and UnicodeDecodeError
        _raise_damage(sink, path, error=error)
        raise


def _batches(sink: Root, path: str) -> Iterator[pa.RecordBatch]:
    try:
        with sink.open(path) as source, checked_parquet.open_file(source) as file:
            yield from file.iter_batches()
    except (OSError, pa.ArrowException) as error:
        _raise_damage(sink, path, error=error)
        raise


def _raise_damage(sink: Root, path: str, *, error: Exception) -> None:
    """Raise DamagedSinkError, unless the system failed: such an error has a number."""
    if isinstance(error, OSError) and error.errno is not None:
        return
    if not isinstance(sink, LocalRoot):
        # An error of a store has no number. A damaged file can be loaded.
        sink.load(path)
    raise DamagedSinkError(f"{sink}/{path} is damaged: {error}.") from error


def _one(tables: list[pa.Table], united: pa.Schema) -> pa.Table:
    whole = pa.concat_tables([united.empty_table(), *tables], promote_options="permissive")
    return whole.select(united.names).cast(united)


def _united(ranges: Sequence[list[dict[str, int]] | None]) -> list[dict[str, int]] | None:
    """Return for each queue the smallest range that covers all; None if a file's are unknown."""
    found: dict[int, dict[str, int]] = {}
    for each in ranges:
        if each is None:
            return None
        for part in each:
            known = found.setdefault(part["queue_id"], dict(part))
            known["base"] = min(known["base"], part["base"])
            known["end"] = max(known["end"], part["end"])
    return [found[queue_id] for queue_id in sorted(found)]
