"""Frames on the socket between the main process and the trainer: a JSON header and named arrays. Nothing is pickled.

    4 bytes   length of the header, big-endian
    header    JSON object
    8 bytes   length of the payload, big-endian
    payload   safetensors; empty when there are no arrays

Written and read here for both sides, blocking and asyncio. It knows no command.
"""

import asyncio
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors.numpy import load, save

from areal_agent.types import JsonObject

HEADER_LENGTH = struct.Struct(">I")
PAYLOAD_LENGTH = struct.Struct(">Q")

Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Frame:
    """One message."""

    header: JsonObject
    arrays: Arrays = field(default_factory=dict[str, Any])

    def encode(self) -> bytes:
        header = orjson.dumps(self.header)
        payload = save(dict(self.arrays)) if self.arrays else b""
        return b"".join((HEADER_LENGTH.pack(len(header)), header, PAYLOAD_LENGTH.pack(len(payload)), payload))


class Readable(Protocol):
    """A buffered blocking stream of bytes: `read` gives fewer than asked for at the end only."""

    def read(self, size: int, /) -> bytes: ...


def read_frame(file: Readable) -> Frame:
    """Block until a whole frame has come. Raises EOFError when the other side is gone."""
    header = _exactly(file, _length(HEADER_LENGTH, _exactly(file, HEADER_LENGTH.size)))
    payload = _exactly(file, _length(PAYLOAD_LENGTH, _exactly(file, PAYLOAD_LENGTH.size)))
    return _decode(header, payload)


async def receive_frame(reader: asyncio.StreamReader) -> Frame:
    """Wait until a whole frame has come. Raises EOFError when the other side is gone."""
    header = await reader.readexactly(_length(HEADER_LENGTH, await reader.readexactly(HEADER_LENGTH.size)))
    payload = await reader.readexactly(_length(PAYLOAD_LENGTH, await reader.readexactly(PAYLOAD_LENGTH.size)))
    return _decode(header, payload)


def _exactly(file: Readable, num_bytes: int) -> bytes:
    data = file.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError(f"the other side closed the socket ({len(data)} of {num_bytes} bytes came)")
    return data


def _length(form: struct.Struct, data: bytes) -> int:
    return int(form.unpack(data)[0])


def _decode(header: bytes, payload: bytes) -> Frame:
    return Frame(header=orjson.loads(header), arrays=load(payload) if payload else {})
