"""Machines in network namespaces of this one, whose cables can be pulled. Needs root and `ip` (Debian's iproute2).

head   n1   n2        each with 10.0.0.N on its own end of a cable
  \\    |    /
    switch            in a namespace of its own: Docker's rules for forwarded packets would drop ours
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000
SWITCH, HEAD = "switch", "head"
NAMES = (HEAD, "n1", "n2")


def address_of(name: str) -> str:
    return f"10.0.0.{NAMES.index(name) + 1}"


class Cables:
    """The machines `NAMES`; the thread that opened them is on the head."""

    def __init__(self) -> None:
        self._mark = f"areal{os.getpid()}"

    def on(self, name: str) -> Sequence[str]:
        """Return the words that begin a command line which runs on that machine."""
        return ["ip", "netns", "exec", self._space(name)]

    def process_ids(self, name: str) -> set[int]:
        """Return the ids of all processes of that machine."""
        return {int(word) for word in self._ip("netns", "pids", self._space(name)).split()}

    def pull(self, name: str) -> None:
        """Pull its cable out of the switch."""
        self._at_switch("link", "set", name, "down")

    def plug(self, name: str) -> None:
        """Plug it in again."""
        self._at_switch("link", "set", name, "up")

    def lay(self) -> None:
        """Make the machines, and the switch between them."""
        for name in (SWITCH, *NAMES):
            self._ip("netns", "add", self._space(name))
            self._ip("-n", self._space(name), "link", "set", "lo", "up")
        self._at_switch("link", "add", SWITCH, "up", "type", "bridge")
        for name in NAMES:
            space = self._space(name)
            self._at_switch("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._at_switch("link", "set", name, "master", SWITCH, "up")
            self._ip("-n", space, "addr", "add", f"{address_of(name)}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "eth0", "up")
            self._ip("-n", space, "route", "add", "default", "dev", "eth0")

    def remove(self) -> None:
        """Remove all of it; harmless where a part was not made."""
        for name in (SWITCH, *NAMES):
            subprocess.run(["ip", "netns", "del", self._space(name)], check=False, capture_output=True)

    @contextmanager
    def entered(self, name: str) -> Generator[None]:
        """Move this thread to a machine, and back; threads and processes that it starts meanwhile are there, too."""
        with Path("/proc/thread-self/ns/net").open() as here, Path("/run/netns", self._space(name)).open() as there:
            _set_namespace(there.fileno())
            try:
                yield
            finally:
                _set_namespace(here.fileno())

    def _space(self, name: str) -> str:
        return f"{self._mark}-{name}"

    def _at_switch(self, *words: str) -> None:
        self._ip("-n", self._space(SWITCH), *words)

    def _ip(self, *words: str) -> str:
        return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def _set_namespace(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")


@contextmanager
def laid_cables() -> Generator[Cables]:
    """Make the machines, with this thread on the head. Skips the test where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    cables = Cables()
    try:
        try:
            cables.lay()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine has no network namespaces: {error.stderr}")
        with cables.entered(HEAD):
            yield cables
    finally:
        cables.remove()
