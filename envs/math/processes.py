"""Processes that answer questions whose evaluation may hang, take all memory, or kill the process.

async with open_processes(Path("verifier.py"), cpu_s=5.0) as processes:
    await processes.ask("1/2", "0.5")  # the line of JSON that the file's `answer("1/2", "0.5")` gives; b"" if it died
"""

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from areal_agent.errors import SandboxError

SERVED = Path(__file__).with_name("served.py")
MEMORY_BYTES = 2 * 2**30
WALL_S = 120.0
"""A process that is silent for so long is taken for dead, however busy the machine is."""
NUM_PROCESSES = 4


@asynccontextmanager
async def open_processes(file: Path, cpu_s: float) -> AsyncGenerator["Processes"]:
    """Open processes that run the file; leaving ends them."""
    processes = Processes(file, cpu_s)
    try:
        yield processes
    finally:
        while processes.idle:
            await end(processes.idle.pop())


class Processes:
    """A few processes: one is started when it is needed, and replaced when something ends it."""

    def __init__(self, file: Path, cpu_s: float) -> None:
        self._command = (sys.executable, "-P", str(SERVED), str(file), str(MEMORY_BYTES), str(cpu_s))
        self._slots = asyncio.Semaphore(NUM_PROCESSES)
        self.idle: list[Process] = []  # ready for the next question
        self.num_killed = 0  # processes that a question has ended

    async def ask(self, *arguments: str | None) -> bytes:
        """Return the line of a process; nothing when the question has ended it.

        Raises SandboxError when no process can be started.
        """
        async with self._slots:
            while self.idle and self.idle[-1].returncode is not None:
                self.idle.pop()  # it died between two questions, of which neither is to blame
            process = self.idle.pop() if self.idle else await self._start()
            line = b""
            try:
                line = await ask(process, arguments)
            finally:
                if line:
                    self.idle.append(process)
                else:
                    await end(process)
        self.num_killed += not line
        return line

    async def _start(self) -> Process:
        """Start a process and wait until it is ready."""
        process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        try:
            line = await reply_of(process)
        except BaseException:
            await end(process)
            raise
        if line != b"ready\n":
            await end(process)
            raise SandboxError(f"the process does not start: run {' '.join(self._command)} to see why")
        return process


async def ask(process: Process, arguments: tuple[str | None, ...]) -> bytes:
    """Return the process's line; nothing when it has died."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(arguments).encode() + b"\n")
    with suppress(ConnectionError):
        await process.stdin.drain()
        return await reply_of(process)
    return b""


async def reply_of(process: Process) -> bytes:
    assert process.stdout is not None
    with suppress(TimeoutError):
        return await asyncio.wait_for(process.stdout.readline(), WALL_S)
    return b""


async def end(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
