"""Compaction of sinks: many small files of an hour become one, and the small ones go after a time.

While an hour still gets files, those of about one size are merged when they are many, so that a row
is written again only a few times; once it is quiet, all that is small is.
"""

import hashlib
import logging
import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rmq_pipeline.errors import SinkChangedError
from rmq_pipeline.lake import manifest
from rmq_pipeline.lake.publication import (
    GRACE_MS,
    SinkVerbs,
    delete_replaced,
    listed_at_ms,
    publish,
    replace,
    replaced_files,
    sweep,
)
from rmq_pipeline.limits import MIB

logger = logging.getLogger(__name__)

#: What merged files are called; the epoch of the compaction follows.
PREFIX: Final = "merged"
#: Files up to this size are of one tier, and so are those up to eight times as large, and so on.
_TIER_BYTES: Final = 64 * 1024
_TIER_FACTOR: Final = 8
_GROUP_BYTES: Final = 64 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is merged."""

    #: Of a merged file, about; files of at least half of it are left alone.
    target_bytes: int = 128 * MIB
    #: Of an hour that still gets files so many of about one size are merged.
    least_files: int = 16
    #: An hour is quiet when no file came for this long.
    quiet_ms: int = 10 * 60_000
    #: Replaced files are kept this long.
    grace_ms: int = GRACE_MS


DEFAULT: Final = Rules()


@dataclass(frozen=True, slots=True)
class Merge:
    """Files of one partition that become one."""

    partition: str
    #: As ``sink_files`` answered them, in that order.
    files: list[dict[str, Any]]

    @property
    def paths(self) -> list[str]:
        """Of the files, relative to the sink."""
        return [file["path"] for file in self.files]

    @property
    def replacement_id(self) -> str:
        """The same for the same files."""
        names = "\n".join(self.paths).encode()
        return f"compact/{hashlib.sha256(names).hexdigest()[:32]}"


@dataclass(slots=True)
class Compacted:
    """What a compaction did."""

    merged_files: int = 0
    made_files: int = 0
    rows: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    #: Merges given up, because the sink changed meanwhile.
    given_up: int = 0
    #: Replaced files whose grace was over, and what dead compactions had staged.
    deleted_files: int = 0
    swept_files: int = 0


def plan(listed: pa.Table, *, rules: Rules = DEFAULT) -> list[Merge]:
    """What is worth merging, of what ``sink_files`` answered."""
    now_ms = listed_at_ms(listed)
    partitions: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in listed.to_pylist():
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


def is_due(verbs: SinkVerbs, group: str, *, sink: Path, rules: Rules = DEFAULT) -> bool:
    """Whether there is anything to merge, or to delete."""
    if plan(verbs.sink_files(group), rules=rules):
        return True
    replaced = replaced_files(verbs, group, grace_ms=rules.grace_ms)
    return any(over and (sink / path).exists() for path, over in replaced.items())


def compact(
    verbs: SinkVerbs,
    group: str,
    *,
    sink: Path,
    window: tuple[str, int],
    rules: Rules = DEFAULT,
    going_on: Callable[[], bool] = lambda: True,
) -> Compacted:
    """Merge what is worth it, and delete what was replaced long enough ago.

    Args:
        verbs: flight.client.Client, or the broker itself.
        group: the consumer group whose sink it is.
        sink: the sink's folder.
        window: name and epoch of the window whose work it is: only one compaction of a sink goes
            on at a time, and what one that was killed has staged is deleted by the next.
        rules: what is merged.
        going_on: asked before each merge; False ends the work.

    Raises:
        FencedError: somebody else has taken over.
    """
    done = Compacted()
    listed = publish(verbs, group, sink=sink)
    known = {*listed["path"].to_pylist()}
    known |= replaced_files(verbs, group, grace_ms=rules.grace_ms).keys()
    done.swept_files = len(sweep(sink, prefix=PREFIX, epoch=window[1], kept=known))
    for merge in plan(listed, rules=rules):
        if not going_on():
            break
        staged = stage(sink, merge, epoch=window[1])
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
            )
        except SinkChangedError as error:
            # Somebody has replaced one of the files: a replay. The next compaction sees it.
            logger.info("merge given up group=%s why=%s", group, error)
            done.given_up += 1
            continue
        _count(done, merge, staged=staged)
    done.deleted_files = len(delete_replaced(verbs, group, sink=sink, grace_ms=rules.grace_ms))
    return done


def _count(done: Compacted, merge: Merge, *, staged: pa.Table) -> None:
    (made,) = staged.to_pylist()
    done.merged_files += len(merge.files)
    done.made_files += 1
    done.rows += made["rows"]
    done.bytes_before += sum(file["bytes"] for file in merge.files)
    done.bytes_after += made["bytes"]


def stage(sink: Path, merge: Merge, *, epoch: int) -> pa.Table:
    """Write the rows of these files to one, in their order, and sync it; schema.SINK_FILE.

    Raises:
        ValueError: the files do not hold the rows that they are said to.
    """
    folder = (sink / merge.paths[0]).parent
    whole = folder / f"{PREFIX}-{epoch:06}-{uuid.uuid4().hex[:12]}.parquet"
    rows = _write(whole, [sink / path for path in merge.paths])
    expected = sum(file["rows"] for file in merge.files)
    if rows != expected:
        whole.unlink()
        raise ValueError(f"{len(merge.files)} files of {folder} have {rows} rows, not {expected}.")
    manifest.sync_folder(folder)
    described = {
        "path": str(whole.relative_to(sink)),
        "rows": rows,
        "bytes": whole.stat().st_size,
        "partition": merge.partition,
        "offsets": _united([file["offsets"] for file in merge.files]),
    }
    return manifest.as_files([described])


def _write(whole: Path, paths: Sequence[Path]) -> int:
    schemas = [pq.read_schema(path) for path in paths]
    united = pa.unify_schemas(schemas, promote_options="permissive")
    rows = 0
    with whole.open("xb") as file:
        with pq.ParquetWriter(file, united, compression="zstd") as writer:
            for group in _row_groups(paths, united):
                writer.write_table(group, row_group_size=max(1, group.num_rows))
                rows += group.num_rows
        file.flush()
        os.fsync(file.fileno())
    return rows


def _row_groups(paths: Sequence[Path], united: pa.Schema) -> Iterator[pa.Table]:
    """All rows in order, in tables of about 64 MiB."""
    gathered: list[pa.Table] = []
    size = 0
    for path in paths:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                gathered.append(pa.Table.from_batches([batch]))
                size += batch.nbytes
                if size >= _GROUP_BYTES:
                    yield _one(gathered, united)
                    gathered, size = [], 0
    if gathered:
        yield _one(gathered, united)


def _one(tables: list[pa.Table], united: pa.Schema) -> pa.Table:
    whole = pa.concat_tables([united.empty_table(), *tables], promote_options="permissive")
    return whole.select(united.names).cast(united)


def _united(ranges: Sequence[list[dict[str, int]] | None]) -> list[dict[str, int]] | None:
    """The smallest ranges that hold all of them; None where one is unknown."""
    found: dict[int, dict[str, int]] = {}
    for each in ranges:
        if each is None:
            return None
        for part in each:
            known = found.setdefault(part["queue_id"], dict(part))
            known["base"] = min(known["base"], part["base"])
            known["end"] = max(known["end"], part["end"])
    return [found[queue_id] for queue_id in sorted(found)]
