"""Dagster's code server, with runs that are forks of a process which has everything imported.

``python -m rmq_pipeline.orchestration.code_server ARGS`` takes what ``dagster api grpc`` takes.
Dagster's own starts a new interpreter for each run, which then imports Dagster, SQLAlchemy, Spark
and the code: seconds. Here a process that does nothing else imports them once, and is forked for
each run. It serves no gRPC and opens no database; the only threads in it are those of NumPy's BLAS
and of Arrow's allocator, and both have fork handlers. Events, exits and cancellations go the ways
they go anyway: it is multiprocessing's own fork server.
"""

import multiprocessing
import os
from multiprocessing import forkserver
from typing import Any, Final

#: What a run imports besides the code. One that is not there (any more) only costs time.
PRELOADED: Final = (
    # The code server's main module, which a child imports to unpickle what it is to do.
    "rmq_pipeline.orchestration.code_server",
    "dagster._cli",
    "dagster._grpc.impl",
    "dagster._grpc.server",
    # An instance on SQLite, and what the repository is made with.
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
    """Serve until told to end."""
    from dagster import _cli
    from dagster._grpc import server

    class ForkingServer(server.DagsterApiServer):
        """Starts its runs from the fork server."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._mp_ctx: Any = multiprocessing.get_context("forkserver")
            origin = options["loadable_target_origin"]
            start_fork_server([*PRELOADED, origin.module_name], folder=origin.working_directory)

    server.DagsterApiServer = ForkingServer  # type: ignore[misc]
    _cli.main()  # type: ignore[no-untyped-call]


def start_fork_server(modules: list[str], *, folder: str) -> None:
    """Start it; it goes on importing in the background, and a run that comes meanwhile waits.

    Args:
        modules: to import, each skipped if it cannot be.
        folder: where modules are that are not installed.
    """
    path = os.environ.get("PYTHONPATH")
    # It is a new interpreter: the environment is all that it knows of this one.
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
