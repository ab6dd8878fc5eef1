"""What ``flight.process.start`` runs: ``python -m rmq_pipeline.serving HOME FLAGS``."""

import contextlib
import json
import logging
import sys
from pathlib import Path

from rmq_pipeline import errors
from rmq_pipeline.flight.flags import Listening
from rmq_pipeline.flight.process import HOME_LOCKED
from rmq_pipeline.serving.serve import serve


def main() -> int:
    """Serve a home, with its flags as JSON."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        said = json.loads(sys.argv[2])
        serve(Path(sys.argv[1]), listening=Listening(**said.pop("listening")), **said)
    except errors.HomeLockedError as error:
        _tell(error)
        return HOME_LOCKED
    except errors.RocketMQError as error:
        _tell(error)
        return 1


def _tell(error: errors.RocketMQError) -> None:
    # It goes to a file of the home: on a full disk the exit code still says what happened, and so
    # it does where stderr is closed.
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(f"{error}\n")


if __name__ == "__main__":
    sys.exit(main())
