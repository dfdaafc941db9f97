"""HTTP to one server: bodies out, bodies in, and every failure one of the engine's errors. It knows no JSON field.

`EngineUnreachable` is no answer, half an answer, a redirect or a status of 500 and above; a status of 400 and above is
the refusal that the caller names.

Waiting until a server serves: nothing in this process tells when another one does.

A time limit for an answer of somebody else, in which the time that this process has slept itself does not count.

An event loop that was kept from running finds that all limits have passed, and what has come meanwhile not read yet.

One HTTP connection that carries a POST at a time: it tells the whole answer, or that none came.

It knows no JSON, no engine, and nothing of other connections.

Connections that carry one JSON call after the other: all that sampling needs of HTTP, at a third of a client's cost.

A whole answer to a POST, read by httptools (llhttp). Streams and control calls take a client of more parts
(transport.py): they are rare, or need more. It knows no JSON and no engine.
"""

import asyncio
import contextlib
import ssl
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from urllib.parse import SplitResult, unquote, urlsplit

import aiohttp
import httptools
import orjson
from aiohttp.tracing import Trace

from areal_agent.engine import wire
from areal_agent.engine.wire.fields import WireError, decode_json
from areal_agent.errors import EngineError, EngineRejected, EngineUnreachable, PushConflict, WeightUpdateError

T = TypeVar("T")
Body = TypeVar("Body")


POLL_S = 0.1


