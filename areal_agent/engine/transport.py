"""HTTP to one server: bodies out, bodies in, and every failure one of the engine's errors. It knows no JSON field.

`EngineUnreachable` is no answer, half an answer, a redirect or a status of 500 and above; a status of 400 and above is
the refusal that the caller names.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import orjson
from aiohttp.tracing import Trace

from areal_agent.engine import wire
from areal_agent.engine.awake_timeout import awake_timeout
from areal_agent.engine.connections import Connections
from areal_agent.engine.fields import WireError, decode_json
from areal_agent.errors import EngineError, EngineRejected, EngineUnreachable, PushConflict, WeightUpdateError

CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 120.0  # everything but /generate, which takes as long as it takes
SLOWEST_BYTES_PER_S = 2**25
"""What a server that loads weights manages at least, from a slow disk: it is given as much more time as that takes."""

_HEADERS = {"Content-Type": "application/json"}

T = TypeVar("T")
Body = TypeVar("Body")


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
