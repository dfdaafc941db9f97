"""The host's end of an agent, before an agent that is not to be trusted, played by a server.

1. frames come whole however they are cut; 2. a frame that is too long, of no kind, or too short for its kind is the end
of the container; 3. its stderr is told at its end; 4. more output than was asked for is the end; 5. what is packed is
unpacked, and nothing else is; 6. an agent that never starts a program, or never ends one after its deadline, is given
up, also when it goes on to talk of others; 7. so many are on their way at once and no more; 8. closing returns when the
stream has ended; 9. an agent that was given up may live on, and is said to; 10. one that dies of its programs' memory
or disk is their failure.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.errors import SandboxError
from sandboxes.agent.wire import ENDED, HEADER, MAX_PAYLOAD_BYTES, Ask, Tell, pack, unpack
from sandboxes.cell import ContainerCell, User
from sandboxes.cgroups import Bounds, SharedBounds
from sandboxes.containers.engine import frames
from sandboxes.link import MAX_ON_THE_WAY, OUT_OF_DISK, OUT_OF_MEMORY, AgentLink, AgentRun, Ended
from sandboxes.spec import Limits, Program

LIMITS = Limits(wall_s=60.0, output_bytes=10)
END = ENDED.pack(0, 0, 0, 0, 0, 0, 0, False)


def said(kind: int, number: int, body: bytes) -> bytes:
    return HEADER.pack(kind, number, len(body)) + body


def framed(data: bytes, stream: int = 1) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


@asynccontextmanager
async def engine_that(
    folder: Path, act: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> AsyncIterator[str]:
    """The path of its socket."""

    served: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError):
            await act(reader, writer)
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_unix_server(serve, folder / "engine.sock")
    yield str(folder / "engine.sock")
    server.close()
    await asyncio.gather(*served)


def answering(*pieces: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """Ready at once; after the first request, these pieces."""

    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(framed(said(Tell.READY, 0, b"\0\0")))
        await reader.readexactly(HEADER.size)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        await reader.read()

    return act


async def link_to(path: str, *, silence_s: float = 60.0, has_run_out: bool = False) -> AgentLink:
    reader, writer = await asyncio.open_unix_connection(path)

    async def memory() -> bool:
        return has_run_out

    return AgentLink(frames(reader), writer, memory, silence_s=silence_s)


async def run_on(path: str, *, silence_s: float = 60.0, limits: Limits = LIMITS) -> bytes:
    """What a program prints there."""
    link = await link_to(path, silence_s=silence_s)

    async def nothing(_bounds: Bounds | None = None) -> None: ...

    parts = contextlib.AsyncExitStack()
    parts.push_async_callback(link.aclose)
    cell = ContainerCell(
        reach=link.itself,
        home="/work",
        env={},
        user=User(uid=1, gid=1),
        limits=LIMITS,
        bounds=SharedBounds(Bounds.of(LIMITS), nothing),
        has_users=True,
        parts=parts,
    )
    try:
        return (await cell.exec(Program(argv=("x",)), stdin=b"", limits=limits)).stdout
    finally:
        await cell.close()


async def test_frames_come_whole_however_they_are_cut(tmp_path: Path) -> None:
    answer = framed(said(Tell.STDOUT, 1, b"hello")[:7]) + framed(said(Tell.STDOUT, 1, b"hello")[7:])
    answer += framed(said(Tell.ENDED, 1, END))
    async with engine_that(tmp_path, answering(*(answer[at : at + 1] for at in range(len(answer))))) as path:
        assert await run_on(path) == b"hello"


@pytest.mark.parametrize(
    "frame",
    [
        HEADER.pack(Tell.STDOUT, 1, MAX_PAYLOAD_BYTES + 1),
        said(99, 1, b""),
        said(Tell.ENDED, 1, b"short"),
        said(Tell.ENDED, 1, ENDED.pack(0, 0, 0, 0, 0, 0, 77, False)),
        said(Tell.ENDED, 1, ENDED.pack(0x7F, 0, 0, 0, 0, 0, 0, False)),
        said(Tell.CLOSED, 1, b""),
        said(Tell.CLOSED, 1, bytes([Tell.READY])),
        said(Tell.FAILED, 1, b""),
    ],
)
async def test_frame_that_cannot_be(tmp_path: Path, frame: bytes) -> None:
    async with engine_that(tmp_path, answering(framed(frame))) as path:
        with pytest.raises(SandboxError, match="not the one that was sent"):
            await run_on(path)


async def test_more_output_than_was_asked_for(tmp_path: Path) -> None:
    async with engine_that(tmp_path, answering(framed(said(Tell.STDOUT, 1, bytes(11))))) as path:
        with pytest.raises(SandboxError, match="more output"):
            await run_on(path)


async def test_stderr_is_told_at_the_end(tmp_path: Path) -> None:
    async def die(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(framed(b"exec format error", 2))

    async with engine_that(tmp_path, die) as path:
        link = await link_to(path)
        with pytest.raises(SandboxError, match="exec format error"):
            await link.boot(b"")


@pytest.mark.parametrize(
    ("pieces", "verb"), [((), "start"), ((framed(said(Tell.STARTED, 1, b"")),), "end")], ids=["unstarted", "undying"]
)
async def test_agent_that_says_nothing(tmp_path: Path, pieces: tuple[bytes, ...], verb: str) -> None:
    async with engine_that(tmp_path, answering(*pieces)) as path:
        with pytest.raises(SandboxError, match=f"did not {verb} a program within"):
            await run_on(path, silence_s=0.01, limits=replace(LIMITS, wall_s=0.01))


async def test_host_that_was_stopped_hears_what_came_meanwhile(tmp_path: Path) -> None:
    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(HEADER.size)
        writer.write(framed(said(Tell.STDOUT, 1, b"hello") + said(Tell.ENDED, 1, END)))
        time.sleep(0.5)  # noqa: ASYNC251  # all of this process stands still
        await reader.read()

    async with engine_that(tmp_path, act) as path:
        assert await run_on(path, silence_s=0.1) == b"hello"


async def test_agent_that_talks_of_others(tmp_path: Path) -> None:
    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(framed(said(Tell.READY, 0, b"\0\0")))
        while not reader.at_eof():
            writer.write(framed(said(Tell.STARTED, 77, b"")))
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.001)

    async with engine_that(tmp_path, act) as path:
        with pytest.raises(SandboxError, match="did not start a program within"):
            await run_on(path, silence_s=0.05)


@pytest.mark.parametrize(("has_run_out", "blamed"), [(False, None), (True, OUT_OF_MEMORY), (False, OUT_OF_DISK)])
async def test_agent_that_dies(tmp_path: Path, has_run_out: bool, blamed: Ended | None) -> None:
    """What ran when memory or disk ran out, and what comes later, is the programs' failure."""

    async def act(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(HEADER.size)

    async with engine_that(tmp_path, act) as path:
        link = await link_to(path, has_run_out=has_run_out)
        link.blamed = blamed if blamed is OUT_OF_DISK else None
        for _ in range(2):
            run = AgentRun(0, lambda *_: None)
            with contextlib.nullcontext() if blamed else pytest.raises(SandboxError, match="gone"):
                await link.start(run, b"", output_bytes=-1, is_paced=False)
                assert await run.ended is blamed
        with pytest.raises(OSError if blamed else SandboxError):
            await link.check_alive()
        await link.aclose()


async def test_so_many_are_on_their_way(tmp_path: Path) -> None:
    """Of one more than may be, the last comes when the first has started."""
    seen: list[int] = []

    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(framed(said(Tell.READY, 0, b"\0\0")))
        while len(seen) <= MAX_ON_THE_WAY:
            kind, number, size = HEADER.unpack(await reader.readexactly(HEADER.size))
            await reader.readexactly(size)
            if kind == Ask.START:
                seen.append(number)
                if number == MAX_ON_THE_WAY:
                    writer.write(framed(said(Tell.STARTED, 1, b"")))
                elif number > MAX_ON_THE_WAY:
                    writer.write(b"".join(framed(said(Tell.ENDED, each, END)) for each in seen))
        await reader.read()

    async with engine_that(tmp_path, act) as path:
        link = await link_to(path)

        async def run() -> Ended:
            run = AgentRun(0, lambda *_: None)
            await link.start(run, b"", output_bytes=-1, is_paced=False)
            return await run.ended

        ends = await asyncio.gather(*(run() for _ in range(MAX_ON_THE_WAY + 1)))
        await link.aclose()
    assert len(ends) == MAX_ON_THE_WAY + 1


async def test_closing_waits_for_the_end_of_the_stream(tmp_path: Path) -> None:
    has_ended = False

    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal has_ended
        writer.write(framed(said(Tell.READY, 0, b"\0\0")))
        await reader.read()
        has_ended = True

    async with engine_that(tmp_path, act) as path:
        link = await link_to(path)
        await link.boot(b"")
        await link.aclose()
        assert has_ended
        assert not link.is_given_up
        await link.aclose()  # harmless


async def test_agent_that_was_given_up(tmp_path: Path) -> None:
    async def act(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with engine_that(tmp_path, act) as path:
        link = await link_to(path)
        link.fail("it says what it should not")
        await link.aclose()
        assert link.is_given_up


@given(st.lists(st.binary()))
def test_what_is_packed_is_unpacked(texts: list[bytes]) -> None:
    assert unpack(pack(*texts)) == texts


@given(st.binary())
def test_what_is_not_packed_is_refused(data: bytes) -> None:
    try:
        texts = unpack(data)
    except ValueError:
        return
    assert pack(*texts) == data
