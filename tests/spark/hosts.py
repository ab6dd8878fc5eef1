"""Hosts of their own on this machine: network namespaces that do not see a folder.

Only root may make them. Spark's workers in them share nothing with the driver but the network, and
the files outside that folder.
"""

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

#: Of the bridge to all hosts; on no other network here.
_NET: Final = "10.198.77"


def can_be_made() -> bool:
    """Whether this process may make network namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


class Hosts:
    """A context manager: a network of two hosts and this machine.

    Args:
        hidden: a folder that the hosts see empty.
    """

    def __init__(self, hidden: Path) -> None:
        self._hidden = hidden
        self._bridge = f"rmq{os.getpid()}"
        self._stack = ExitStack()
        #: The address of this machine for them.
        self.here = f"{_NET}.1"
        #: The address of each host, and the command that runs others on it.
        self.commands: dict[str, list[str]] = {}

    def __enter__(self) -> Self:
        try:
            self._link("add", self._bridge, "type", "bridge")
            self._stack.callback(self._link, "del", self._bridge)
            _ip("addr", "add", f"{self.here}/24", "dev", self._bridge)
            self._link("set", self._bridge, "up")
            for number in (2, 3):
                self._add(number)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _add(self, number: int) -> None:
        host, name = f"{_NET}.{number}", f"{self._bridge}-{number}"
        inner = f"in{os.getpid()}-{number}"
        _ip("netns", "add", name)
        self._stack.callback(_ip, "netns", "del", name)
        self._link("add", name, "type", "veth", "peer", "name", inner)
        self._stack.callback(subprocess.run, ["ip", "link", "del", name], check=False)
        self._link("set", name, "master", self._bridge, "up")
        self._link("set", inner, "netns", name)
        within = ["ip", "netns", "exec", name]
        for command in (
            f"ip addr add {host}/24 dev {inner}",
            f"ip link set {inner} up",
            "ip link set lo up",
            f"ip route add default via {self.here}",
        ):
            subprocess.run([*within, *command.split()], check=True)
        # The command has mounts of its own: `ip netns exec` makes their namespace.
        hide = 'mount -t tmpfs none "$0" && exec "$@"'
        self.commands[host] = [*within, "sh", "-c", hide, str(self._hidden)]

    def _link(self, *words: str) -> None:
        _ip("link", *words)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
