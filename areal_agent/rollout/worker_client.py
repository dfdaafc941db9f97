"""The main process's end of a worker, and the messages and frames that both ends use.

    main ──▶ worker   WorkerSettings, then RunCall, CancelCall, StatsCall, EnginesCall, Written in any order and number
    worker ──▶ main   Ready or Refused, then one answer per RunCall and StatsCall, and Warned in between
                      on another machine also OpenSession, AppendTurn, CloseSession: each answered with Written

A frame is 4 bytes of length, big-endian, and a message as JSON. Unknown fields are errors on both sides.
"""

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import Callable
from typing import Literal, Self, cast

from pydantic import ConfigDict, TypeAdapter

from areal_agent.engine.address import EngineAddress
from areal_agent.engine.fleet.member import FleetView
from areal_agent.errors import ConfigError, DiskFull, WorkerError
from areal_agent.gateway.metrics import GatewayStats
from areal_agent.ledger.encoding import CompletionRow, EndingRow, TurnRow
from areal_agent.ledger.shard import LedgerShard
from areal_agent.observe.clock import Span
from areal_agent.rollout.local import LocalSettings
from areal_agent.rollout.runner import RolloutSpec
from areal_agent.section import Section
from areal_agent.types import EngineInfo, SessionRecord, Status

LENGTH = struct.Struct(">I")
CANCEL_WAIT_S = 15.0
"""The time that a cancelled rollout has to end: a blocked worker must not hold up the end of a run."""


class WorkerSettings(Section):
    """All settings of a worker. `sys_path` is the main process's, so that both find the same workflow.

    `info` is what the engine has told the main process: while a worker starts, its servers may be elsewhere.
    """

    number: int
    workflow: str
    sys_path: tuple[str, ...]
    engine: EngineAddress
    info: EngineInfo
    shard: str
    is_elsewhere: bool = False  # on another machine: the main process writes the shard for it
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


class Written(Section):
    """What the worker wrote under this number is durable, or has failed."""

    kind: Literal["written"] = "written"
    number: int
    error: str | None = None
    is_disk_full: bool = False


class OpenSession(Section):
    """Write the beginning of a session. Answered with Written, as the next two."""

    kind: Literal["open_session"] = "open_session"
    number: int
    session: SessionRecord


class AppendTurn(Section):
    """Write a turn."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    kind: Literal["append_turn"] = "append_turn"
    number: int
    session_id: str
    turn: TurnRow
    completions: tuple[CompletionRow, ...]


class CloseSession(Section):
    """Write the end of a session."""

    kind: Literal["close_session"] = "close_session"
    number: int
    session_id: str
    ending: EndingRow


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
    is_disk_full: bool = False


class Counted(Section):
    """The counters of a worker since it started, and the engine's busy spans since it was last asked."""

    kind: Literal["counted"] = "counted"
    number: int
    gateway: GatewayStats
    loop_blocked_s: float
    engine_spans: tuple[Span, ...]
    until_s: float  # the worker's monotonic clock now; `engine_spans` are complete up to it


class Warned(Section):
    """A warning that the worker has logged, for a person to see."""

    kind: Literal["warned"] = "warned"
    message: str


Call = RunCall | CancelCall | StatsCall | EnginesCall | Written
Write = OpenSession | AppendTurn | CloseSession
Answer = Ready | Refused | Ended | Failed | Counted | Warned | Write

CALLS: TypeAdapter[Call] = TypeAdapter(Call)
ANSWERS: TypeAdapter[Answer] = TypeAdapter(Answer)


def encode(message: Section) -> bytes:
    return message.model_dump_json().encode()


class Channel:
    """One end of a connection between a run and its worker, which ends when either process does."""

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
        cast(asyncio.Transport, self._writer.transport).pause_reading()  # what came after the end would be an error
        self._reader.feed_eof()

    def abort(self) -> None:
        """Drop what is queued: closing would wait for minutes until a side that is cut off takes it."""
        self._writer.transport.abort()

    async def aclose(self) -> None:
        """Close the channel. Harmless when done before."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class WorkerGone(Exception):
    """The worker's process ended before it answered. Its shard has all that is left of the rollout."""


