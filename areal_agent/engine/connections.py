"""Connections that carry one JSON call after the other: all that sampling needs of HTTP, at a third of a client's cost.

A whole answer to a POST, read by httptools (llhttp). Streams and control calls take a client of more parts
(transport.py): they are rare, or need more. It knows no JSON and no engine.
"""

import asyncio
import contextlib
import ssl
from base64 import b64encode
from urllib.parse import SplitResult, unquote, urlsplit

from areal_agent.engine.awake_timeout import awake_timeout
from areal_agent.engine.connection import Answer, Connection, NothingCame


class Connections:
    """As many connections to one base URL as there are calls; those that are free are used again."""

    def __init__(self, base_url: str, *, connect_timeout_s: float) -> None:
        parts = urlsplit(base_url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._head = _head(parts)
        self._path = parts.path
        self._connect_timeout_s = connect_timeout_s
        self._free: dict[Connection, None] = {}  # in the order in which they became free
        self._busy: set[Connection] = set()
        self._is_closed = False

    async def post(self, path: str, payload: bytes) -> Answer:
        """Send a JSON body and wait for the whole answer, as long as it takes. Cancelling closes the connection.

        Make only calls that may be received twice. A server may close an idle connection in the moment in which it is
        used again: then nothing comes, and the call is made once more, over a new connection, where a server that is
        gone answers nothing. It cannot be told from a server that took the call and gave no answer.

        Raises OSError, TimeoutError when nobody answers, and ValueError for what is no HTTP.
        """
        head = f"POST {self._path}{path} {self._head}Content-Length: {len(payload)}\r\n\r\n".encode()
        used = self._newest_free()
        if used is not None:
            with contextlib.suppress(NothingCame):
                return await self._call(used, head, payload)
        return await self._call(await self._connect(), head, payload)

    def close(self) -> None:
        """Close all connections, for good; calls that are under way fail."""
        self._is_closed = True
        for connection in (*self._free, *self._busy):
            connection.close()

    async def _call(self, connection: Connection, head: bytes, payload: bytes) -> Answer:
        self._busy.add(connection)
        try:
            answer = await connection.post(head, payload)
        except BaseException:
            connection.close()
            raise
        finally:
            self._busy.discard(connection)
        if connection.is_open:
            self._free[connection] = None
        return answer

    def _newest_free(self) -> Connection | None:
        while self._free:
            connection, _ = self._free.popitem()  # the newest: the others may close
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> Connection:
        self._require_open()
        async with awake_timeout(self._connect_timeout_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(on_lost=self._forget), self._host, self._port, ssl=self._tls
            )
        if self._is_closed:
            connection.close()
        self._require_open()
        return connection

    def _forget(self, connection: Connection) -> None:
        self._free.pop(connection, None)

    def _require_open(self) -> None:
        if self._is_closed:
            raise ConnectionAbortedError("this client was closed meanwhile; make a new one")


def _head(parts: SplitResult) -> str:
    """What the heads of all requests have behind their path, but for the length of the body."""
    lines = ["HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}", "Content-Type: application/json"]
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        lines.append(f"Authorization: Basic {b64encode(user.encode()).decode()}")
    return "".join(f"{line}\r\n" for line in lines)
