"""The messages between the main process and a worker, as JSON, and the frames that carry them.

    main ──▶ worker   WorkerSettings, then RunCall, CancelCall, StatsCall and EnginesCall in any order and number
    worker ──▶ main   Ready or Refused, then one answer per RunCall and StatsCall, and Warned in between

A frame is 4 bytes of length, big-endian, and a payload. Unknown fields are errors on both sides.
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
    """All settings of a worker. `sys_path` is the main process's, so that both find the same workflow."""

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
    """Cancel the rollout of RunCall `number`. The RunCall's answer is the only one, whichever way the rollout ended."""

    kind: Literal["cancel"] = "cancel"
    number: int


class StatsCall(Section):
    """Ask for the counters. Answered with Counted."""

    kind: Literal["stats"] = "stats"
    number: int


class EnginesCall(Section):
    """The new states of the engine's servers. It has no answer."""

    kind: Literal["engines"] = "engines"
    view: FleetView


class Ready(Section):
    """The worker takes calls."""

    kind: Literal["ready"] = "ready"


class Refused(Section):
    """The worker cannot work with its settings, and ends."""

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
    """The counters of a worker since it started, and the engine's busy spans since it was last asked."""

    kind: Literal["counted"] = "counted"
    number: int
    gateway: GatewayStats
    loop_blocked_s: float
    engine_spans: tuple[Span, ...]
    until_s: float  # `engine_spans` are complete up to this time; monotonic


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
    """One end of a socket pair, which has no port, needs no key, and ends when the other process does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, sock: socket.socket) -> Self:
        """Open a channel over a connected socket, which it then owns."""
        return cls(*await asyncio.open_connection(sock=sock))

    def send(self, payload: bytes) -> None:
        """Queue one frame. To a side that is gone it is lost, and `receive` reports that."""
        self._writer.write(LENGTH.pack(len(payload)) + payload)

    async def receive(self) -> bytes:
        """Return the next frame. Raises EOFError when the other side is gone, or after `end`."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return await self._reader.readexactly(length)
        except OSError as error:  # the other side was killed with frames unread
            raise EOFError(f"the other side is gone: {error}") from error

    def end(self) -> None:
        """Stop reading: `receive` raises EOFError."""
        self._reader.feed_eof()

    async def aclose(self) -> None:
        """Close the channel. Harmless when done before."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
