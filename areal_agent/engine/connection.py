"""One HTTP connection that carries a POST at a time: it tells the whole answer, or that none came.

It knows no JSON, no engine, and nothing of other connections.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools

MAX_ANSWER_BYTES = 2**30
MAX_HEAD_BYTES = 2**18

_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})


@dataclass(frozen=True, slots=True)
class Answer:
    """The status and the whole body of an answer."""

    status: int
    payload: bytes


class NothingCame(ConnectionError):
    """The connection ended before the first byte of an answer."""


@dataclass(slots=True, eq=False)
class Connection(asyncio.Protocol):
    """One connection: a call at a time. The methods without docstrings are asyncio's and httptools' names."""

    on_lost: "Callable[[Connection], object]"
    is_open: bool = True
    _transport: asyncio.Transport | None = None
    _parser: httptools.HttpResponseParser | None = None
    _waiter: "asyncio.Future[Answer] | None" = None
    _pieces: list[bytes] = field(default_factory=list[bytes])
    _num_bytes: int = 0
    _has_head: bool = False
    _has_length: bool = False  # else the body ends with the connection

    async def post(self, head: bytes, payload: bytes) -> Answer:
        """One call; only when none is under way.

        Raises NothingCame, another OSError for half an answer, and ValueError for what is no HTTP.
        """
        assert self._transport is not None and self._waiter is None
        if not self.is_open:
            raise NothingCame("the connection was closed at once")
        self._parser, self._num_bytes = httptools.HttpResponseParser(self), 0
        self._has_head = self._has_length = False
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(head + payload)
        try:
            return await self._waiter
        finally:
            self._waiter = self._parser = None
            self._pieces = []  # an idle connection holds no answer

    def close(self) -> None:
        """Close at once. Harmless when it is closed."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # another event loop's may be of another class

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._waiter is None or self._waiter.done():
            self.close()  # nobody asked for anything
            return
        self._num_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ValueError(f"what came is no HTTP: {error}"))
        except httptools.HttpParserUpgrade:
            self._fail(ValueError("the answer goes on in another protocol than HTTP"))
        self._check_size()

    def eof_received(self) -> None:
        self.is_open = False
        if self._has_head and not self._has_length and self._parser is not None:
            self._succeed(self._parser.get_status_code())

    def connection_lost(self, exc: Exception | None) -> None:
        self.on_lost(self)
        cause = str(exc or "it hung up")
        if self._num_bytes:
            self._fail(ConnectionResetError(f"the connection was closed before the answer was whole: {cause}"))
        else:
            self._fail(NothingCame(f"the connection was closed before an answer began: {cause}"))

    # ------------------------------------------------------------------------------------------- httptools

    def on_message_begin(self) -> None:
        self._has_head = self._has_length = False
        if self._waiter is None or self._waiter.done():
            self.close()  # a second answer: who knows what follows

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length = self._has_length or name.lower() in _LENGTHS

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:
            self._has_head = False  # the answer itself follows
            return
        self.is_open = self.is_open and self._parser.should_keep_alive()
        self._succeed(status)

    # ------------------------------------------------------------------------------------------- internals

    def _check_size(self) -> None:
        if not self._has_head and self._num_bytes > MAX_HEAD_BYTES:
            self._fail(ValueError(f"the head of the answer has more than {MAX_HEAD_BYTES} bytes"))
        elif self._num_bytes > MAX_ANSWER_BYTES:
            self._fail(ValueError(f"the answer has more than {MAX_ANSWER_BYTES} bytes"))

    def _succeed(self, status: int) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(Answer(status, b"".join(self._pieces)))
        if not self.is_open:
            self.close()

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self.close()
