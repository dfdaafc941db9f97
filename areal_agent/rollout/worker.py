"""A process that rolls out for a run: `python -m areal_agent.rollout.worker --connect HOST:PORT`.

A run starts any number of them, and is called back at that address (callback.py). A worker has workflows, a gateway and
a ledger shard of its own; the main process decides what is rolled out and when (worker_client.py), and trajectories
reach it through the ledger.
"""

import asyncio
import itertools
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from areal_agent.callback import call_back
from areal_agent.command import Parser, run_command
from areal_agent.engine.fleet.member import FleetView
from areal_agent.errors import ArealAgentError, DiskFull, LedgerError
from areal_agent.ledger.encoding import encode_ending
from areal_agent.ledger.shard import LedgerShard, rows_of
from areal_agent.observe.clock import SpanLog
from areal_agent.process import collect_garbage_rarely, exit_with_parent, start_logging
from areal_agent.protocols import Journal, Sampler
from areal_agent.rollout.local import LocalRollouts, open_local
from areal_agent.rollout.worker_client import (
    CALLS,
    AppendTurn,
    CancelCall,
    Channel,
    CloseSession,
    Counted,
    Ended,
    EnginesCall,
    Failed,
    OpenSession,
    Ready,
    Refused,
    RunCall,
    StatsCall,
    Warned,
    WorkerSettings,
    Write,
    Written,
    encode,
)
from areal_agent.rollout.workflow import load_workflow
from areal_agent.types import GenerateRequest, GenerateResult, SessionRecord, Status, TokenChunk, Trajectory, Turn

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m areal_agent.rollout.worker",
        description="A process of a run that runs workflows; `areal_agent.train` starts it.",
    )
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="where the run expects the worker's call")
    arguments = parser.parse_args(None if argv is None else list(argv))
    exit_with_parent()
    start_logging()
    asyncio.run(work(call_back(arguments.connect)))
    return 0


async def work(sock: socket.socket) -> None:
    """Be a worker of the run that was called back over `sock`, until it ends."""
    channel = await Channel.over(sock)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, channel.end)
    try:
        try:
            settings = WorkerSettings.model_validate_json(await channel.receive())
        except EOFError:  # the run was gone before it said what to do
            return
        async with AsyncExitStack() as stack:
            try:
                server = await _open(settings, channel, stack)
            except ArealAgentError as error:
                channel.send(encode(Refused(message=str(error))))
                return
            collect_garbage_rarely()
            channel.send(encode(Ready()))
            await server.serve()
    finally:
        await channel.aclose()


async def _open(settings: WorkerSettings, channel: Channel, stack: AsyncExitStack) -> "WorkerServer":
    """Set up everything that a worker has, ready for calls; `stack` closes it."""
    sys.path[:] = settings.sys_path
    workflow = load_workflow(settings.workflow)
    remote = RemoteJournal(channel)
    journal: Journal = remote
    if not settings.is_elsewhere:
        journal = shard = await LedgerShard.open(Path(settings.shard), create=True)
        stack.push_async_callback(shard.aclose)
    engine = settings.engine.connect()
    stack.push_async_callback(engine.aclose)
    metered = MeteredSampler(engine)
    rollouts = await stack.enter_async_context(
        open_local(settings.local, workflow, engine=metered, info=settings.info, journal=journal)
    )
    logging.getLogger().addHandler(_WarningsToMain(channel))
    return WorkerServer(channel, rollouts, metered.busy, engine.follow, remote)


