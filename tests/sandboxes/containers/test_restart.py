"""A daemon that goes away and comes back, played by a door before the real one that is closed and opened.

1. what was in stock is not handed out, what ran fails, and a sandbox that is asked for meanwhile comes when it is back.
"""

import asyncio
import contextlib
from pathlib import Path

import pytest

from areal_agent.errors import SandboxError
from sandboxes import open_pool
from sandboxes.containers.engine import Engine

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Door:
    """A socket that leads to the engine's while it is open."""

    def __init__(self, path: Path, target: str) -> None:
        self.path = path
        self._target = target
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._carry, self.path)

    def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.path.unlink(missing_ok=True)
        for end in self._ends:
            end.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_unix_connection(self._target)
        self._ends |= {writer, there_writer}
        await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer))
        self._ends -= {writer, there_writer}


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_pool_survives_a_restart_of_the_daemon(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = Door(tmp_path / "engine.sock", engine.socket_path)
    await door.open()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{door.path}")
    async with open_pool(backend="docker", wall_s=60.0) as pool:
        await pool.warm(num_cells=1)
        async with pool.acquire() as box:
            call = asyncio.create_task(box.exec(["sleep", "1000"]))
            assert (await box.exec(["true"])).is_ok
            door.close()
            with pytest.raises(SandboxError, match="gone"):
                await call

        async def use_another() -> bytes:
            async with pool.acquire() as box:
                return (await box.exec(["echo", "back"])).stdout

        asked = asyncio.create_task(use_another())
        await door.open()
        assert await asked == b"back\n"
    door.close()
