"""A stream of the container engine: one HTTP request on its socket that turns into raw bytes both ways.

It takes the engine's frames apart, which tell a container's stdout and stderr from each other, and knows nothing of
what is in them. All of it runs on the event loop; no thread waits for a container.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Self

from areal_agent.errors import SandboxError

CONNECT_TIMEOUT_S = 60.0
FRAME_HEADER_BYTES = 8  # the stream's number, three zeros, how many bytes follow
STDERR = 2
MAX_HEAD_BYTES = 65_536


class EngineStream(asyncio.Protocol):
    """Make it with `open`. `on_data` gets stdout, `on_error` stderr, `on_end` is called once, when it has ended."""

    def __init__(
        self,
        on_data: Callable[[bytes], None],
        on_error: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_data = on_data
        self._on_error = on_error
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._answered: asyncio.Future[None] = self._loop.create_future()
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()

    @classmethod
    async def open(
        cls,
        socket_path: str,
        path: str,
        body: Mapping[str, Any],
        *,
        on_data: Callable[[bytes], None],
        on_error: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> Self:
        """Ask for the stream at `path` and wait until the engine has granted it."""
        stream = cls(on_data, on_error, on_end)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await stream._loop.create_unix_connection(lambda: stream, socket_path)
                stream._ask(path, json.dumps(body).encode())
                await stream._answered
        except BaseException as error:
            stream.close()
            if isinstance(error, OSError):  # a TimeoutError too
                raise SandboxError(f"the container engine gives no stream: {error or 'no answer'}") from error
            raise
        return stream

    def write(self, data: bytes) -> None:
        """Nothing happens when it has ended."""
        if self._transport is not None:
            self._transport.write(data)

    async def drain(self) -> None:
        """Until the engine has room for more."""
        await self._has_room.wait()

    def close_write(self) -> None:
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # ── asyncio.Protocol ──────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._answered.done():
            self._read_head()
        if self._answered.done():
            self._read_frames()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._has_room.set()
        if self._answered.done():
            self._on_end()
        else:
            self._answered.set_exception(ConnectionResetError("it closed the connection"))

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    # ── HTTP, and the engine's frames ─────────────────────────────────────────────────────────────────────────────

    def _ask(self, path: str, body: bytes) -> None:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: engine\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.write(head.encode() + body)

    def _read_head(self) -> None:
        head, end, _ = bytes(self._received).partition(b"\r\n\r\n")
        if not end:
            if len(self._received) > MAX_HEAD_BYTES:
                self._answered.set_exception(ConnectionResetError("it speaks no HTTP"))
            return
        status = head.split(b" ", 2)[1:2]
        if status in ([b"101"], [b"200"]):
            del self._received[: len(head) + len(end)]
            self._answered.set_result(None)
        else:
            told = bytes(self._received[len(head) + len(end) :]) or head
            self._answered.set_exception(ConnectionResetError(told.decode(errors="replace").strip()))

    def _read_frames(self) -> None:
        received = self._received
        while len(received) >= FRAME_HEADER_BYTES:
            end = FRAME_HEADER_BYTES + int.from_bytes(received[4:FRAME_HEADER_BYTES], "big")
            if len(received) < end:
                return
            stream, data = received[0], bytes(received[FRAME_HEADER_BYTES:end])
            del received[:end]
            (self._on_error if stream == STDERR else self._on_data)(data)
