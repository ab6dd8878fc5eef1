"""A process with everything imported, which forks those that are to be killed.

A fork is a broker in a moment, where an interpreter with DuckDB and Arrow takes a second to start.
A line of its input is a task: {"serve": home, "flight": address, "grpc": address, "upkeep": who,
"settings": some, "standby": True}, {"victim": arguments}, {"reap": pid} or {"ended": pid}; its
answers are a pid, the status of a process that has ended, or whether it has ended, 1 or 0.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1


class Zygote:
    """The zygote seen from a test."""

    def __init__(self, output: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.zygote", str(output)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **task: object) -> int:
        """The answer to a task."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    def close(self) -> None:
        """End it, and what it has forked and not reaped."""
        self._process.communicate()


def _run(task: dict[str, Any]) -> None:
    from rmq_pipeline.flight import flags
    from rmq_pipeline.serving import serve
    from tests.chaos import victim

    if "serve" in task:
        serve.serve(
            Path(task["serve"]),
            listening=flags.Listening(flight=task["flight"], grpc=task.get("grpc")),
            upkeep=task.get("upkeep", "self"),
            flush="sync",
            settings={**(flags.given() or {}), **task.get("settings", {})},
            standby=task.get("standby", False),
        )
    victim.run(**task["victim"])


def _fork(task: dict[str, Any], output: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        # A run of tests that is killed leaves no brokers behind.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for old, new in ((nothing, 0), (descriptor, 1), (descriptor, 2)):
            os.dup2(old, new)
        _run(task)
    except BaseException:  # noqa: BLE001 - the child has nobody else to tell
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def main() -> None:
    """Fork and reap as asked, until the input ends."""
    import logging

    import rmq_pipeline.rocketmq.grpc_endpoint
    import rmq_pipeline.serving.serve  # noqa: F401 - all forked with it
    import tests.chaos.victim  # noqa: F401 - forked with it

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for line in sys.stdin:
        task = json.loads(line)
        if "reap" in task:
            answer = os.waitstatus_to_exitcode(os.waitpid(task["reap"], 0)[1])
        elif "ended" in task:
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT  # it is left to be reaped
            answer = int(os.waitid(os.P_PID, task["ended"], how) is not None)
        else:
            answer = _fork(task, Path(sys.argv[1]))
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
