"""Two network namespaces with a real, rate-limited link between them. Needs root and iproute2.

Namespaces and devices bear the pid of the test, and are gone afterwards.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

RECEIVER_HOST = "10.213.0.2"


class NotAllowed(Exception):
    """This machine or user may not make namespaces and links; says why."""


class TwoMachines:
    """`prefix("a")` and `prefix("b")` begin commands that run on the one or the other."""

    def __init__(self) -> None:
        self._names = {end: f"edge{end}{os.getpid()}" for end in "ab"}

    def prefix(self, end: str) -> list[str]:
        return ["ip", "netns", "exec", self._names[end]]

    def connect(self, rate: str) -> None:
        """rate: as `tc` writes it."""
        a, b = self._names["a"], self._names["b"]
        for name in (a, b):
            _ip("netns", "add", name)
        _ip("link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
        for end, host in (("a", "10.213.0.1"), ("b", RECEIVER_HOST)):
            name = self._names[end]
            _ip("-n", name, "address", "add", f"{host}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
            limit = ["root", "tbf", "rate", rate, "burst", "32k", "latency", "400ms"]
            _run(*self.prefix(end), "tc", "qdisc", "add", "dev", name, *limit)

    def cut(self, is_cut: bool) -> None:
        name = self._names["a"]
        _ip("-n", name, "link", "set", name, "down" if is_cut else "up")

    def remove(self) -> None:
        for name in self._names.values():
            with suppress(NotAllowed):
                _ip("netns", "delete", name)


@contextmanager
def two_machines(rate: str) -> Iterator[TwoMachines]:
    if os.geteuid() != 0:
        raise NotAllowed("network namespaces need root")
    if not (shutil.which("ip") and shutil.which("tc")):
        raise NotAllowed("there is no `ip` and `tc` (iproute2)")
    machines = TwoMachines()
    try:
        machines.connect(rate)
        yield machines
    finally:
        machines.remove()


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotAllowed(f"`{' '.join(words)}`: {done.stderr.strip()}")
