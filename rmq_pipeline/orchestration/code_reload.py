"""Reload of a project's code in a running Dagster when its files change."""

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Self

from watchfiles import Change, watch

from rmq_pipeline.orchestration.dev_server import DevServer

LOG: Final = logging.getLogger(__name__)
#: Endings of the files that a project reads when Dagster loads it.
ENDINGS: Final = (".py", ".yaml", ".yml")
#: Folders without code of the project. Hidden folders and Python's environments are others.
_NO_CODE: Final = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages"})
_ENVIRONMENT: Final = "pyvenv.cfg"
#: Changes within this time are one: an editor or git writes several files.
TOGETHER_MS: Final = 1_000
_BEGIN_S: Final = 10.0
#: How many names of changed files are told.
_TOLD_MOST: Final = 3


class Sources:
    """The files of a project's code, and their content when it was loaded."""

    def __init__(self, folder: Path, *, ignored: Sequence[Path]) -> None:
        """Read the files.

        Args:
            folder: with the code.
            ignored: folders that are not code, if they are within it.
        """
        self.folder = folder.resolve()
        within = (path.resolve() for path in ignored)
        self._ignored = {path for path in within if path.is_relative_to(self.folder)}
        self._ignored.discard(self.folder)
        self._known: dict[Path, bytes] = {}
        self.load()

    def load(self) -> None:
        """Remember the present content of all files."""
        self._known = {path: _digest(path) for path in self._files()}

    def changed(self, paths: Iterable[Path]) -> list[Path]:
        """Return those whose content is another one than when it was loaded."""
        return sorted(path for path in paths if self._known.get(path, b"") != _digest(path))

    def includes(self, path: Path) -> bool:
        """Return True for a file of the code, whether or not it is there."""
        if path.suffix not in ENDINGS or not path.is_relative_to(self.folder):
            return False
        levels = len(path.relative_to(self.folder).parts) - 1
        return all(self._may_have_code(folder) for folder in list(path.parents)[:levels])

    def _may_have_code(self, folder: Path) -> bool:
        name = folder.name
        return not (
            name.startswith(".")
            or name in _NO_CODE
            or folder in self._ignored
            or (folder / _ENVIRONMENT).exists()
        )

    def _files(self) -> Iterator[Path]:
        for place, folders, names in os.walk(self.folder):
            here = Path(place)
            folders[:] = [name for name in folders if self._may_have_code(here / name)]
            yield from (here / name for name in names if name.endswith(ENDINGS))


def _digest(path: Path) -> bytes:
    """Return a digest of a file's content; empty without the file."""
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).digest()
    except OSError:
        return b""


class CodeReload:
    """A thread that loads the code again when its files change, within the block."""

    def __init__(
        self, dagster: DevServer, sources: Sources, *, tell: Callable[[str], None]
    ) -> None:
        """Create the thread; it starts with the block.

        Args:
            dagster: loads the code.
            sources: the files of the code.
            tell: gets a line for each reload.
        """
        self._dagster, self._sources, self._tell = dagster, sources, tell
        self._over = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="code-reload", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        # A change before the watch has begun would not be seen.
        self._begun.wait(_BEGIN_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        changes = watch(
            self._sources.folder,
            watch_filter=self._is_code,
            debounce=TOGETHER_MS,
            stop_event=self._over,
            rust_timeout=TOGETHER_MS,
            raise_interrupt=False,
            yield_on_timeout=True,
        )
        try:
            for changed in changes:
                self._begun.set()
                self._reload({Path(path) for _, path in changed})
        except (OSError, RuntimeError) as error:
            # For example, the system allows no more watches.
            self._tell(f"reload   {self._sources.folder} is no longer watched: {error}")
        finally:
            self._begun.set()

    def _is_code(self, _: Change, path: str) -> bool:
        self._begun.set()
        return self._sources.includes(Path(path))

    def _reload(self, paths: Iterable[Path]) -> None:
        """Load the code again if files have another content; tell what became of it."""
        changed = self._sources.changed(paths)
        if not changed:
            return
        names = [str(path.relative_to(self._sources.folder)) for path in changed[:_TOLD_MOST]]
        what = ", ".join([*names, "…"] if len(changed) > _TOLD_MOST else names)
        try:
            error = self._dagster.check_code(over=self._over)
            if not error and not self._over.is_set():
                self._dagster.reload_code(over=self._over)
        except Exception as failure:
            # Dagster's own watcher starts a code server that has ended again.
            LOG.warning("the code is not reloaded", exc_info=True)
            error = str(failure)
        if self._over.is_set():
            return
        # Files that the code itself writes when it is loaded must not load it again.
        self._sources.load()
        said = f"cannot be loaded, the code before it goes on:\n{error}" if error else "loaded"
        self._tell(f"reload   {what}: {said}")
