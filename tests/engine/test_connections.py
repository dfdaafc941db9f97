"""HTTP for sampling, against servers that send anything.

- an answer is read whole in every form that HTTP has, also byte by byte, and its connection is used again only when
  nothing can follow
- an invalid or incomplete answer is an OSError or a ValueError; heads are bounded
- a call is repeated once, over a new connection, if its used one ended before anything came, and never otherwise
- closing ends the calls under way, also those still connecting; the server is told the user in a URL
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import pytest

from areal_agent.engine.transport import Connections

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
NO_LENGTH = b"HTTP/1.1 200 OK\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;x=y\r\no\r\n1\r\nk\r\n0\r\nA: b\r\n\r\n"
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
UPGRADE = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"
HANG_UP = b""


class Server:
    """Answers the requests of each connection from a list of its own, then hangs up; the last list repeats."""

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
                await reader.readexactly(len(b"body"))
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
    *scripts: Sequence[bytes], in_bytes: bool = False, user: str = ""
) -> AsyncGenerator[tuple[Connections, Server]]:
    server = Server(scripts, in_bytes=in_bytes)
    listener = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    connections = Connections(f"http://{user}127.0.0.1:{port}/base", connect_timeout_s=60)
    try:
        yield connections, server
    finally:
        connections.close()
        listener.close()
        await asyncio.gather(*server.tasks)


async def post(connections: Connections) -> tuple[int, bytes]:
    async with asyncio.timeout(120):  # only a hang is longer
        answer = await connections.post("/generate", b"body")
    return answer.status, answer.payload


@pytest.mark.parametrize("in_bytes", [False, True])
@pytest.mark.parametrize(
    ("answer", "expected", "num_connections"),
    [
        (OK, (200, b"ok"), 1),
        (CHUNKED, (200, b"ok"), 1),
        (EMPTY, (204, b""), 1),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, (200, b"ok"), 1),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + CHUNKED, (200, b"ok"), 1),
        (OK.replace(b"200 OK", b"503 Busy"), (503, b"ok"), 1),
        (OK.replace(b"1.1", b"1.0"), (200, b"ok"), 2),
        (OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"), (200, b"ok"), 2),
    ],
)
async def test_answers_in_every_form(
    answer: bytes, expected: tuple[int, bytes], num_connections: int, in_bytes: bool
) -> None:
    async with serving([answer, answer], in_bytes=in_bytes) as (connections, server):
        assert [await post(connections) for _ in range(2)] == [expected, expected]
        assert len(server.heads) == num_connections


@pytest.mark.parametrize(
    "answer", [NO_LENGTH, NO_LENGTH.replace(b"1.1", b"1.0"), b"HTTP/1.1 100 C\r\n\r\n" + NO_LENGTH]
)
async def test_answer_without_a_length_ends_with_its_connection(answer: bytes) -> None:
    async with serving([answer]) as (connections, server):
        assert [await post(connections) for _ in range(2)] == [(200, b"ok")] * 2
        assert len(server.heads) == 2


@pytest.mark.parametrize("more", [OK, OK[:20]])
async def test_what_follows_an_answer_is_not_taken_for_the_next_one(more: bytes) -> None:
    async with serving([OK + more, OK]) as (connections, server):
        assert [await post(connections) for _ in range(2)] == [(200, b"ok")] * 2
        assert len(server.heads) == 2


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
async def test_what_is_no_answer(answer: bytes) -> None:
    async with serving([answer]) as (connections, server):
        with pytest.raises((OSError, ValueError)):
            await post(connections)
        assert len(server.heads) == 1


@pytest.mark.parametrize("first", [OK, EMPTY])
async def test_call_is_made_again_when_its_used_connection_ends_before_anything_came(first: bytes) -> None:
    async with serving([first, HANG_UP], [OK]) as (connections, server):
        await post(connections)
        assert await post(connections) == (200, b"ok")
        assert [len(heads) for heads in server.heads] == [2, 1]


async def test_call_is_made_again_over_a_new_connection_not_another_used_one() -> None:
    async with serving([OK, HANG_UP], [OK, HANG_UP], [OK]) as (connections, server):
        await asyncio.gather(post(connections), post(connections))
        assert await post(connections) == (200, b"ok")
        assert sorted(len(heads) for heads in server.heads) == [1, 1, 2]


async def test_call_is_made_again_only_once() -> None:
    async with serving([OK, HANG_UP], [HANG_UP]) as (connections, server):
        await post(connections)
        with pytest.raises(ConnectionError, match="before an answer began"):
            await post(connections)
        assert len(server.heads) == 2


async def test_half_an_answer_is_not_asked_for_again() -> None:
    async with serving([OK, OK[:-1]]) as (connections, server):
        await post(connections)
        with pytest.raises(ConnectionError, match="before the answer was whole"):
            await post(connections)
        assert len(server.heads) == 1


async def test_cancelled_call_leaves_no_connection_to_use_again() -> None:
    async with serving([OK[:-1], OK], [OK]) as (connections, server):
        call = asyncio.create_task(post(connections))
        await server.was_asked.wait()
        call.cancel()
        await asyncio.wait([call])
        assert await post(connections) == (200, b"ok")
        assert [len(heads) for heads in server.heads] == [1, 1]


async def test_closing_ends_calls_that_are_connecting() -> None:
    async with serving([OK]) as (connections, server):
        call = asyncio.create_task(post(connections))
        await asyncio.sleep(0)  # it begins
        connections.close()
        with pytest.raises(ConnectionAbortedError):
            await call
        assert not any(server.heads)


async def test_closed_is_closed() -> None:
    async with serving([OK]) as (connections, _):
        connections.close()
        with pytest.raises(ConnectionAbortedError, match="make a new one"):
            await post(connections)


async def test_user_of_the_url() -> None:
    async with serving([OK], user="me:p%40ss@") as (connections, server):
        await post(connections)
        head = server.heads[0][0].split(b"\r\n")
    assert head[0] == b"POST /base/generate HTTP/1.1"
    assert b"Authorization: Basic bWU6cEBzcw==" in head
