"""Where the processes of a run are started: `Hosts` finds each a `Host`, which starts it and tells of its death.

    hosts.host_for("engine 1") ─▶ Host ── start(argv) ─▶ Process: pid, died, log tail, kill, aclose

Whoever starts a process starts it again when it dies, by asking for a host anew: no host restarts anything by itself.
"""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from areal_agent.callback import LOOPBACK
from areal_agent.engine.address import Backend, key_of_environment
from areal_agent.errors import ProcessDied
from areal_agent.gateway.auth import new_key
from areal_agent.process import ManagedProcess


class Process(Protocol):
    """One process of a run, wherever it is. Its output is appended to `log_path`, a file of this machine."""

    @property
    def name(self) -> str: ...

    @property
    def log_path(self) -> Path: ...

    @property
    def is_running(self) -> bool: ...

    @property
    def exit_status(self) -> int | None:
        """None while it runs, and when its machine is gone; negative if a signal ended it."""
        ...

    @property
    def pid(self) -> int | None:
        """The process id; None on another machine, where it would mean nothing here."""
        ...

    async def died(self) -> ProcessDied:
        """Wait until it ends by itself, or its machine is gone; return an error with the cause and its last lines."""
        ...

    def log_tail(self, num_lines: int = 12) -> str:
        """Return the last lines of the log, indented."""
        ...

    def kill(self) -> None:
        """End a process that does not answer, at once. `died` returns once it is gone."""
        ...

    async def aclose(self, grace_s: float = 5.0, *, with_session: bool = False) -> None:
        """End it: SIGTERM, then SIGKILL after `grace_s`; `with_session` also ends what it left behind."""
        ...


class Host(Protocol):
    """A machine with room for one process."""

    @property
    def home(self) -> str:
        """The address at which processes on it find this process's machine."""
        ...

    @property
    def address(self) -> str:
        """The address that servers on it bind, and at which the other processes of the run find them."""
        ...

    async def free_port(self) -> int:
        """Return a port of `address` on which nobody listens now."""
        ...

    async def start(
        self, name: str, argv: Sequence[str], *, log_path: Path, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start `argv` with the variables `env` added to its environment."""
        ...


class Hosts(Protocol):
    """The machines of a run."""

    def engine_key(self, backend: Backend) -> str | None:
        """Return the key that engines started on them demand; None: they listen on loopback, and demand none."""
        ...

    @property
    def chooses_gpus(self) -> bool:
        """Whether a process sees only GPUs that were reserved for it; else it has to be told which ones are its own."""
        ...

    async def host_for(self, name: str) -> Host:
        """Return a host with room for the process of that name; wait while there is none. Raises ProcessDied."""
        ...


class LocalHost:
    """This machine, which is always the `Host`, and all the `Hosts`."""

    home = address = LOOPBACK
    chooses_gpus = False

    def __init__(self) -> None:
        self._key = new_key()

    def engine_key(self, backend: Backend) -> str | None:
        """Return the environment's, or one of our own for engines of our own."""
        return key_of_environment() or (self._key if backend == "embedded" else None)

    async def host_for(self, name: str) -> Host:
        return self

    async def free_port(self) -> int:
        with socket.socket() as probe:  # closed again, for no server can use a port that is open
            probe.bind((LOOPBACK, 0))
            return probe.getsockname()[1]

    async def start(
        self, name: str, argv: Sequence[str], *, log_path: Path, env: Mapping[str, str] | None = None
    ) -> Process:
        return await ManagedProcess.start(name, argv, log_path=log_path, env=env)


LOCAL = LocalHost()
