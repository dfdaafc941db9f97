"""What the main process and a worker say to each other, as JSON. Unknown fields are errors on both sides.

main ──▶ worker   WorkerSettings, then RunCall, CancelCall, StatsCall and EnginesCall in any order and number
worker ──▶ main   Ready or Refused, then one answer a RunCall and StatsCall, and Warned in between

Frames over a connected socket: 4 bytes of length, big-endian, and a payload. It knows not what they say.
"""

import asyncio
import contextlib
import socket
import struct
from typing import Literal, Self

from pydantic import TypeAdapter

from areal_agent.engine.address import EngineAddress
from areal_agent.engine.fleet.member import FleetView
from areal_agent.gateway.metrics import GatewayStats
from areal_agent.observe.clock import Span
from areal_agent.rollout.local import LocalSettings
from areal_agent.rollout.runner import RolloutSpec
from areal_agent.section import Section
from areal_agent.types import Status


class WorkerSettings(Section):
    """All that a worker needs to know. `sys_path` is that of the main process: the same workflow is found."""

    number: int
    workflow: str
    sys_path: tuple[str, ...]
    engine: EngineAddress
    shard: str
    local: LocalSettings


class RunCall(Section):
    """Run one rollout. Answered with Ended or Failed when it has ended."""

    kind: Literal["run"] = "run"
    number: int
    spec: RolloutSpec


class CancelCall(Section):
    """Cancel the rollout of RunCall `number`. It has no answer but that of the rollout, whichever way it ended."""

    kind: Literal["cancel"] = "cancel"
    number: int


class StatsCall(Section):
    """Answered with Counted."""

    kind: Literal["stats"] = "stats"
    number: int


class EnginesCall(Section):
    """How the servers of the engine are from now on. It has no answer."""

    kind: Literal["engines"] = "engines"
    view: FleetView


class Ready(Section):
    """The worker takes calls."""

    kind: Literal["ready"] = "ready"


class Refused(Section):
    """The worker cannot work with its settings; it ends."""

    kind: Literal["refused"] = "refused"
    message: str


class Ended(Section):
    """The rollout of a RunCall has ended; the shard has its trajectory."""

    kind: Literal["ended"] = "ended"
    number: int
    status: Status


class Failed(Section):
    """The rollout of a RunCall could not be run at all: the worker's gateway or shard is at fault."""

    kind: Literal["failed"] = "failed"
    number: int
    message: str


class Counted(Section):
    """What a worker has counted since it started, and the engine's busy spans since it was last asked."""

    kind: Literal["counted"] = "counted"
    number: int
    gateway: GatewayStats
    loop_blocked_s: float
    engine_spans: tuple[Span, ...]
    until_s: float  # up to which `engine_spans` are complete; monotonic


class Warned(Section):
    """A warning that the worker has logged, for a person to see."""

    kind: Literal["warned"] = "warned"
    message: str


Call = RunCall | CancelCall | StatsCall | EnginesCall
Answer = Ready | Refused | Ended | Failed | Counted | Warned

_CALL: TypeAdapter[Call] = TypeAdapter(Call)
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer)


def encode(message: WorkerSettings | Call | Answer) -> bytes:
    return message.model_dump_json().encode()


def decode_settings(payload: bytes) -> WorkerSettings:
    return WorkerSettings.model_validate_json(payload)


def decode_call(payload: bytes) -> Call:
    return _CALL.validate_json(payload)


def decode_answer(payload: bytes) -> Answer:
    return _ANSWER.validate_json(payload)


LENGTH = struct.Struct(">I")


class Channel:
    """One end. A socket pair has no port and needs no key, and its end is the news that the other side is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, sock: socket.socket) -> Self:
        """Takes the socket over."""
        return cls(*await asyncio.open_connection(sock=sock))

    def send(self, payload: bytes) -> None:
        """Queue one frame. What is sent to a side that is gone is lost; `receive` tells that it is."""
        self._writer.write(LENGTH.pack(len(payload)) + payload)

    async def receive(self) -> bytes:
        """The next frame. Raises EOFError when the other side is gone, or after `end`."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return await self._reader.readexactly(length)
        except OSError as error:  # the other side was killed with frames unread
            raise EOFError(f"the other side is gone: {error}") from error

    def end(self) -> None:
        """Read no more: `receive` raises EOFError."""
        self._reader.feed_eof()

    async def aclose(self) -> None:
        """Harmless when done before."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
