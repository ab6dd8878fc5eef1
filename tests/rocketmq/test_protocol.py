"""The stubs come from the official client, and nothing else of it."""

import subprocess
import sys
from pathlib import Path


def run(code: str, home: Path) -> str:
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_client_is_not_executed(tmp_path: Path) -> None:
    code = "import sys; from rmq_pipeline.rocketmq import protocol; "
    code += "print('rocketmq' in sys.modules, 'opentelemetry' in sys.modules)"

    assert run(code, tmp_path) == "False False\n"
    assert list(tmp_path.iterdir()) == []


def test_the_client_may_be_imported_in_the_same_process(tmp_path: Path) -> None:
    code = "from rmq_pipeline.rocketmq import protocol; import rocketmq; "
    code += "from rocketmq.grpc_protocol import Code; print(Code is protocol.Code)"

    assert run(code, tmp_path) == "True\n"
    turned = "import rocketmq; from rmq_pipeline.rocketmq import protocol; "
    turned += "from rocketmq.grpc_protocol import Code; print(Code is protocol.Code)"
    assert run(turned, tmp_path) == "True\n"
