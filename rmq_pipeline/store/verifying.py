"""Read-only verification of the log and the database of a closed home."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa

from rmq_pipeline.errors import CorruptLogError, HomeFormatError
from rmq_pipeline.store.log.log_file import LogFile
from rmq_pipeline.store.statements import named, quoted


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """Position and registered files of a readable database."""

    #: Log position that its tables reflect.
    dispatched: int
    #: Paths of registered segments, event files and snapshots, relative to the home.
    files: frozenset[str]


def read_database(path: Path) -> DatabaseFacts:
    """Read every value of every table; DuckDB checks the checksums of its blocks.

    Raises:
        ValueError: the database cannot be read; the error says why.
    """
    try:
        with duckdb.connect(path, read_only=True) as connection:
            for schema, table in connection.sql(named("tables_to_verify")).fetchall():
                name = f"{quoted(schema)}.{quoted(table)}"
                connection.sql(named("read_whole_table", table=name)).fetchall()
            ((dispatched, *_),) = connection.sql(named("state_reached")).fetchall()
            files = connection.sql(named("registered_files")).fetchall()
    except duckdb.Error as error:
        raise ValueError(str(error).partition("\n")[0]) from error
    return DatabaseFacts(dispatched, frozenset(file for (file,) in files))


def damaged_log_files(
    folder: Path, schemas: Mapping[int, pa.Schema], *, dispatched: int
) -> Iterator[tuple[Path, str | None]]:
    """Compare every section of every log file with its checksum.

    Args:
        folder: folder of the log.
        schemas: schemas of the kinds whose payloads omit the schema.
        dispatched: a log position that the log had reached.

    Yields:
        Each file, and why it is damaged, or None if it is sound. A torn write at the very end
        counts as sound: it was never acknowledged, and the next start cuts it.
    """
    paths = sorted(folder.glob("*.log"))
    for path, following in zip(paths, [*paths[1:], None], strict=True):
        try:
            file = LogFile.open(path, schemas=schemas)
        except (CorruptLogError, HomeFormatError, OSError, ValueError) as error:
            yield path, str(getattr(error, "message", error))
            continue
        try:
            stop = int(following.stem) if following else None
            yield path, _damage(file, stop=stop, dispatched=dispatched)
        finally:
            file.finish()


def _damage(file: LogFile, *, stop: int | None, dispatched: int) -> str | None:
    """Return why a file is damaged; ``stop`` is the base of the next file, None for the last."""
    position = file.base
    try:
        while position < (file.capacity_end if stop is None else stop):
            end, sections = file.frame_sections(position)
            for section in sections:
                file.payload(section)
            position = end
    except CorruptLogError as error:
        written_end = file.written_end(position)
        is_torn = stop is None and position >= dispatched
        if is_torn and not any(
            each.synced > position for each in file.frames_after(position, written_end)
        ):
            return None
        return error.message
    if stop is not None and position != stop:
        return f"a frame reaches beyond position {stop}, where the next file goes on"
    return None
