"""Two hosts on one machine: network namespaces that reach each other through a switch, and a link that can fail.

host a (10.77.N.1) ──┐
                     ├── switch
host b (10.77.N.2) ──┘     cut: b's cable is pulled, its system knows          drop: the switch forwards nothing, nobody knows
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


class TwoHosts:
    """Namespaces of this process's own. Make it with `two_hosts`."""

    def __init__(self) -> None:
        tag = f"rl{os.getpid() % 100_000}"
        self.a, self.b, self._switch = f"{tag}a", f"{tag}b", f"{tag}s"
        self.address_a, self.address_b = (f"10.77.{os.getpid() % 250}.{host}" for host in (1, 2))
        self._ports = {self.a: f"{tag}pa", self.b: f"{tag}pb"}

    def build(self) -> None:
        """Raises CalledProcessError where this user may not, or the system has no namespaces."""
        _ip("link", "add", self._switch, "type", "bridge")
        _ip("link", "set", self._switch, "up")
        for host, address in ((self.a, self.address_a), (self.b, self.address_b)):
            port = self._ports[host]
            _ip("netns", "add", host)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
            _ip("link", "set", port, "master", self._switch, "up")
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("-n", host, "link", "set", "lo", "up")

    def remove(self) -> None:
        for host, port in self._ports.items():
            _ip("link", "del", port, check=False)
            _ip("netns", "del", host, check=False)
        _ip("link", "del", self._switch, check=False)

    @contextmanager
    def failing(self, how: str) -> Iterator[None]:
        """Inside the block nothing gets from one host to the other."""
        if how == "cut":
            _ip("-n", self.b, "link", "set", "eth0", "down")
        else:
            _ip("link", "set", self._ports[self.b], "nomaster")
        try:
            yield
        finally:
            if how == "cut":
                _ip("-n", self.b, "link", "set", "eth0", "up")
            else:
                _ip("link", "set", self._ports[self.b], "master", self._switch)


@contextmanager
def two_hosts() -> Iterator[TwoHosts | None]:
    """Two hosts, gone when the block ends; None where this machine does not permit it."""
    hosts = TwoHosts()
    try:
        hosts.build()
    except (OSError, subprocess.CalledProcessError):
        hosts.remove()
        yield None
        return
    try:
        yield hosts
    finally:
        hosts.remove()


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=check)
