"""`Sandbox`: a cell of any backend in its caller's hands.

It adds what is the same for all backends: the environment, files and set-up of its spec, sessions, the packing of
folders, and the pool's slots. A program that runs to its end first waits for a slot; its time starts once it has one.
The cell is taken from the pool when it is first needed.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from areal_agent.errors import SandboxError
from sandboxes.cell import Archives, Cell, Process
from sandboxes.folder import entries_in, entries_of, pack
from sandboxes.gateway import expose_gateway
from sandboxes.sessions import SESSION_SOURCE, PythonSession, ShellSession
from sandboxes.spec import CellSpec, ExecResult, Limits, Program, SandboxSpec, relative_parts

MAX_DOWNLOAD_BYTES = 64 * 2**20
IN_SILENCE = ("sh", "-c", 'exec "$@" < /dev/null > /dev/null 2>&1', "sh")
READY_PAUSE_S = 0.2
SANDBOX_FAILED = "sandbox_failed"


class Session(Protocol):
    """What is needed of a rollout."""

    base_url: str
    api_key: str


class Sandbox:
    """A working directory in which any number of programs run at once. `close` removes it.

    Cancelling a call kills its program. A file that is missing, is a link or is too long raises OSError; a sandbox that
    does not work raises SandboxError.
    """

    def __init__(
        self,
        take_cell: Callable[[CellSpec], Awaitable[Cell]],
        spec: SandboxSpec,
        default_limits: Limits,
        slots: asyncio.Semaphore,
        counts: Counter[str],
    ) -> None:
        self._take_cell = take_cell
        self._spec = spec
        self._cell_spec = spec.cell(default_limits)
        self._slots = slots
        self._counts = counts  # of the pool: programs by status, and `SANDBOX_FAILED`
        self._taking = asyncio.Lock()
        self._cell: Cell | None = None
        self._is_closed = False

    @property
    def limits(self) -> Limits:
        """The limits of a call that names none."""
        return self._cell_spec.limits

    async def prepare(self) -> None:
        """Write the spec's files, run its set-up and start its service, before the pool hands the sandbox out."""
        for path, data in self._spec.files.items():
            await self.write(path, data)
        for command in self._spec.setup:
            limits = replace(self.limits, wall_s=self._spec.setup_wall_s, cpu_s=None)
            result = await self.exec(["sh", "-c", command], limits=limits)
            if not result.is_ok:
                said = (result.stderr or result.stdout).decode(errors="replace")[-500:]
                raise SandboxError(f"setup command {command!r} ended as {result.status.value}: {said}")
        if self._spec.startup:
            await self.spawn([*IN_SILENCE, *self._spec.startup])
        if self._spec.ready is not None:
            await self._wait_until_ready(self._spec.ready, self._spec.ready_wall_s)

    async def _wait_until_ready(self, command: str, wall_s: float) -> None:
        said = "it did not end"
        limits = replace(self.limits, wall_s=wall_s, cpu_s=None)
        try:
            async with asyncio.timeout(wall_s):
                while not (result := await self.exec(["sh", "-c", command], limits=limits)).is_ok:
                    said = (result.stderr or result.stdout).decode(errors="replace")[-500:]
                    await asyncio.sleep(READY_PAUSE_S)
        except TimeoutError:
            raise SandboxError(f"the sandbox was not ready within {wall_s:g} s by {command!r}: {said}") from None

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        """Run a program to its end; `cwd` is relative to the working directory.

        An `argv[0]` that cannot be run ends as in a shell: exit code 127 or 126, the reason on stderr.
        """
        return await self._run(self._executable(argv, env, cwd), stdin, limits)

    async def exec_python(self, source: str, *, stdin: bytes = b"", limits: Limits | None = None) -> ExecResult:
        """Run Python source as `__main__`, in a process of its own, to its end."""
        return await self._run(self._python(source), stdin, limits)

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> Process:
        """Start a program and talk with it while it runs; `kill` or the sandbox's `close` ends it.

        Without `limits` its time is not bounded. It takes no slot of the pool, since it may idle.
        """
        return await self._spawn(self._executable(argv, env, cwd), limits)

    async def spawn_python(self, source: str, *, limits: Limits | None = None) -> Process:
        """Start Python source as `__main__`, like `spawn`."""
        return await self._spawn(self._python(source), limits)

    def shell(self) -> ShellSession:
        """Return a session of bash commands that share variables, functions and the current folder."""
        return ShellSession(self.exec)

    def python(self, *, limits: Limits | None = None) -> PythonSession:
        """Return a session of Python programs that share one interpreter."""
        return PythonSession(self._start_interpreter, self._check_open, limits or self.limits, self._slots)

    async def read(self, path: str) -> bytes:
        """Return the bytes of a regular file in the working directory, of at most `Limits.file_bytes`."""
        return await (await self._live_cell()).read(path)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file in the working directory, in place of whatever is there, and make its parent folders."""
        if not isinstance(data, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
            raise ValueError(f"the data for {path!r} is {data!r:.100}; give bytes, for example text.encode()")
        await (await self._live_cell()).write(path, data)

    async def upload(self, source: bytes | Path, path: str = ".") -> None:
        """Copy a host folder, or unpack a tar, into a folder of the sandbox; ValueError for links and the like."""
        read = partial(entries_of, source) if isinstance(source, bytes) else partial(entries_in, source)
        entries = await asyncio.to_thread(read)
        await (await self._live_cell()).upload(entries, path)

    async def download(self, path: str = ".", *, max_bytes: int = MAX_DOWNLOAD_BYTES) -> bytes:
        """Return a tar of a folder of the sandbox: its files and folders; OSError above `max_bytes`."""
        entries = await (await self._live_cell()).download(path, max_bytes)
        return await asyncio.to_thread(pack, entries)

    async def archives(self) -> Archives:
        """Return the way to any path of this sandbox, in and out; SandboxError if its image cannot be written to."""
        cell = await self._live_cell()
        if cell.archives is None:
            raise SandboxError("only a container with SandboxSpec.is_writable has paths beyond its working directory")
        return cell.archives

    async def expose_gateway(self, rollout: Session) -> str:
        """Return the base URL at which programs reach this rollout's session of the gateway, whatever the network.

        It is a port of the sandbox's loopback. Any key will do: requests bear the session's own. Nothing but paths
        below `/v1/` can be asked for. (Anthropic's clients take it without `/v1`.)
        """
        return await expose_gateway(await self._live_cell(), rollout.base_url, rollout.api_key)

    async def health(self) -> bool:
        """Return whether the sandbox runs programs."""
        try:
            await self.exec(["true"])  # any result at all is a yes
        except SandboxError:
            return False
        return True

    async def close(self) -> None:
        """Kill what runs in the sandbox and remove its files. Harmless when it is closed already."""
        self._is_closed = True
        async with self._taking:
            if self._cell is not None:
                await self._cell.close()

    def _executable(self, argv: Sequence[str], env: Mapping[str, str] | None, cwd: str | None) -> Program:
        if isinstance(argv, str):
            raise ValueError(f"argv is {argv!r}; give the program and its arguments as a list of strings")
        if cwd not in (None, "."):
            relative_parts(cwd)
        return Program(argv=tuple(argv), env={**self._spec.env, **(env or {})}, cwd=cwd or ".")

    def _python(self, source: str) -> Program:
        if not isinstance(source, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
            raise ValueError(f"source is {source!r:.100}; give Python source as text")
        return Program(source=source, env=self._spec.env)

    async def _run(self, program: Program, stdin: bytes, limits: Limits | None) -> ExecResult:
        async with self._slots:
            self._check_open()
            try:
                result = await (await self._live_cell()).exec(program, stdin=stdin, limits=limits or self.limits)
            except SandboxError:
                self._counts[SANDBOX_FAILED] += not self._is_closed
                raise
        self._counts[result.status] += 1
        return result

    async def _spawn(self, program: Program, limits: Limits | None) -> Process:
        cell = await self._live_cell()
        return await cell.spawn(program, limits=limits or self.limits, is_timed=limits is not None)

    async def _start_interpreter(self, limits: Limits) -> Process:
        """Start a session's interpreter. It has no deadline; its runs have."""
        return await (await self._live_cell()).spawn(self._python(SESSION_SOURCE), limits=limits, is_timed=False)

    async def _live_cell(self) -> Cell:
        async with self._taking:
            self._check_open()
            if self._cell is None:
                self._cell = await self._take_cell(self._cell_spec)
            if self._is_closed:  # closed meanwhile, by a caller that was cancelled while it waited for the lock
                await self._cell.close()
            self._check_open()
            return self._cell

    def _check_open(self) -> None:
        if self._is_closed:
            raise SandboxError("the sandbox is closed; acquire another")
