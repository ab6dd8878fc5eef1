"""A process that ends with the process that started it.

``python -m rmq_pipeline.orchestration.supervised FD MODULE ARGS``: FD is the reading end of a pipe
whose writing end only the supervisor holds. When the supervisor ends, however it ends, the pipe is
closed. This process then ends with its whole process group.
"""

import os
import runpy
import signal
import sys
import threading

GRACE_S = 5.0


def main() -> None:
    """Run a module as ``python -m`` would, with default signal handlers."""
    watched, module = int(sys.argv[1]), sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
    # A shell starts background jobs with SIGINT ignored, and Dagster copies that to SIGTERM.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_supervisor, args=(watched,), daemon=True).start()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with_supervisor(watched: int) -> None:
    os.read(watched, 1)
    os.killpg(os.getpgrp(), signal.SIGTERM)
    threading.Event().wait(GRACE_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
