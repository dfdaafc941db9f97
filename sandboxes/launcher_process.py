"""The process of a launcher, as its host watches and kills it: started by it, or forked by a zygote."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from areal_agent.errors import SandboxError


class LauncherProcess(Protocol):
    """What a link needs of it."""

    shares_pids: bool
    """Whether a process has the same number for the launcher as for us."""

    async def wait(self) -> None:
        """Until it has ended."""
        ...

    def kill(self) -> None:
        """Harmless when it has ended."""
        ...


class ChildProcess:
    """A child of this process."""

    shares_pids = True

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._process = process

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def wait(self) -> None:
        await self._process.wait()

    def kill(self) -> None:
        if not self.has_ended:
            self._process.kill()


class ForkedProcess:
    """A process elsewhere, by the descriptor that it sends when it is ready (pidfd_open(2), Linux 5.3)."""

    shares_pids = False

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(descriptor, self._on_end)

    async def wait(self) -> None:
        await asyncio.shield(self._ended)

    def kill(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def _on_end(self) -> None:
        assert self._descriptor is not None
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = None
        self._ended.set_result(None)


def control_sockets(kind: int) -> tuple[socket.socket, socket.socket]:
    """Ours, and that of a launcher or zygote. SandboxError when this process may have no more files open."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    except OSError as error:
        raise SandboxError(f"the sandbox launcher could not be started: {error}") from error
    ours.setblocking(False)
    return ours, theirs


async def start_process(command: Callable[[int], Sequence[str]], kind: int) -> tuple[ChildProcess, socket.socket]:
    """A process of `inner/` and our end of its control socket. `command` takes the descriptor of its own end.

    Raises: SandboxError.
    """
    ours, theirs = control_sockets(kind)
    try:
        process = await asyncio.create_subprocess_exec(
            *command(theirs.fileno()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,  # stderr stays ours: a traceback of the launcher is a bug to be seen
            env={},
            cwd="/",
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )  # fmt: skip
    except BaseException as error:
        ours.close()
        if isinstance(error, OSError):
            raise SandboxError(f"the sandbox launcher could not be started: {error}") from error
        raise
    finally:
        theirs.close()
    return ChildProcess(process), ours
