"""The host's end of a container's way to the network: each connection of a program becomes one of the proxy's.

The container sends bytes of numbered connections; the proxy (`proxy.py`) decides where each may lead.
"""

import asyncio
import contextlib
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from areal_agent.errors import SandboxError
from sandboxes.agent.tunnel import CHUNK_BYTES, DATA, END, FRAME, GONE, MAX_CONNECTIONS, OPEN, TAKEN
from sandboxes.agent.wire import whole_frames
from sandboxes.cell import Process
from sandboxes.proxy import FilteringProxy
from sandboxes.spec import Network

TUNNEL_SOURCE = Path(__file__).parents[1].joinpath("agent", "tunnel.py").read_text()
AHEAD_BYTES = 256 * 1024
"""The most that one connection is sent before its program has taken any of it."""
READY_TIMEOUT_S = 30.0


@dataclass(eq=False)
class Connection:
    """One connection of a program: the host's end of a socket pair whose other end the proxy has."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    num_ahead: int = 0
    has_room: asyncio.Event = field(default_factory=asyncio.Event)
    pump: asyncio.Task[None] | None = None


class NetworkTunnel:
    """A container's tunnel. Make it with `start`, end it with `aclose`; it ends with its process in the container."""

    def __init__(self, process: Process, network: Network) -> None:
        self._process = process
        self._proxy = FilteringProxy(network)
        self._connections: dict[int, Connection] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve())

    @classmethod
    async def start(cls, process: Process, network: Network) -> Self:
        tunnel = cls(process, network)
        started = [tunnel._ready, tunnel._task]
        await asyncio.wait(started, timeout=READY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not tunnel._ready.done():
            await tunnel.aclose()
            raise SandboxError("the way to the network could not be opened in a container")
        return tunnel

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for connection in self._connections.values():
            self._end(connection)
        self._connections.clear()
        await self._proxy.aclose()

    async def _serve(self) -> None:
        """Read frames from the container until it ends, or sends what our tunnel would not."""
        received = bytearray()
        with contextlib.suppress(ValueError):
            async for chunk in self._process.stdout:
                received += chunk
                for frame in whole_frames(received, CHUNK_BYTES):
                    await self._on_frame(*frame)

    async def _on_frame(self, kind: int, number: int, body: bytes) -> None:
        connection = self._connections.get(number)
        if kind == OPEN and number == 0:
            if not self._ready.done():
                self._ready.set_result(None)
        elif kind == OPEN and connection is None and len(self._connections) < MAX_CONNECTIONS:
            await self._open(number)
        elif connection is None:
            return
        elif kind == DATA:
            connection.writer.write(body)
            with contextlib.suppress(ConnectionError):
                await connection.writer.drain()
        elif kind == END:
            if connection.writer.can_write_eof() and not connection.writer.is_closing():
                connection.writer.write_eof()
        elif kind == GONE:
            self._end(self._connections.pop(number))
        elif kind == TAKEN:
            connection.num_ahead = max(0, connection.num_ahead - int(body))
            connection.has_room.set()

    async def _open(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        connection = Connection(*await asyncio.open_connection(sock=ours))
        self._proxy.take(*await asyncio.open_connection(sock=theirs))
        self._connections[number] = connection
        connection.pump = asyncio.create_task(self._pump(number, connection))

    async def _pump(self, number: int, connection: Connection) -> None:
        """Send what the proxy answers, as fast as the program takes it."""
        with contextlib.suppress(OSError, SandboxError):
            while data := await connection.reader.read(CHUNK_BYTES):
                connection.num_ahead += len(data)
                await self._process.write(FRAME.pack(DATA, number, len(data)) + data)
                while connection.num_ahead > AHEAD_BYTES:
                    connection.has_room.clear()
                    await connection.has_room.wait()
            await self._process.write(FRAME.pack(END, number, 0))
        self._connections.pop(number, None)
        connection.writer.close()

    def _end(self, connection: Connection) -> None:
        if connection.pump is not None:
            connection.pump.cancel()
        connection.writer.close()
