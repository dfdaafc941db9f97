"""The host's end of the zygotes, which fork jails: one for each kind of jail. It knows no sandbox."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from typing import Self

from areal_agent.errors import SandboxError
from sandboxes.inner.processes import children_of
from sandboxes.inner.wire import REPORT, ReportKind
from sandboxes.jail import Jail, JailKind
from sandboxes.launcher_process import ChildProcess, control_sockets, start_process
from sandboxes.link import START_TIMEOUT_S, STOP_TIMEOUT_S, LauncherLink, LauncherTimeoutError

MAX_ZYGOTES = 8
"""Each takes some 10 MB. One more, and the one that was asked longest ago ends, if no jail of it lives."""
FULL_PAUSE_S = 0.01


class Zygote:
    """Make it with `start`, end it with `aclose`, and with it all jails that it forked."""

    def __init__(self, process: ChildProcess, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._links: set[LauncherLink] = set()
        self._num_forking = 0
        self.is_stuck = False

    @classmethod
    async def start(cls, kind: JailKind) -> Self:
        """SandboxError where the walls cannot be built."""
        process, control = await start_process(kind.command, socket.SOCK_SEQPACKET)
        zygote = cls(process, control)
        try:
            await asyncio.wait_for(zygote._hello(), START_TIMEOUT_S)
        except BaseException as error:
            await zygote.aclose()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"the walls of the jail were not built within {START_TIMEOUT_S:g} s") from None
            raise
        return zygote

    @property
    def is_dead(self) -> bool:
        return self._process.has_ended

    @property
    def has_jails(self) -> bool:
        return self._num_forking > 0 or any(link.is_alive for link in self._links)

    async def fork(self, jail: Jail) -> LauncherLink:
        """The launcher of a new jail; SandboxError when there cannot be one."""
        self._num_forking += 1
        try:
            link = await self._fork(jail)
        except LauncherTimeoutError:
            self.is_stuck = True
            raise
        finally:
            self._num_forking -= 1
        self._links = {link, *(link for link in self._links if link.is_alive)}
        return link

    async def _fork(self, jail: Jail) -> LauncherLink:
        ours, theirs = control_sockets(socket.SOCK_STREAM)
        try:
            await self._send(json.dumps(jail.particulars).encode(), theirs.fileno())
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise SandboxError(f"the process that starts jails has died: {error}; try again") from error
            raise
        finally:
            theirs.close()
        return await LauncherLink.follow(ours)

    async def aclose(self) -> None:
        self._control.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            for child in children_of(self._process.pid):  # the first process behind the walls
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            self._process.kill()
            await self._process.wait()

    async def _hello(self) -> None:
        data = await asyncio.get_running_loop().sock_recv(self._control, REPORT.size)
        if not data:
            raise SandboxError("the sandbox launcher died before it was ready")
        kind, _, value, _, _ = REPORT.unpack(data)
        if kind == ReportKind.FAILED:
            raise SandboxError(f"the jail could not be built: {os.strerror(value)}")

    async def _send(self, frame: bytes, descriptor: int) -> None:
        while True:
            try:
                socket.send_fds(self._control, [frame], [descriptor])
            except BlockingIOError:  # hundreds wait already
                await asyncio.sleep(FULL_PAUSE_S)
            else:
                return


class Zygotes:
    """Those of one provider. They are started when a jail of their kind is asked for, and again when they have died."""

    def __init__(self) -> None:
        self._usable: dict[JailKind, Zygote] = {}  # who was asked last comes last
        self._stuck: list[Zygote] = []  # they start no more jails; those that they have may live
        self._starting = asyncio.Lock()

    async def fork(self, jail: Jail) -> LauncherLink:
        """The launcher of a new jail; SandboxError when there cannot be one."""
        return await (await self._of(jail.kind)).fork(jail)

    async def aclose(self) -> None:
        async with self._starting:
            await asyncio.gather(*(zygote.aclose() for zygote in (*self._usable.values(), *self._stuck)))
            self._usable.clear()
            self._stuck.clear()

    async def _of(self, kind: JailKind) -> Zygote:
        async with self._starting:
            zygote = self._usable.pop(kind, None)
            if zygote is not None and zygote.is_dead:
                await zygote.aclose()
                zygote = None
            elif zygote is not None and zygote.is_stuck:
                self._stuck.append(zygote)
                zygote = None
            self._usable[kind] = zygote or await Zygote.start(kind)
            for other in list(self._usable)[: max(0, len(self._usable) - MAX_ZYGOTES)]:
                if not self._usable[other].has_jails:
                    await self._usable.pop(other).aclose()
            return self._usable[kind]
