"""One build of an image by the engine's own builder: what it may use, and what it says. It knows no Dockerfile.

The builder bounds memory, share of CPUs, length of files and open files. Processes it does not bound where a step is
root, whom the kernel does not count: when it says in which container a step runs, that container is bounded here. The
time of the whole is kept here too: a client that goes away ends its build. How large an image may be its maker sees to
(`images.py`).
"""

import json
import re
from collections import deque
from dataclasses import dataclass
from typing import Any

import aiohttp

from areal_agent.errors import SandboxError

CPU_PERIOD_US = 100_000
MAX_SAID_LINES = 50
RUNNING = re.compile(r" ---> Running in ([0-9a-f]{12,64})\n")
SHM_BYTES = 2**26 + 7 * 2**12
"""Of /dev/shm in the containers of a build and in no others: what a step prints names no other container to us."""
READ_AHEAD_BYTES = 4 * 2**20
"""A line of the engine's is a chunk of what a step prints, escaped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildBounds:
    """What one build may use."""

    wall_s: float = 1800.0
    memory_bytes: int = 4 * 2**30  # of each step
    cpus: float = 2.0
    file_bytes: int = 4 * 2**30  # length of each file
    open_files: int = 4096
    processes: int = 4096  # of each step, and of its user if that is not root, also outside
    added_bytes: int = 8 * 2**30  # by which the image may be larger than the images that it builds upon

    def as_asked(self) -> dict[str, str | int]:
        """As the builder reads them."""
        bounds = {"fsize": self.file_bytes, "nofile": self.open_files, "nproc": self.processes, "core": 0}
        ulimits = [{"Name": name, "Soft": value, "Hard": value} for name, value in bounds.items()]
        return {
            "memory": self.memory_bytes,
            "memswap": self.memory_bytes,
            "shmsize": SHM_BYTES,
            "cpuperiod": CPU_PERIOD_US,
            "cpuquota": round(self.cpus * CPU_PERIOD_US),
            "ulimits": json.dumps(ulimits),
        }


async def run_build(socket_path: str, content: bytes, dockerfile: str, name: str, bounds: BuildBounds) -> None:
    """An image of a tar and the Dockerfile in it, without network; SandboxError with what the build said."""
    asked = {"dockerfile": dockerfile, "t": name, "rm": 1, "forcerm": 1, "networkmode": "none", **bounds.as_asked()}
    timeout = aiohttp.ClientTimeout(total=bounds.wall_s)
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(socket_path), timeout=timeout, read_bufsize=READ_AHEAD_BYTES
            ) as session,
            session.post(
                "http://engine/build", params=asked, data=content, headers={"Content-Type": "application/x-tar"}
            ) as response,
        ):
            if not response.ok:
                raise SandboxError(f"the container engine refused the build: {(await response.text()).strip()}")
            await follow(session, response, bounds)
    except TimeoutError:
        raise SandboxError(
            f"the image was not built within {bounds.wall_s:g} s; ask for less, or build it by hand"
        ) from None
    except (aiohttp.ClientError, ValueError) as error:  # the second: it says what is no line of its own
        raise SandboxError(f"the container engine broke the build off: {error}; is dockerd running?") from error


async def follow(session: aiohttp.ClientSession, response: aiohttp.ClientResponse, bounds: BuildBounds) -> None:
    """To the build's end; SandboxError when it failed."""
    said: deque[str] = deque(maxlen=MAX_SAID_LINES)
    async for line in response.content:
        told: dict[str, Any] = json.loads(line)
        said.append(told.get("stream", ""))
        if step := RUNNING.fullmatch(said[-1]):
            await bound_processes(session, f"http://engine/containers/{step[1]}", bounds.processes)
        if "error" in told:
            raise SandboxError(f"the image was not built: {told['error']}; {''.join(said)[-1000:]}")


async def bound_processes(session: aiohttp.ClientSession, container: str, num_processes: int) -> None:
    """Of a step's container, which is about to start; it may have ended already."""
    details = await details_of(session, container)
    if details is None or details["HostConfig"]["ShmSize"] != SHM_BYTES:
        return
    async with session.post(f"{container}/update", json={"PidsLimit": num_processes}) as response:
        refusal = "" if response.ok else (await response.text()).strip()
    if refusal and (details := await details_of(session, container)) and details["State"]["Running"]:
        raise SandboxError(f"the processes of a build could not be bounded: {refusal}")


async def details_of(session: aiohttp.ClientSession, container: str) -> dict[str, Any] | None:
    """None: it is gone."""
    async with session.get(f"{container}/json") as response:
        return await response.json() if response.ok else None
