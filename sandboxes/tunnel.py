"""A tunnel out of a sandbox: connections to a port of its loopback come out here, whatever its network.

Their bytes pass over the one stream that the sandbox has (`agent/tunnel.py` is the inner end), so the sandbox needs no
path, port or address of the host.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from areal_agent.errors import SandboxError
from sandboxes.agent.tunnel import AHEAD_BYTES, CHUNK_BYTES, DATA, END, FRAME, GONE, MAX_CONNECTIONS, OPEN, TAKEN
from sandboxes.agent.wire import whole_frames
from sandboxes.cell import Cell, Process

SOURCE = Path(__file__).with_name("agent").joinpath("tunnel.py").read_bytes()
READY_TIMEOUT_S = 30.0


async def open_tunnel(cell: Cell, port: int, take: Callable[[socket.socket], Awaitable[None]]) -> int:
    """Have `take` serve all connections to a port of the sandbox, until it is closed. Return the port; 0 is any."""
    process = await cell.start_own(SOURCE)
    await process.write(port.to_bytes(2, "big"))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READY_TIMEOUT_S):
            ready = await anext(process.stdout, b"")
        if len(ready) == FRAME.size:
            cell.parts.push_async_callback(Tunnel(process, take).aclose)
            return FRAME.unpack(ready)[1]
    raise SandboxError(f"no tunnel could be opened at port {port} of a sandbox; a program of its own may listen there")


@dataclass(eq=False)
class Connection:
    """One connection of a program: the host's end of a socket pair, whose other end was handed out."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    num_ahead: int = 0  # bytes on their way to the program
    has_room: asyncio.Event = field(default_factory=asyncio.Event)
    num_waiting: int = 0  # bytes on their way from it
    has_data: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: tuple[asyncio.Task[None], ...] = ()


class Tunnel:
    """The host's end of a tunnel, to be ended with `aclose`; it ends with its process in the sandbox."""

    def __init__(self, process: Process, take: Callable[[socket.socket], Awaitable[None]]) -> None:
        self._process = process
        self._take = take
        self._connections: dict[int, Connection] = {}
        self._task = asyncio.create_task(self._serve())

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _serve(self) -> None:
        """Read frames from the sandbox until it ends, or sends what our inner end would not. Then end all."""
        received = bytearray()
        try:
            async for chunk in self._process.stdout:
                received += chunk
                for frame in whole_frames(received, CHUNK_BYTES):
                    await self._on_frame(*frame)
        except (ValueError, OSError):  # its own frames, or the host is out of descriptors
            await self._process.kill()
        finally:
            for connection in self._connections.values():
                self._end(connection)
            self._connections.clear()

    async def _on_frame(self, kind: int, number: int, body: bytes) -> None:
        connection = self._connections.get(number)
        if kind == OPEN and connection is None and len(self._connections) < MAX_CONNECTIONS:
            await self._open(number)
        elif connection is None:
            return
        elif kind == DATA:
            connection.num_waiting += len(body)
            if connection.num_waiting >= AHEAD_BYTES + CHUNK_BYTES:
                raise ValueError(f"{connection.num_waiting} bytes ahead")
            connection.writer.write(body)
            connection.has_data.set()
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
        await self._take(theirs)
        self._connections[number] = connection
        tasks = self._pump(number, connection), self._acknowledge(number, connection)
        connection.tasks = tuple(map(asyncio.create_task, tasks))

    async def _pump(self, number: int, connection: Connection) -> None:
        """Send what is answered, as fast as the program takes it."""
        with contextlib.suppress(OSError, SandboxError):
            while data := await connection.reader.read(CHUNK_BYTES):
                connection.num_ahead += len(data)
                await self._process.write(FRAME.pack(DATA, number, len(data)) + data)
                while connection.num_ahead > AHEAD_BYTES:
                    connection.has_room.clear()
                    await connection.has_room.wait()
            await self._process.write(FRAME.pack(END, number, 0))
        self._connections.pop(number, None)
        connection.tasks[1].cancel()
        connection.writer.close()

    async def _acknowledge(self, number: int, connection: Connection) -> None:
        """Tell the inner end how much was delivered of what the program sends."""
        with contextlib.suppress(OSError, SandboxError):
            while True:
                await connection.has_data.wait()
                connection.has_data.clear()
                await connection.writer.drain()
                taken, connection.num_waiting = b"%d" % connection.num_waiting, 0
                await self._process.write(FRAME.pack(TAKEN, number, len(taken)) + taken)

    def _end(self, connection: Connection) -> None:
        for task in connection.tasks:
            task.cancel()
        connection.writer.transport.abort()  # closing would wait until all was delivered
