"""The HTTP client of engines: JSON goes out, JSON or a stream comes in, and every failure is an engine error.

A call raises `EngineUnreachable` when there is no answer, half an answer, a redirect or a status of 500 and above. For
a status of 400 to 499 it raises the error that the caller names. The transport keeps two promises:

- No server is blamed for time in which this process itself slept while it connected (`awake_timeout`).
- No sampling is lost to a stale connection. A server may close an idle connection at the moment in which it is used
  again. When a used connection ends before the head of an answer has arrived, a sampling call is sent once more over a
  new connection, where a server that is gone does not answer.
"""

import asyncio
import io
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import aiohttp
import orjson
from aiohttp.client_proto import ResponseHandler
from aiohttp.tracing import Trace

from areal_agent.engine.wire.fields import Failure, WireError, decode_failure, decode_json
from areal_agent.engine.wire.generate import EventSplitter, decode_event
from areal_agent.errors import EngineError, EngineRejected, EngineUnreachable, PushConflict, WeightUpdateError
from areal_agent.process import count_cancellations
from areal_agent.types import GenerateResult, JsonObject, TokenChunk, record

T = TypeVar("T")
Body = TypeVar("Body")

POLL_S = 0.1

LATE_S = 1.0
"""A timer that fires this much too late was slept through."""

MAX_SLEEPS = 5
"""The number of times that a limit starts again, so that a process that is always late does not wait forever."""

CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 120.0  # of every call but /generate, which has no limit

SLOWEST_BYTES_PER_S = 2**25
"""The rate at which a server loads weights from a slow disk; its time limit grows by the time that this takes."""

_CLOSED = "this client has been closed; create a new one"
_FAILURES = (aiohttp.ClientError, OSError)  # a TimeoutError is an OSError
_HEADERS = {"Content-Type": "application/json"}

_LARGE_BYTES = 2**20
"""A larger body is sent in pieces, so that it does not block the event loop."""

_UNTOLD_STATUS = 400  # of a failure in mid-stream that has no status: SGLang sends those for wrong requests

_is_new_connection: ContextVar[bool] = ContextVar("whether aiohttp made a connection for the call under way")
"""aiohttp's tracing would say this too, for a fifth more CPU a call."""


def load_timeout_s(num_bytes: int, control_timeout_s: float = CONTROL_TIMEOUT_S) -> float:
    """Return the time limit of a call for which the server loads `num_bytes`."""
    return control_timeout_s + num_bytes / SLOWEST_BYTES_PER_S


@record
class _Call:
    """One request, and what its failures mean."""

    method: str
    path: str
    payload: bytes | None = None
    refusal: type[EngineError] = EngineRejected
    timeout_s: float | None = None
    may_repeat: bool = False
    """Whether the server may receive it twice. Nobody reads the answer to the first one then."""


class AnswerReader(Protocol):
    """Assembles the events of one answer."""

    @property
    def result(self) -> GenerateResult | None:
        """The whole answer, once its last event has been read."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the answer is whole before its last event, and the stream may be closed."""
        ...

    def read(self, fields: JsonObject) -> TokenChunk:
        """Read one event; return its new tokens, if any.

        Raises WireError if it cannot be read, and an EngineError if the server reports a failure.
        """
        ...


