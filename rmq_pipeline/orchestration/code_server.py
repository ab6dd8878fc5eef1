"""Dagster's code server, with runs forked from a process that has imported everything.

``python -m rmq_pipeline.orchestration.code_server ARGS`` takes the arguments of ``dagster api
grpc``. Dagster's own server starts a new interpreter for each run. Importing Dagster, SQLAlchemy,
Spark and the code then takes seconds. Here one process imports them once and is forked for each
run. It serves no gRPC and opens no database. Its only threads belong to NumPy's BLAS and Arrow's
allocator, which have fork handlers. Events, exits and cancellations work as before: it is the fork
server of multiprocessing.
"""

import multiprocessing
import os
import sys
import traceback
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Final

#: Exit code if the code cannot be loaded. The last line on stderr then says why, and where.
CANNOT_LOAD: Final = 3

#: Modules that a run imports in addition to the code. A missing module only costs time.
PRELOADED: Final = (
    # The code server's main module, which a child imports to unpickle its task.
    "rmq_pipeline.orchestration.code_server",
    "dagster._cli",
    "dagster._grpc.impl",
    "dagster._grpc.server",
    # An instance on SQLite, and the modules that build the repository.
    "dagster._core.definitions.repository_definition.repository_data_builder",
    "dagster._core.instance.factory",
    "dagster._core.storage.migration.utils",
    "dagster._core.storage.root",
    "dagster._core.storage.sqlite_storage",
    "dagster._daemon.controller",
    "fsspec.implementations.local",
    "upath.implementations.local",
    # A window of a consumer, and its checks.
    "pyspark.sql.classic.dataframe",
    "pyspark.sql.pandas.map_ops",
    "rmq_pipeline.orchestration.queries",
)


def main() -> None:
    """Serve until the process is told to end."""
    from dagster import DagsterError, _cli
    from dagster._grpc import server

    folder = ""

    class ForkingServer(server.DagsterApiServer):
        """Starts its runs from the fork server."""

        def __init__(self, *args: Any, **options: Any) -> None:
            nonlocal folder
            origin = options["loadable_target_origin"]
            folder = origin.working_directory
            super().__init__(*args, **options)
            self._mp_ctx: Any = multiprocessing.get_context("forkserver")
            start_fork_server([*PRELOADED, origin.module_name], folder=origin.working_directory)

    server.DagsterApiServer = ForkingServer  # type: ignore[misc]
    try:
        _cli.main()  # type: ignore[no-untyped-call]
    except DagsterError as error:
        reason = error.__cause__ or error
        traceback.print_exception(reason)
        sys.stderr.write(error_line(reason, folder=folder) + "\n")
        sys.exit(CANNOT_LOAD)


def error_line(error: BaseException, *, folder: str) -> str:
    """Return an error of the code in one line, with its last place in the folder.

    Args:
        error: the exception that ended the import.
        folder: the folder of the code.
    """
    says = " ".join(f"{type(error).__name__}: {error}".split())
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        place = Path(frame.filename)
        if place.is_relative_to(folder) and "site-packages" not in place.parts:
            return f"{says} ({place.relative_to(folder)}, line {frame.lineno})"
    return says


def start_fork_server(modules: list[str], *, folder: str) -> None:
    """Start the fork server; it imports in the background, and a run requested meanwhile waits.

    Args:
        modules: modules to import; those that fail are skipped.
        folder: folder of modules that are not installed.
    """
    path = os.environ.get("PYTHONPATH")
    # The fork server is a new interpreter, and inherits only the environment.
    os.environ["PYTHONPATH"] = folder if path is None else f"{folder}{os.pathsep}{path}"
    try:
        multiprocessing.set_forkserver_preload(modules)
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path


if __name__ == "__main__":
    main()
