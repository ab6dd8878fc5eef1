"""A Spark cluster on this machine: a master, and two workers that seem to be on hosts of their own.

Spark tries a task again on a cluster only, and begins a copy of a slow one on another host only.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import pyspark

from tests.conftest import Eventually

ROOT: Final = Path(__file__).parents[2]
_CLASS: Final = Path(pyspark.__file__).parent / "bin" / "spark-class"
#: For JVMs that live for a minute: a better compiler would cost more than it saves. They map the
#: classes of Spark if the drivers do (tests/conftest.py).
_SHORT_LIVED: Final = " ".join(
    ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", os.environ.get("SPARK_SUBMIT_OPTS", "")]
).strip()
_ENDS_S: Final = 20
#: All of 127.0.0.0/8 is this machine.
_HOSTS: Final = ("127.0.0.2", "127.0.0.3")


class Cluster:
    """A context manager; ``master`` is its address.

    Args:
        folder: of its logs and its workers' files.
        address: of the master.
        workers: the address of each, and the command that runs others on its host.
    """

    def __init__(
        self,
        folder: Path,
        *,
        address: str,
        workers: Mapping[str, Sequence[str]] = dict.fromkeys(_HOSTS, ()),
    ) -> None:
        self._folder = folder
        self._workers = workers
        self.master = f"spark://{address}"
        self._host, _, self._port = address.partition(":")
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        self._start("master", "Master", host=self._host, more=["--port", self._port])
        for host, run in self._workers.items():
            where = ["--work-dir", str(self._folder / host), "--cores", "1", "--memory", "1g"]
            self._start(host, "Worker", host=host, more=[*where, self.master], run=run)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait(self, eventually: Eventually) -> None:
        """Return once both workers are known to the master."""
        log = self._folder / "master.log"

        def are_known() -> bool:  # one that had no answer in time registers again
            return len(set(re.findall(r"Registering worker (\S+)", log.read_text()))) == 2

        eventually(are_known, within_s=120, what=self._logs)

    def _logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(f"{log}: {log.read_text()[-2000:]}" for log in self._folder.glob("*.log"))

    def settings(self) -> dict[str, str]:
        """For a session on the cluster, whose workers find our modules."""
        return {
            "spark.master": self.master,
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.executor.extraJavaOptions": _SHORT_LIVED,
            "spark.executorEnv.PYTHONPATH": str(ROOT),
            "spark.executorEnv.PYSPARK_PYTHON": sys.executable,
        }

    def _start(
        self, name: str, what: str, *, host: str, more: list[str], run: Sequence[str] = ()
    ) -> None:
        log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
        java = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": _SHORT_LIVED}
        process = subprocess.Popen(
            [
                *run,
                str(_CLASS),
                f"org.apache.spark.deploy.{what.lower()}.{what}",
                *("--host", host, "--webui-port", "0", *more),
            ],
            stdout=log,
            stderr=log,
            env={**os.environ, **java, "SPARK_LOCAL_IP": host, "PYTHONPATH": str(ROOT)},
        )
        self._stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_ENDS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run_windows(environment: Mapping[str, str] | None = None, **how: Any) -> list[dict[str, Any]]:
    """Windows in a process of its own (window_process), with these variables; their reports."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.window_process", json.dumps(how)],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
