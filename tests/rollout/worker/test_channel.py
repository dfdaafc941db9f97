"""Frames over a socket pair: 1. they arrive whole, in order, of any size; 2. the end of the other side is EOFError, in
the middle of a frame and after a reset too; 3. an end that was ended reads no more."""

import asyncio
import socket
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from areal_agent.rollout.worker.messages import LENGTH, Channel

Ends = tuple[Channel, Channel]


@pytest_asyncio.fixture
async def ends() -> AsyncGenerator[Ends]:
    one, other = socket.socketpair()
    channels = await Channel.over(one), await Channel.over(other)
    yield channels
    for channel in channels:
        await channel.aclose()


async def test_frames_arrive_whole_and_in_order(ends: Ends) -> None:
    payloads = [b"", b"a", b"x" * 5_000_000, b"last"]
    for payload in payloads:
        ends[0].send(payload)
    assert [await ends[1].receive() for _ in payloads] == payloads


async def test_the_end_of_the_other_side(ends: Ends) -> None:
    ends[0].send(b"last words")
    await ends[0].aclose()
    assert await ends[1].receive() == b"last words"
    with pytest.raises(EOFError):
        await ends[1].receive()


async def test_an_end_in_the_middle_of_a_frame() -> None:
    ours, theirs = socket.socketpair()
    channel = await Channel.over(ours)
    theirs.sendall(LENGTH.pack(10) + b"half")
    theirs.close()
    with pytest.raises(EOFError):
        await channel.receive()
    await channel.aclose()


async def test_a_side_that_is_killed_with_frames_unread() -> None:
    ours, theirs = socket.socketpair()
    channel = await Channel.over(ours)
    channel.send(b"never read")
    theirs.close()
    with pytest.raises(EOFError):
        await channel.receive()
    await channel.aclose()


async def test_an_ended_channel_reads_no_more(ends: Ends) -> None:
    waiting = asyncio.create_task(ends[0].receive())
    await asyncio.sleep(0)
    ends[0].end()
    with pytest.raises(EOFError):
        await waiting