class WorkerClient:
    """Calls `python -m areal_agent.rollout.worker` over a channel, which it owns.

    A reader task, owned by the client, hands every answer to the call with its number. What a worker on another machine
    writes goes to `shard`.
    """

    def __init__(self, channel: Channel, on_warning: Callable[[str], None], shard: LedgerShard | None = None) -> None:
        self._channel = channel
        self._on_warning = on_warning
        self._shard = shard
        self._writes: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._is_gone = False

    async def start(self, settings: WorkerSettings) -> None:
        """Send the settings and wait until the worker takes calls. Raises ConfigError when it refuses them."""
        self._channel.send(encode(settings))
        try:
            answer = await self._receive()
        except EOFError:
            raise WorkerGone from None
        if isinstance(answer, Refused):
            raise ConfigError(answer.message)
        assert isinstance(answer, Ready), answer
        self._reading = asyncio.create_task(self._read(), name="worker answers")

    async def run(self, spec: RolloutSpec) -> Status:
        """Run one rollout to its end. When it is cancelled, its session is ended before that is raised.

        Raises WorkerGone, and WorkerError when the worker could not run it at all.
        """
        number = next(self._numbers)
        answer = self._ask(RunCall(number=number, spec=spec))
        try:
            match await asyncio.shield(answer):
                case Ended(status=status):
                    return status
                case Failed(message=message, is_disk_full=True):
                    raise DiskFull(message)
                case Failed(message=message):
                    raise WorkerError(f"a worker could not run rollout {spec.session_id}: {message}; its log says why")
                case other:
                    raise WorkerError(f"a worker answered {other!r:.200} to the call to run {spec.session_id}")
        except asyncio.CancelledError:
            self._channel.send(encode(CancelCall(number=number)))
            await asyncio.wait({answer}, timeout=CANCEL_WAIT_S)
            raise

    async def stats(self) -> Counted:
        """Return the worker's counters. Raises WorkerGone."""
        answer = await self._ask(StatsCall(number=next(self._numbers)))
        assert isinstance(answer, Counted), answer
        return answer

    def tell_engines(self, view: FleetView) -> None:
        """Tell the worker the new states of the engine's servers."""
        if not self._is_gone:
            self._channel.send(encode(EnginesCall(view=view)))

    async def aclose(self) -> None:
        """Close the socket, which ends the worker if it still runs. Harmless when done before."""
        self._lose_all()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading, *self._writes})
        self._channel.abort()
        await self._channel.aclose()

    def _ask(self, call: RunCall | StatsCall) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[call.number] = answer
        answer.add_done_callback(lambda _: self._answers.pop(call.number))
        answer.add_done_callback(_look_at)
        if self._is_gone:
            answer.set_exception(WorkerGone())
        else:
            self._channel.send(encode(call))
        return answer

    async def _read(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                answer = await self._receive()
                if isinstance(answer, Write):
                    task = asyncio.create_task(self._write(answer))  # in the order of their arrival
                    self._writes.add(task)
                    task.add_done_callback(self._writes.discard)
                    continue
                assert isinstance(answer, Ended | Failed | Counted), answer
                waiting = self._answers.get(answer.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        self._lose_all()

    async def _write(self, write: Write) -> None:
        """Write what a worker asks for, and answer it."""
        assert self._shard is not None, "only a worker elsewhere asks"
        error, is_disk_full = None, False
        try:
            match write:
                case OpenSession():
                    await self._shard.open_session(write.session)
                case AppendTurn():
                    await self._shard.append_rows(write.session_id, write.turn, write.completions)
                case CloseSession():
                    await self._shard.close_with(write.session_id, write.ending)
        except Exception as failure:  # the boundary that turns a failure into an answer
            error, is_disk_full = str(failure) or repr(failure), isinstance(failure, DiskFull)
        if not self._is_gone:
            self._channel.send(encode(Written(number=write.number, error=error, is_disk_full=is_disk_full)))

    async def _receive(self) -> Answer:
        """Return the next answer; warnings before it are passed to `on_warning`."""
        while isinstance(answer := ANSWERS.validate_json(await self._channel.receive()), Warned):
            self._on_warning(answer.message)
        return answer

    def _lose_all(self) -> None:
        self._is_gone = True
        for answer in list(self._answers.values()):
            if not answer.done():
                answer.set_exception(WorkerGone())


def _look_at(answer: asyncio.Future[Answer]) -> None:
    """Mark an error as seen: its waiter may be gone, and asyncio warns of errors that nobody has read."""
    if not answer.cancelled():
        answer.exception()
