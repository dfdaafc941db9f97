"""Frames and records on the wire.

- Records come back exactly as they were sent, bit for bit; so do no records.
- A frame larger than any socket buffer passes, blocking and asyncio.
- A socket that closes inside a frame is EOFError on both sides.
"""

import asyncio
import socket
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.trainer.wire import DTYPES, OF_TURNS, Frame, decode_records, encode_records, read_frame, receive_frame
from areal_agent.types import TokenRecord


@st.composite
def records(draw) -> TokenRecord:
    num_tokens = draw(st.integers(0, 12))
    num_turns = draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = {
        field: rng.integers(0, 2**31, num_turns if field in OF_TURNS else num_tokens).astype(dtype)
        for field, dtype in DTYPES.items()
    }
    return TokenRecord(
        session_id=draw(st.text(max_size=5)),
        group_id=draw(st.text(max_size=5)),
        branch=draw(st.integers(0, 3)),
        parent_branch=draw(st.none() | st.integers(0, 3)),
        **values,
    )


@given(st.lists(records(), max_size=5))
def test_records_come_back_bit_for_bit(sent):
    names, arrays = encode_records(sent)
    left, right = socket.socketpair()
    with left, right:
        left.sendall(Frame(header={"records": names}, arrays=arrays).encode())
        with right.makefile("rb") as file:
            frame = read_frame(file)
    received = decode_records(frame.header["records"], frame.arrays)
    assert len(received) == len(sent)
    for one, other in zip(sent, received, strict=True):
        for field in ("session_id", "group_id", "branch", "parent_branch"):
            assert getattr(one, field) == getattr(other, field)
        for field, dtype in DTYPES.items():
            assert getattr(other, field).dtype == dtype
            assert getattr(one, field).tobytes() == getattr(other, field).tobytes()


LARGE = Frame(header={"number": 1}, arrays={"x": np.arange(2_000_000, dtype=np.float32)})


async def read_with_asyncio(sock: socket.socket) -> Frame:
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        return await receive_frame(reader)
    finally:
        writer.close()


async def read_in_a_thread(sock: socket.socket) -> Frame:
    with sock, sock.makefile("rb") as file:
        return await asyncio.to_thread(read_frame, file)


readers = pytest.mark.parametrize("read", [read_with_asyncio, read_in_a_thread])


@readers
async def test_a_large_frame_reaches_every_reader(read):
    left, right = socket.socketpair()
    with left:
        sending = threading.Thread(target=left.sendall, args=(LARGE.encode(),))
        sending.start()
        frame = await read(right)
        sending.join()
    assert np.array_equal(frame.arrays["x"], LARGE.arrays["x"])


@readers
@pytest.mark.parametrize("num_bytes", [0, 3, 10, 1000])
async def test_a_socket_that_closes_inside_a_frame_is_the_end(read, num_bytes):
    left, right = socket.socketpair()
    left.sendall(LARGE.encode()[:num_bytes])
    left.close()
    with pytest.raises(EOFError):
        await read(right)
