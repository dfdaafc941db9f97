"""Frames over a connected socket: 4 bytes of length, big-endian, and a payload. It knows not what they say."""

import asyncio
import contextlib
import socket
import struct
from typing import Self

LENGTH = struct.Struct(">I")


class Channel:
    """One end. A socket pair has no port and needs no key, and its end is the news that the other side is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, sock: socket.socket) -> Self:
        """Takes the socket over."""
        return cls(*await asyncio.open_connection(sock=sock))

    def send(self, payload: bytes) -> None:
        """Queue one frame. What is sent to a side that is gone is lost; `receive` tells that it is."""
        self._writer.write(LENGTH.pack(len(payload)) + payload)

    async def receive(self) -> bytes:
        """The next frame. Raises EOFError when the other side is gone, or after `end`."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return await self._reader.readexactly(length)
        except OSError as error:  # the other side was killed with frames unread
            raise EOFError(f"the other side is gone: {error}") from error

    def end(self) -> None:
        """Read no more: `receive` raises EOFError."""
        self._reader.feed_eof()

    async def aclose(self) -> None:
        """Harmless when done before."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
