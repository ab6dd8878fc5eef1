"""What the files of a commit log are worth at start: sound, torn at the end, or damaged.

Only frames from the dispatched position on are looked at, never the whole history; a flip in an
older one is found when it is read. A bad frame is cut only at the end of the last file, where the
write it belongs to was never answered (or, with flush = async, never promised to be on disk).
"""

import logging
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from rmq_pipeline.errors import CorruptLogError
from rmq_pipeline.store import log_file
from rmq_pipeline.store.log_file import LogFile

_LOGGER = logging.getLogger(__name__)


def open_files(folder: Path, *, fingerprint: bytes) -> list[LogFile]:
    """The files of a folder in log order; what a crash left unfinished is deleted.

    Raises:
        CorruptLogError: a file header is damaged, or a file is missing between two others.
        HomeFormatError: a file has another format.
    """
    for unfinished in folder.glob(f"*{log_file.UNFINISHED_SUFFIX}"):
        unfinished.unlink()
    paths = sorted(folder.glob(f"*{log_file.SUFFIX}"))
    with ExitStack() as on_failure:
        files: list[LogFile] = []
        for path in paths:
            files.append(LogFile.open(path, fingerprint=fingerprint))
            on_failure.callback(files[-1].finish)
        _check_continuous(files)
        on_failure.pop_all()
    for file in files[:-1]:
        file.finish()
    return files


def _check_continuous(files: list[LogFile]) -> None:
    for file, following in pairwise(files):
        if following.seed != file.seed:
            raise following.damage(following.base, "a file of another log")
        if following.base > file.capacity_end:
            raise file.damage(
                file.capacity_end, f"the log goes on only in {following.path.name}: a file is gone"
            )


def sound_end(files: list[LogFile], *, dispatched_position: int) -> int:
    """Check every frame from the dispatched position on, cut a torn tail; the end of the log.

    Raises:
        CorruptLogError: a bad frame anywhere but at the very end, or frames that dispatch has
            seen are gone.
    """
    _check_reaches(files, dispatched_position)
    for file, following in pairwise(files):
        if following.base > dispatched_position:
            start = max(file.base, dispatched_position)
            end, damage = _walk(file, start=start, stop=following.base)
            if end != following.base:
                raise damage or file.damage(end, "a frame reaches into the next file")
    last = files[-1]
    end, damage = _walk(last, start=max(last.base, dispatched_position), stop=last.capacity_end)
    if damage is not None:
        _cut(last, end, damage=damage)
    last.sync()
    last.release()
    return end


def _check_reaches(files: list[LogFile], dispatched_position: int) -> None:
    first, last = files[0], files[-1]
    if dispatched_position < first.base:
        raise first.damage(
            first.base, f"dispatch has reached only {dispatched_position}, but the log begins"
        )
    if dispatched_position > last.capacity_end:
        raise last.damage(
            last.capacity_end, f"dispatch has reached {dispatched_position}, but the log ends"
        )


def _walk(file: LogFile, *, start: int, stop: int) -> tuple[int, CorruptLogError | None]:
    """Go from frame to frame; where the sound ones end before ``stop``, and what is wrong there."""
    position = start
    while position < stop:
        try:
            end, sections = file.frame_sections(position)
            for section in sections:
                file.payload(section)
        except CorruptLogError as damage:
            # Its traceback would keep the file open until the next collection of garbage.
            return position, damage.with_traceback(None)
        position = end
    return position, None


def _cut(file: LogFile, end: int, *, damage: CorruptLogError) -> None:
    """Clear what follows the last sound frame, unless it proves that the log was longer."""
    written_end = file.written_end(end)
    if any(frame.synced > end for frame in file.frames_after(end, written_end)):
        raise CorruptLogError(
            f"{damage.message} Sound frames follow it, so it is not a torn write."
        )
    if written_end > end:
        _LOGGER.warning(
            "cut a torn write: file=%s position=%d bytes=%d", file.path, end, written_end - end
        )
        file.zero(end, written_end)