class WorkerServer:
    """Carries out calls over `channel`, each rollout in a task of its own, until the channel ends.

    `follow` receives the states of the engine's servers that the main process sends, `journal` its answers to writes.
    """

    def __init__(
        self,
        channel: Channel,
        rollouts: LocalRollouts,
        engine_busy: SpanLog,
        follow: Callable[[FleetView], None],
        journal: "RemoteJournal",
    ) -> None:
        self._channel = channel
        self._rollouts = rollouts
        self._engine_busy = engine_busy
        self._follow = follow
        self._journal = journal
        self._running: dict[int, asyncio.Task[None]] = {}
        self._is_ending = False

    async def serve(self) -> None:
        """Answer until the channel ends; then cancel the rollouts and wait for them."""
        try:
            while True:
                match CALLS.validate_json(await self._channel.receive()):
                    case RunCall() as call:
                        self._start(call)
                    case CancelCall(number=number):
                        if number in self._running:  # otherwise its answer is on its way
                            self._running[number].cancel()
                    case StatsCall(number=number):
                        self._channel.send(encode(await self._count(number)))
                    case EnginesCall(view=view):
                        self._follow(view)
                    case Written() as written:
                        self._journal.written(written)
        except EOFError:
            logger.info("the main process has closed its end; ending")
        finally:
            self._is_ending = True
            self._journal.lose()
            if tasks := set(self._running.values()):
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    def _start(self, call: RunCall) -> None:
        task = asyncio.create_task(self._run(call))
        self._running[call.number] = task
        task.add_done_callback(lambda _: self._running.pop(call.number))

    async def _run(self, call: RunCall) -> None:
        try:
            ended = await self._rollouts.run(call.spec)
        except asyncio.CancelledError:
            self._answer(Ended(number=call.number, status=Status.CANCELLED))
            raise
        except DiskFull as error:
            self._answer(Failed(number=call.number, message=str(error), is_disk_full=True))
        except Exception as error:  # the boundary that turns a failure into an answer
            logger.exception("rollout %s could not be run", call.spec.session_id)
            message = f"{type(error).__name__}: {error}".encode(errors="replace").decode()
            self._answer(Failed(number=call.number, message=message))
        else:
            self._answer(Ended(number=call.number, status=ended.status))

    def _answer(self, answer: Ended | Failed) -> None:
        """Answer a call, unless this process ends: what its sessions ended with may then not be in the ledger.

        A main process that was stopped, and not gone, reads in the ledger what became of them.
        """
        if not self._is_ending:
            self._channel.send(encode(answer))

    async def _count(self, number: int) -> Counted:
        stats = await self._rollouts.stats()
        spans, until_s = self._engine_busy.take()
        return Counted(
            number=number,
            gateway=stats.gateway,
            loop_blocked_s=stats.loop_blocked_s,
            engine_spans=tuple(spans),
            until_s=until_s,
        )


class MeteredSampler:
    """A `protocols.Sampler` around another: `busy` has the spans with at least one request in flight.

    Spans, not seconds, so that the gateways of several processes can be counted as one.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.busy = SpanLog()
        self._sampler = sampler
        self.abort = sampler.abort

    async def generate(
        self, request: GenerateRequest, on_chunk: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        with self.busy.one():
            return await self._sampler.generate(request, on_chunk)


GONE = "the run that keeps the ledger is gone; what it has not confirmed is not written"


class RemoteJournal:
    """The `Journal` of a worker on another machine: the main process writes, and a call returns once that is durable.

    Once the run is gone, every write raises LedgerError.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._is_lost = False

    async def open_session(self, session: SessionRecord) -> None:
        await self._send(OpenSession(number=next(self._numbers), session=session))

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        row, completions = rows_of(turn)
        await self._send(
            AppendTurn(number=next(self._numbers), session_id=session_id, turn=row, completions=completions)
        )

    async def close_session(self, trajectory: Trajectory) -> None:
        ending = encode_ending(trajectory)
        await self._send(CloseSession(number=next(self._numbers), session_id=trajectory.session_id, ending=ending))

    def written(self, answer: Written) -> None:
        """Take the answer to one write."""
        future = self._waiting.pop(answer.number)
        if not future.done():  # otherwise its caller was cancelled
            if answer.error is None:
                future.set_result(None)
            else:
                kind = DiskFull if answer.is_disk_full else LedgerError
                future.set_exception(kind(answer.error))

    def lose(self) -> None:
        """Fail every write: nobody answers any more."""
        self._is_lost = True
        for number in list(self._waiting):
            self.written(Written(number=number, error=GONE))

    async def _send(self, write: Write) -> None:
        if self._is_lost:
            raise LedgerError(GONE)
        future = self._waiting[write.number] = asyncio.get_running_loop().create_future()
        self._channel.send(encode(write))
        await future


class _WarningsToMain(logging.Handler):
    """Sends warnings, also those of threads, to the main process, where a person sees them."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.WARNING)
        self._loop = asyncio.get_running_loop()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().encode(errors="replace").decode()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._channel.send, encode(Warned(message=text)))


if __name__ == "__main__":
    run_command(main)