class Transport:
    """Connections to one base URL: one for each concurrent request, since the engine queues requests.

    A server that closes idle connections early may close one just as it is used again, and only sampling is sent twice;
    for such a server set `keeps_connections` to False, which gives every call its own connection. A call that loads no
    weights has the limit `control_timeout_s`. Every call shows the engine's `key`, if there is one.
    """

    def __init__(
        self,
        base_url: str,
        *,
        key: str | None = None,
        keeps_connections: bool = True,
        control_timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = _HEADERS if key is None else {**_HEADERS, "Authorization": f"Bearer {key}"}
        self._keeps_connections = keeps_connections
        self._control_timeout_s = control_timeout_s
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # by whether they keep connections
        self._is_closed = False

    async def get(self, path: str, *, timeout_s: float | None = None) -> object:
        """Return the JSON of an answer. `timeout_s` replaces the usual limit."""
        return await self._read(_Call(method="GET", path=path, timeout_s=timeout_s or self._control_timeout_s))

    async def text(self, path: str) -> str:
        """Return the text of an answer."""
        payload = await self._payload(_Call(method="GET", path=path, timeout_s=self._control_timeout_s))
        return payload.decode(errors="replace")

    async def post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        refusal: type[EngineError] = EngineRejected,
        num_bytes: int = 0,
        has_limit: bool = True,
    ) -> object:
        """Return the JSON of an answer. The limit grows with `num_bytes`, the weights that the server loads."""
        timeout_s = load_timeout_s(num_bytes, self._control_timeout_s) if has_limit else None
        return await self._read(
            _Call(method="POST", path=path, payload=_encode(body), refusal=refusal, timeout_s=timeout_s)
        )

    async def sample(self, path: str, body: dict[str, Any]) -> object:
        """Return the JSON of a completion, without a time limit. A stale connection does not lose it."""
        return await self._read(_Call(method="POST", path=path, payload=_encode(body), may_repeat=True))

    async def answer(
        self, path: str, body: dict[str, Any], reader: AnswerReader, on_chunk: Callable[[TokenChunk], None]
    ) -> GenerateResult:
        """Return a completion that arrives in events; `on_chunk` is given each event's new tokens, perhaps none."""
        splitter, where = EventSplitter(), f"the answer of {self.base_url}{path}"
        async with aclosing(self.stream(path, body)) as pieces:
            async for piece in pieces:
                for event in splitter.feed(piece):
                    fields = self.decoded(decode_event, path, event)
                    if "error" in fields:
                        failure = decode_failure(fields, _UNTOLD_STATUS)
                        message = f"{where} broke off with {failure.status}: {failure.message}"
                        raise EngineRejected(message) if failure.is_refusal else EngineUnreachable(message)
                    on_chunk(self.decoded(reader.read, path, fields))
                    if reader.is_over and reader.result is not None:
                        return reader.result
        if reader.result is None:
            raise EngineUnreachable(f"{where} ended before its last event; is the engine running? see its log")
        return reader.result

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a completion as they arrive, otherwise as `sample` does. Close it when leaving early."""
        call = _Call(method="POST", path=path, payload=_encode(body), may_repeat=True)
        async with await self._begin(call) as answer:
            try:
                async for piece in answer.content.iter_any():
                    yield piece
            except _FAILURES as error:
                raise self._no_answer(call, error) from error

    async def aclose(self) -> None:
        """Close the connections for good; calls in flight fail. A second call does nothing."""
        self._is_closed = True
        for session in self._sessions.values():
            await session.close()

    def decoded(self, decode: Callable[[Body], T], path: str, body: Body) -> T:
        """Decode an answer. Raises EngineUnreachable when it is not what it should be."""
        try:
            return decode(body)
        except WireError as error:
            raise EngineUnreachable(
                f"the answer of {self.base_url}{path} cannot be read: {error}; is that an engine of this kind?"
            ) from error

    async def _read(self, call: _Call) -> object:
        return self.decoded(_json, call.path, await self._payload(call))

    async def _payload(self, call: _Call) -> bytes:
        answer = await self._begin(call)
        try:
            return await answer.read()
        except _FAILURES as error:
            raise self._no_answer(call, error) from error

    async def _begin(self, call: _Call) -> aiohttp.ClientResponse:
        """Return an answer with status 200, its body still unread."""
        try:
            answer = await self._sent(call)
            if answer.status == 200:
                return answer
            failure = _failure(await answer.read(), answer.status)
        except _FAILURES as error:
            raise self._no_answer(call, error) from error
        message = f"{call.method} {self.base_url}{call.path} was answered with {failure.status}: {failure.message}"
        if not failure.is_refusal:
            raise EngineUnreachable(message)
        is_conflict = failure.status == 409 and call.refusal is WeightUpdateError
        raise PushConflict(message) if is_conflict else call.refusal(message)

    async def _sent(self, call: _Call) -> aiohttp.ClientResponse:
        """Send a call and return the head of its answer, after a second attempt if the first met a stale connection."""
        if self._keeps_connections:
            _is_new_connection.set(False)
            try:
                return await self._send(call, is_kept=True)
            except (aiohttp.ServerDisconnectedError, OSError) as error:
                if _is_new_connection.get() or not call.may_repeat or _has_begun(error):
                    raise
        return await self._send(call, is_kept=False)

    async def _send(self, call: _Call, *, is_kept: bool) -> aiohttp.ClientResponse:
        payload = call.payload
        return await self._session(is_kept=is_kept).request(
            call.method,
            self.base_url + call.path,
            data=io.BytesIO(payload) if payload is not None and len(payload) > _LARGE_BYTES else payload,
            timeout=aiohttp.ClientTimeout(total=call.timeout_s),
            allow_redirects=False,
        )

    def _session(self, *, is_kept: bool) -> aiohttp.ClientSession:
        """Return the session whose connections are kept, or the one whose connections carry one call each."""
        if self._is_closed:
            raise ConnectionAbortedError(_CLOSED)
        if is_kept not in self._sessions:
            self._sessions[is_kept] = aiohttp.ClientSession(
                connector=_Connector(limit=0, force_close=not is_kept),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
                trust_env=False,
                headers=self._headers,
            )
        return self._sessions[is_kept]

    def _no_answer(self, call: _Call, error: Exception) -> EngineUnreachable:
        cause = str(error).replace(" ssl:default", "") or type(error).__name__  # aiohttp says it of plain HTTP, too
        where = f"{call.method} {self.base_url}{call.path}"
        return EngineUnreachable(f"no answer to {where}: {cause}; is the engine running? see its log")


class _Connector(aiohttp.TCPConnector):
    """Does not blame a server for a connection attempt that this process slept through."""

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 (aiohttp's name)
    ) -> ResponseHandler:
        _is_new_connection.set(True)
        num_cancelled = count_cancellations()
        try:
            async with awake_timeout(CONNECT_TIMEOUT_S):
                return await super()._create_connection(req, traces, timeout)
        except asyncio.CancelledError:
            if count_cancellations() > num_cancelled:
                raise
            raise ConnectionAbortedError(_CLOSED) from None  # closing has cancelled aiohttp's search for the address


@asynccontextmanager
async def awake_timeout(limit_s: float) -> AsyncGenerator[None]:
    """Limit a block's time as `asyncio.timeout` does, but start again if this process slept through the limit.

    After an event loop was blocked, all its limits have passed, while answers that have arrived are still unread.
    """
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


async def wait_until_healthy(who: str, health: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
    """Call `health` until it returns true. Raises EngineUnreachable when `who` does not serve within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await health():  # noqa: ASYNC110 (nothing in this process tells when another one serves)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise EngineUnreachable(
            f"{who} did not serve within {timeout_s:g} s; see its log, or raise engine.startup_timeout_s"
        ) from None


def _encode(body: dict[str, Any]) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _has_begun(error: Exception) -> bool:
    """Return whether a part of the answer's head arrived; aiohttp then puts that part in place of the message.

    A connection that was reset says nothing of it; such a half answer is lost either way.
    """
    return isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)


def _failure(payload: bytes, status: int) -> Failure:
    """Return the failure that an answer describes. The HTTP status counts, whatever the body says of it."""
    try:
        message = decode_failure(_json(payload), status).message
    except WireError:
        message = payload[:200].decode(errors="replace")
    return Failure(message=message, status=status)


def _json(payload: bytes) -> object:
    return decode_json(payload) if payload else None
