"""The process of one query: reads the rows, runs the query, writes the result, and exits.

Standard input contains a line of JSON and an Arrow stream per table, and then stays open. Its end
means that the broker has exited, and ends this process even inside a function. Standard output
contains the result as an Arrow stream; standard error says why there is none.
"""

import json
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa

_BATCH_ROWS: Final = 65_536
#: Error texts are cut to this length, so that they never fill the pipe.
_SAID_CHARACTERS: Final = 4_096


def _bound(more_bytes: int) -> None:
    """Limit this process's memory to its present size plus ``more_bytes``.

    Functions allocate memory outside DuckDB's limit.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return  # not Linux: only DuckDB's own limit applies
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmData"))
    limit = int(line.split()[1]) * 1024 + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _take(connection: duckdb.DuckDBPyConnection, given: dict[str, Any], *, source: Any) -> None:
    """Create and fill the tables from the streams, then run the final statements."""
    for create, fill in given["tables"]:
        connection.execute(create)
        connection.register("incoming", pa.ipc.open_stream(source))
        connection.execute(fill)
        connection.unregister("incoming")
    for statement in given["after"]:
        connection.execute(statement)


def _end_with_the_broker() -> None:
    os.read(0, 1)
    os._exit(1)


def _run() -> None:
    pa.set_memory_pool(pa.system_memory_pool())
    source = pa.PythonFile(sys.stdin.buffer, mode="r")
    given = json.loads(sys.stdin.buffer.readline())
    _bound(given["memory_bytes"])
    config: dict[str, Any] = given["config"]
    connection = duckdb.connect(config=config)
    _take(connection, given, source=source)
    connection.execute(given["lock"])
    threading.Thread(target=_end_with_the_broker, daemon=True).start()
    reader = connection.sql(given["query"]).to_arrow_reader(_BATCH_ROWS)
    answer = pa.ipc.new_stream(sys.stdout.buffer, reader.schema)
    for batch in reader:
        answer.write_batch(batch)
    answer.close()  # only after success: a stream without its end marker is not accepted
    sys.stdout.buffer.flush()


def _is_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | duckdb.OutOfMemoryException) or any(
        sign in str(error) for sign in ("bad_alloc", "malloc", "allocat", "pin block")
    )


def main() -> None:
    """Run the query that is on standard input."""
    try:
        _run()
    except BaseException as error:  # noqa: BLE001 - the broker tells the caller
        said = {"memory": _is_memory(error), "text": str(error)[:_SAID_CHARACTERS]}
        os.write(2, json.dumps(said).encode())
        os._exit(2)
    os._exit(0)


if __name__ == "__main__":
    main()