async def wait_until_healthy(who: str, health: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
    """Ask again and again. Raises EngineUnreachable when `who` does not serve within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await health():  # noqa: ASYNC110 (nothing in this process tells when another one serves)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise EngineUnreachable(
            f"{who} did not serve within {timeout_s:g} s; see its log, or raise engine.startup_timeout_s"
        ) from None


LATE_S = 1.0
"""A limit that is noticed so much too late has been slept through."""
MAX_SLEEPS = 5
"""How often it begins anew: a process that is late all the time waits for nobody without an end."""


@asynccontextmanager
async def awake_timeout(limit_s: float) -> AsyncGenerator[None]:
    """As `asyncio.timeout`, but that it begins anew when it was slept through."""
    loop = asyncio.get_running_loop()
    num_sleeps = 0

    def end() -> None:
        nonlocal ending, num_sleeps
        if loop.time() - ending.when() < LATE_S or num_sleeps == MAX_SLEEPS:
            limit.reschedule(loop.time())
        else:
            num_sleeps += 1
            ending = loop.call_later(limit_s, end)

    async with asyncio.timeout(None) as limit:
        ending = loop.call_later(limit_s, end)
        try:
            yield
        finally:
            ending.cancel()


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


CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 120.0  # everything but /generate, which takes as long as it takes
SLOWEST_BYTES_PER_S = 2**25
"""What a server that loads weights manages at least, from a slow disk: it is given as much more time as that takes."""

_HEADERS = {"Content-Type": "application/json"}


def load_timeout_s(num_bytes: int, control_timeout_s: float = CONTROL_TIMEOUT_S) -> float:
    """How long a server may take to answer a call for which it loads so much."""
    return control_timeout_s + num_bytes / SLOWEST_BYTES_PER_S


class Transport:
    """Connections to one base URL: as many as there are requests, since the engine queues and the client must not.

    A server that closes idle connections soon may close one just as it is used again, and a call is never made twice
    that may do something twice: for such a server, let every call but `ask` have a connection of its own
    (`keeps_connections` False). A call that loads nothing is answered within `control_timeout_s`.
    """

    def __init__(
        self, base_url: str, *, keeps_connections: bool = True, control_timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._keeps_connections = keeps_connections
        self._control_timeout_s = control_timeout_s
        self._connections = Connections(self.base_url, connect_timeout_s=CONNECT_TIMEOUT_S)
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout_s: float | None = None) -> object:
        """The JSON of an answer. `timeout_s`: of a call that is to be answered sooner than others."""
        return await self._read("GET", path, None, EngineRejected, timeout_s or self._control_timeout_s)

    async def text(self, path: str) -> str:
        """An answer that is no JSON."""
        async with self._answer("GET", path, None, EngineRejected, self._control_timeout_s) as answer:
            return (await answer.read()).decode(errors="replace")

    async def post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        refusal: type[EngineError] = EngineRejected,
        num_bytes: int = 0,
        has_limit: bool = True,
    ) -> object:
        """The JSON of an answer. The time limit grows with the weights that the server has to load for it."""
        timeout_s = load_timeout_s(num_bytes, self._control_timeout_s) if has_limit else None
        return await self._read("POST", path, body, refusal, timeout_s)

    async def ask(self, path: str, body: dict[str, Any]) -> object:
        """As `post`, for the call that is made a thousand times as often as any other; without a time limit.

        The server may receive it twice, of which the first has no reader any more: so it is for sampling alone.
        """
        where = f"POST {self.base_url}{path}"
        try:
            answer = await self._connections.post(path, _encode(body))
        except (OSError, TimeoutError, ValueError) as error:
            raise _no_answer(where, error) from error
        if answer.status != 200:
            raise _failed(where, _failure(answer.payload, answer.status), EngineRejected)
        return self.decoded(_json, path, answer.payload)

    def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """The bytes of an answer as they arrive, without a time limit. Close it when leaving early."""
        return self._pieces("POST", path, body)

    async def aclose(self) -> None:
        """Close the connections. Harmless when done before."""
        self._connections.close()
        if self._session is not None:
            await self._session.close()

    def decoded(self, decode: Callable[[Body], T], path: str, body: Body) -> T:
        """What an answer says. Raises EngineUnreachable when it says something else than it should."""
        try:
            return decode(body)
        except WireError as error:
            raise EngineUnreachable(
                f"the answer of {self.base_url}{path} cannot be read: {error}; is that an engine of this kind?"
            ) from error

    async def _read(
        self, method: str, path: str, body: dict[str, Any] | None, refusal: type[EngineError], timeout_s: float | None
    ) -> object:
        async with self._answer(method, path, body, refusal, timeout_s) as answer:
            payload = await answer.read()
        return self.decoded(_json, path, payload)

    async def _pieces(self, method: str, path: str, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        async with self._answer(method, path, body, EngineRejected, None) as answer:
            async for piece in answer.content.iter_any():
                yield piece

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, refusal: type[EngineError], timeout_s: float | None
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """An answer with status 200, its body still to be read. What fails there is an `EngineUnreachable`, too."""
        where = f"{method} {self.base_url}{path}"
        try:
            async with self._open().request(
                method,
                self.base_url + path,
                data=None if body is None else _encode(body),
                headers=_HEADERS,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as response:
                if response.status == 200:
                    yield response
                    return
                failure = _failure(await response.read(), response.status)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _no_answer(where, error) from error
        raise _failed(where, failure, refusal)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=_Connector(limit=0, force_close=not self._keeps_connections),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
                trust_env=False,
            )
        return self._session


class _Connector(aiohttp.TCPConnector):
    """A server is not to blame for a connection that this process has slept through."""

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 (aiohttp's name)
    ) -> aiohttp.connector.Connection:
        async with awake_timeout(CONNECT_TIMEOUT_S):
            return await super().connect(req, traces, timeout)


def _encode(body: dict[str, Any]) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _no_answer(where: str, error: Exception) -> EngineUnreachable:
    cause = str(error) or type(error).__name__
    return EngineUnreachable(f"no answer to {where}: {cause}; is the engine running? see its log")


def _failed(where: str, failure: wire.Failure, refusal: type[EngineError]) -> EngineError:
    message = f"{where} was answered with {failure.status}: {failure.message}"
    if not failure.is_refusal:
        return EngineUnreachable(message)
    return PushConflict(message) if failure.status == 409 and refusal is WeightUpdateError else refusal(message)


def _failure(payload: bytes, status: int) -> wire.Failure:
    """What a failed answer says. Its HTTP status holds, whatever the body says of it."""
    try:
        message = wire.decode_failure(_json(payload), status).message
    except WireError:
        message = payload[:200].decode(errors="replace")
    return wire.Failure(message=message, status=status)


def _json(payload: bytes) -> object:
    return decode_json(payload) if payload else None
