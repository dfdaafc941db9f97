"""The HTTP client of engines, against servers that send what they like.

- An answer is read whole in every form that HTTP has, also in single bytes. The connection is used again only when
  nothing can follow.
- What is no answer, or half of one, is an EngineUnreachable. Heads are bounded.
- A completion, streamed or not, is asked for once more when its used connection ended before anything came: over a new
  connection, and never otherwise. No other POST is sent twice.
- Bodies of any size arrive as they were sent, and a URL's user is told to the server.
- Closing ends the calls under way, also those that are still connecting.

A time limit that does not count the time in which this process slept:

- a limit that passes during sleep does not expire: what came meanwhile is read
- one that passes while awake does, also after a sleep, and so does one that is slept through again and again
- a new connection does not fail because this process slept while it was made, for samples and for calls
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest
from aiohttp import web

from areal_agent.engine.transport import CONNECT_TIMEOUT_S, LATE_S, Transport, awake_timeout
from areal_agent.engine.wire import control, generate
from areal_agent.errors import EngineRejected, EngineUnreachable
from tests.engine.servers import serving_app

from .slept import SleptLoop, run_in_slept_loop

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
NO_LENGTH = b"HTTP/1.1 200 OK\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;x=y\r\n{\r\n1\r\n}\r\n0\r\nA: b\r\n\r\n"
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
UPGRADE = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"
HANG_UP = b""


class Server:
    """Answers the requests of each connection from a list of its own, then hangs up; the last list goes on."""

    def __init__(self, scripts: Sequence[Sequence[bytes]], *, in_bytes: bool = False) -> None:
        self._scripts = scripts
        self._in_bytes = in_bytes
        self.heads: list[list[bytes]] = []  # by connection: of its requests
        self.tasks: list[asyncio.Task[None]] = []
        self.was_asked = asyncio.Event()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = self._scripts[min(len(self.heads), len(self._scripts) - 1)]
        self.heads.append([])
        self.tasks.append(asyncio.create_task(self._serve(script, self.heads[-1], reader, writer)))

    async def _serve(
        self, script: Sequence[bytes], heads: list[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            for answer in script:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                await reader.readexactly(len(b"{}"))
                self.was_asked.set()
                if answer is HANG_UP:
                    break
                for at in range(len(answer)) if self._in_bytes else [slice(None)]:
                    writer.write(answer[at : at + 1] if isinstance(at, int) else answer[at])
                    await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass  # the client hung up
        finally:
            writer.close()


@asynccontextmanager
async def serving(
    *scripts: Sequence[bytes], in_bytes: bool = False, user: str = "", keeps_connections: bool = True
) -> AsyncGenerator[tuple[Transport, Server]]:
    server = Server(scripts, in_bytes=in_bytes)
    listener = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    transport = Transport(f"http://{user}127.0.0.1:{port}/base", keeps_connections=keeps_connections)
    try:
        yield transport, server
    finally:
        await transport.aclose()
        listener.close()
        await asyncio.gather(*server.tasks)


async def sample(transport: Transport) -> bytes:
    async with asyncio.timeout(120):  # only a hang is longer
        return str(await transport.sample("/generate", {})).encode()


async def stream(transport: Transport) -> bytes:
    async with asyncio.timeout(120):
        return b"".join([piece async for piece in transport.stream("/generate", {})])


SAMPLING = pytest.mark.parametrize("ask", [sample, stream])
Asking = Callable[[Transport], Awaitable[bytes]]


@SAMPLING
@pytest.mark.parametrize("in_bytes", [False, True])
@pytest.mark.parametrize(
    ("answer", "num_connections"),
    [
        (OK, 1),
        (CHUNKED, 1),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 1),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + CHUNKED, 1),
        (OK.replace(b"1.1", b"1.0"), 2),
        (OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"), 2),
    ],
)
async def test_answers_in_every_form(ask: Asking, answer: bytes, num_connections: int, in_bytes: bool) -> None:
    async with serving([answer, answer], in_bytes=in_bytes) as (transport, server):
        assert [await ask(transport) for _ in range(2)] == [b"{}", b"{}"]
        assert len(server.heads) == num_connections


@SAMPLING
@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (OK.replace(b"200 OK", b"503 Busy"), EngineUnreachable, "503"),
        (OK.replace(b"200 OK", b"400 Bad"), EngineRejected, "400"),
        (EMPTY, EngineUnreachable, "204"),
    ],
)
async def test_failures_leave_a_connection_to_use_again(
    ask: Asking, answer: bytes, error: type[Exception], message: str
) -> None:
    async with serving([answer, OK]) as (transport, server):
        with pytest.raises(error, match=message):
            await ask(transport)
        assert await ask(transport) == b"{}"
        assert len(server.heads) == 1


@pytest.mark.parametrize(
    "answer", [NO_LENGTH, NO_LENGTH.replace(b"1.1", b"1.0"), b"HTTP/1.1 100 C\r\n\r\n" + NO_LENGTH]
)
async def test_answer_without_a_length_ends_with_its_connection(answer: bytes) -> None:
    async with serving([answer]) as (transport, server):
        assert [await sample(transport) for _ in range(2)] == [b"{}"] * 2
        assert len(server.heads) == 2


@pytest.mark.parametrize("more", [OK.replace(b"{}", b"[]"), OK[:20]])
async def test_what_follows_an_answer_is_not_taken_for_the_next_one(more: bytes) -> None:
    async with serving([OK + more, OK]) as (transport, _):
        assert [await sample(transport) for _ in range(2)] == [b"{}"] * 2


@SAMPLING
@pytest.mark.parametrize(
    "answer",
    [
        HANG_UP,
        OK[:-1],
        OK[:9],
        CHUNKED[:-2],
        b"HTTP/1.1 100 Continue\r\n\r\n",
        UPGRADE,
        UPGRADE + OK,
        b"SSH-2.0\r\n",
        OK.replace(b"Length: 2", b"Length: two"),
        OK.replace(b"OK\r\n", b"OK\r\nTransfer-Encoding: chunked\r\n"),
        b"HTTP/1.1 200 OK\r\n" + b"X: yyyyyy\r\n" * 2**16,
    ],
)
async def test_what_is_no_answer(ask: Asking, answer: bytes) -> None:
    async with serving([answer]) as (transport, server):
        with pytest.raises(EngineUnreachable):
            await ask(transport)
        assert len(server.heads) == 1


@SAMPLING
@pytest.mark.parametrize("first", [OK, CHUNKED])
async def test_completion_survives_a_used_connection_that_ends_before_anything_came(ask: Asking, first: bytes) -> None:
    async with serving([first, HANG_UP], [OK]) as (transport, server):
        await ask(transport)
        assert await ask(transport) == b"{}"
        assert [len(heads) for heads in server.heads] == [2, 1]


async def test_completion_is_asked_for_again_over_a_new_connection_not_another_used_one() -> None:
    async with serving([OK, HANG_UP], [OK, HANG_UP], [OK]) as (transport, server):
        await asyncio.gather(sample(transport), sample(transport))
        assert await sample(transport) == b"{}"
        assert sorted(len(heads) for heads in server.heads) == [1, 1, 2]


async def test_completion_is_asked_for_again_only_once() -> None:
    async with serving([OK, HANG_UP], [HANG_UP]) as (transport, server):
        await sample(transport)
        with pytest.raises(EngineUnreachable, match="no answer"):
            await sample(transport)
        assert len(server.heads) == 2


@SAMPLING
@pytest.mark.parametrize("half", [OK[:-1], OK[:20], OK[:9]])
async def test_half_an_answer_is_not_asked_for_again(ask: Asking, half: bytes) -> None:
    async with serving([OK, half], [OK]) as (transport, server):
        await ask(transport)
        with pytest.raises(EngineUnreachable, match="no answer"):
            await ask(transport)
        assert len(server.heads) == 1


async def test_post_that_is_no_completion_is_never_sent_twice() -> None:
    async with serving([OK, HANG_UP], [OK]) as (transport, server):
        await transport.post("/pause", {})
        with pytest.raises(EngineUnreachable, match="no answer"):
            await transport.post("/pause", {})
        assert [len(heads) for heads in server.heads] == [2]


async def test_connections_that_are_not_kept_carry_a_call_each() -> None:
    async with serving([OK, OK], keeps_connections=False) as (transport, server):
        assert [await sample(transport) for _ in range(2)] == [b"{}"] * 2
        assert [len(heads) for heads in server.heads] == [1, 1]


async def test_cancelled_call_leaves_no_connection_to_use_again() -> None:
    async with serving([OK[:-1], OK], [OK]) as (transport, server):
        call = asyncio.create_task(sample(transport))
        await server.was_asked.wait()
        call.cancel()
        await asyncio.wait([call])
        assert await sample(transport) == b"{}"
        assert [len(heads) for heads in server.heads] == [1, 1]


@pytest.mark.parametrize("num_bytes", [2**16, 2**22])
async def test_bodies_of_any_size(num_bytes: int) -> None:
    async def measure(request: web.Request) -> web.Response:
        return web.json_response(len((await request.json())["a"]))

    app = web.Application(client_max_size=2**24)
    app.router.add_post("/generate", measure)
    async with serving_app(app) as url, aclosing(Transport(url)) as transport:
        assert await transport.sample("/generate", {"a": "x" * num_bytes}) == num_bytes


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize(("host", "is_cancelled"), [("127.0.0.1", False), ("localhost", False), ("localhost", True)])
async def test_closing_or_cancelling_ends_calls_that_are_connecting(
    host: str, is_cancelled: bool, num_steps: int, unused_tcp_port: int
) -> None:
    transport = Transport(f"http://{host}:{unused_tcp_port}")
    call = asyncio.create_task(sample(transport))
    for _ in range(num_steps):
        await asyncio.sleep(0)
    if is_cancelled:
        call.cancel()
    else:
        await transport.aclose()
    with pytest.raises(asyncio.CancelledError if is_cancelled else EngineUnreachable):
        await call
    await transport.aclose()


async def test_closing_ends_calls_under_way() -> None:
    async with serving([OK, OK[:-1]]) as (transport, server):
        await sample(transport)
        server.was_asked.clear()
        call = asyncio.create_task(sample(transport))
        await server.was_asked.wait()
        await transport.aclose()
        with pytest.raises(EngineUnreachable):
            await call
        assert len(server.heads) == 1


async def test_closed_is_closed() -> None:
    async with serving([OK]) as (transport, _):
        await transport.aclose()
        with pytest.raises(EngineUnreachable, match="create a new one"):
            await sample(transport)


async def test_user_of_the_url() -> None:
    async with serving([OK], user="me:p%40ss@") as (transport, server):
        await sample(transport)
        head = server.heads[0][0].split(b"\r\n")
    assert head[0] == b"POST /base/generate HTTP/1.1"
    assert b"Authorization: Basic bWU6cEBzcw==" in head


LONG_S = 2 * CONNECT_TIMEOUT_S


async def some_steps(num_steps: int = 10) -> None:
    """Let the loop do everything that is due."""
    for _ in range(num_steps):
        await asyncio.sleep(0)


def test_what_came_while_it_slept_is_read() -> None:
    async def work(loop: SleptLoop) -> str:
        async with awake_timeout(5.0):
            loop.sleep(60.0)
            await some_steps()
            return "an answer"

    assert run_in_slept_loop(work) == "an answer"


@pytest.mark.parametrize("slept_s", [0.0, 60.0])
def test_it_ends_while_the_process_is_awake(slept_s: float) -> None:
    async def work(loop: SleptLoop) -> None:
        async with awake_timeout(5.0):
            loop.sleep(slept_s)
            await some_steps()
            loop.sleep(5.0 + LATE_S / 2)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run_in_slept_loop(work)


def test_it_ends_where_the_process_sleeps_again_and_again() -> None:
    async def work(loop: SleptLoop) -> None:
        async with awake_timeout(5.0):
            while True:
                loop.sleep(60.0)
                await some_steps()

    with pytest.raises(TimeoutError):
        run_in_slept_loop(work)


async def _told(_: web.Request) -> web.Response:
    return web.json_response({})


@pytest.mark.parametrize("num_steps", range(8))  # the connection is made in one of the first steps
@pytest.mark.parametrize("is_sampling", [False, True])
def test_calls_over_a_connection_that_was_slept_through(is_sampling: bool, num_steps: int) -> None:
    async def work(loop: SleptLoop) -> object:
        app = web.Application()
        app.router.add_get(control.SERVER_INFO, _told)
        app.router.add_post(generate.GENERATE, _told)
        async with serving_app(app) as url, aclosing(Transport(url)) as transport:
            ask = transport.sample(generate.GENERATE, {}) if is_sampling else transport.get(control.SERVER_INFO)
            call = asyncio.create_task(ask)
            await some_steps(num_steps)
            loop.sleep(LONG_S)
            return await call

    assert run_in_slept_loop(work) == {}
