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
    """The machines `NAMES`. The thread that opened them is on the head."""

    def on(self, name: str) -> Sequence[str]:
        """Return the words that begin a command line which runs on that machine."""
        return ["ip", "netns", "exec", _space(name)]

    def process_ids(self, name: str) -> set[int]:
        return {int(word) for word in _ip("netns", "pids", _space(name)).split()}

    def pull(self, name: str) -> None:
        """Pull its cable out of the switch."""
        _ip("-n", _space(SWITCH), "link", "set", name, "down")

    def plug(self, name: str) -> None:
        """Plug it in again."""
        _ip("-n", _space(SWITCH), "link", "set", name, "up")

    @contextmanager
    def entered(self, name: str) -> Generator[None]:
        """Move this thread to a machine, and back; threads and processes that it starts meanwhile are there, too."""
        with Path("/proc/thread-self/ns/net").open() as here, Path("/run/netns", _space(name)).open() as there:
            _move_to(there.fileno())
            try:
                yield
            finally:
                _move_to(here.fileno())


@contextmanager
def laid_cables() -> Generator[Cables]:
    """Make the machines, and enter the head. Skips the test where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        _lay()
        with (cables := Cables()).entered(HEAD):
            yield cables
    finally:
        for name in (SWITCH, *NAMES):
            subprocess.run(["ip", "netns", "del", _space(name)], check=False, capture_output=True)


def _lay() -> None:
    try:
        for name in (SWITCH, *NAMES):
            _ip("netns", "add", _space(name))
            _ip("-n", _space(name), "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine has no network namespaces: {error.stderr}")
    _ip("-n", _space(SWITCH), "link", "add", SWITCH, "up", "type", "bridge")
    for name in NAMES:
        _ip("-n", _space(SWITCH), "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", _space(name))
        _ip("-n", _space(SWITCH), "link", "set", name, "master", SWITCH, "up")
        _ip("-n", _space(name), "addr", "add", f"{address_of(name)}/24", "dev", "eth0")
        _ip("-n", _space(name), "link", "set", "eth0", "up")
        _ip("-n", _space(name), "route", "add", "default", "dev", "eth0")


def _space(name: str) -> str:
    return f"areal{os.getpid()}-{name}"


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def _move_to(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")
