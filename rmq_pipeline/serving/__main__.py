"""Entry point that ``flight.process.start`` runs: ``python -m rmq_pipeline.serving HOME FLAGS``."""

import contextlib
import json
import sys
from pathlib import Path

from rmq_pipeline import errors, logs
from rmq_pipeline.flight.flags import Listening
from rmq_pipeline.flight.process import HOME_LOCKED
from rmq_pipeline.serving.interpreter import without_pandas


def main() -> int:
    """Serve a home; the second argument has the flags as JSON.

    Returns:
        Exit code: HOME_LOCKED if another process has the home open, 1 on any other refusal.
    """
    try:
        logs.set_up(default="info")
        said = json.loads(sys.argv[2])
        with without_pandas():
            from rmq_pipeline.serving.serve import serve

            serve(Path(sys.argv[1]), listening=Listening(**said.pop("listening")), **said)
    except errors.HomeLockedError as error:
        _tell(error)
        return HOME_LOCKED
    except errors.RocketMQError as error:
        _tell(error)
        return 1


def _tell(error: errors.RocketMQError) -> None:
    # Stderr is a file in the home. If the disk is full or stderr is closed, the exit code alone
    # reports the error.
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(f"{error}\n")


if __name__ == "__main__":
    sys.exit(main())
