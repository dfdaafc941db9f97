"""Connections that carry one JSON call after the other: all that sampling needs of HTTP, at a third of a client's cost.

A whole answer to a POST, read by httptools (llhttp). Streams and control calls take a client of more parts
(transport.py): they are rare, or need more. It knows no JSON and no engine.
"""

import asyncio
import ssl
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

MAX_ANSWER_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Answer:
    """The status and the whole body of an answer."""

    status: int
    payload: bytes


class Connections:
    """As many connections to one base URL as there are calls; those that are free are used again."""

    def __init__(self, base_url: str, *, connect_timeout_s: float) -> None:
        parts = urlsplit(base_url)
        self._host, self._path = parts.hostname or "", parts.path
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._host_header = parts.netloc.rpartition("@")[2]
        self._connect_timeout_s = connect_timeout_s
        self._free: list[_Connection] = []
        self._busy: set[_Connection] = set()

    async def post(self, path: str, payload: bytes) -> Answer:
        """Send a JSON body and wait for the whole answer, as long as it takes. Cancelling closes the connection.

        Raises OSError, TimeoutError when nobody answers, and ValueError for what is no HTTP.
        """
        connection = await self._connection()
        self._busy.add(connection)
        try:
            answer = await connection.post(
                f"POST {self._path}{path} HTTP/1.1\r\nHost: {self._host_header}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n".encode(),
                payload,
            )
        except BaseException:
            connection.close()
            raise
        finally:
            self._busy.discard(connection)
        if connection.is_open:
            self._free.append(connection)
        return answer

    def close(self) -> None:
        """Close all connections; calls that are under way fail."""
        for connection in (*self._free, *self._busy):
            connection.close()
        self._free.clear()

    async def _connection(self) -> "_Connection":
        while self._free:
            connection = self._free.pop()  # the newest: the others may close
            if connection.is_open:
                return connection
        async with asyncio.timeout(self._connect_timeout_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, self._host, self._port, ssl=self._tls
            )
        return connection


@dataclass(slots=True, eq=False)
class _Connection(asyncio.Protocol):
    """One connection: a call at a time. The methods without docstrings are asyncio's and httptools' names."""

    is_open: bool = True
    _transport: asyncio.Transport | None = None
    _parser: httptools.HttpResponseParser | None = None
    _waiter: "asyncio.Future[Answer] | None" = None
    _pieces: list[bytes] = field(default_factory=list[bytes])
    _num_bytes: int = 0

    async def post(self, head: bytes, payload: bytes) -> Answer:
        """One call; only when none is under way."""
        assert self._transport is not None and self._waiter is None
        self._parser, self._pieces, self._num_bytes = httptools.HttpResponseParser(self), [], 0
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(head + payload)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Close at once. Harmless when it is closed."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # another event loop's may be of another class

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._waiter is None or self._waiter.done():
            self.close()  # nobody asked for anything
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ValueError(f"what came is no HTTP: {error}"))

    def eof_received(self) -> None:
        self.is_open = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._fail(exc or ConnectionResetError("the connection was closed before the answer was whole"))

    def on_body(self, body: bytes) -> None:
        self._num_bytes += len(body)
        if self._num_bytes > MAX_ANSWER_BYTES:
            raise ValueError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None and self._waiter is not None
        status = self._parser.get_status_code()
        if status < 200:
            return  # the answer itself follows
        self.is_open = self.is_open and self._parser.should_keep_alive()
        if not self._waiter.done():
            self._waiter.set_result(Answer(status, b"".join(self._pieces)))
        if not self.is_open:
            self.close()

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self.close()
