"""The worker's end: carries out the calls of the main process, each rollout in a task of its own.

The engine's busy time is kept as spans, so that the gateways of several processes can be counted as one.
"""

import asyncio
import logging
from collections.abc import Callable

from areal_agent.engine.fleet.member import FleetView
from areal_agent.observe.clock import SpanLog
from areal_agent.protocols import Sampler
from areal_agent.rollout.local import LocalRollouts
from areal_agent.rollout.worker.messages import (
    Answer,
    CancelCall,
    Channel,
    Counted,
    Ended,
    EnginesCall,
    Failed,
    RunCall,
    StatsCall,
    decode_call,
    encode,
)
from areal_agent.types import GenerateRequest, GenerateResult, Status, TokenChunk

logger = logging.getLogger(__name__)


class WorkerServer:
    """Answers over `channel` until that ends; then it cancels its rollouts and waits for them.

    `follow` receives the states of the engine's servers that the main process sends.
    """

    def __init__(
        self, channel: Channel, rollouts: LocalRollouts, engine_busy: SpanLog, follow: Callable[[FleetView], None]
    ) -> None:
        self._channel = channel
        self._rollouts = rollouts
        self._engine_busy = engine_busy
        self._follow = follow
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        try:
            while True:
                match decode_call(await self._channel.receive()):
                    case RunCall() as call:
                        self._start(call)
                    case CancelCall(number=number):
                        self._cancel(number)
                    case StatsCall(number=number):
                        self._answer(await self._count(number))
                    case EnginesCall(view=view):
                        self._follow(view)
        except EOFError:
            logger.info("the main process has closed its end; ending")
        finally:
            await self._end_all()

    def _start(self, call: RunCall) -> None:
        task = asyncio.create_task(self._run(call))
        self._running[call.number] = task
        task.add_done_callback(lambda _: self._running.pop(call.number))

    def _cancel(self, number: int) -> None:
        if number in self._running:  # otherwise its answer is on its way
            self._running[number].cancel()

    async def _run(self, call: RunCall) -> None:
        try:
            ended = await self._rollouts.run(call.spec)
        except asyncio.CancelledError:
            self._answer(Ended(number=call.number, status=Status.CANCELLED))
            raise
        except Exception as error:  # the boundary that turns a failure into an answer
            logger.exception("rollout %s could not be run", call.spec.session_id)
            message = f"{type(error).__name__}: {error}".encode(errors="replace").decode()
            self._answer(Failed(number=call.number, message=message))
        else:
            self._answer(Ended(number=call.number, status=ended.status))

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

    def _answer(self, answer: Answer) -> None:
        self._channel.send(encode(answer))

    async def _end_all(self) -> None:
        tasks = set(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class MeteredSampler:
    """A `protocols.Sampler` around another: `busy` has the spans with at least one request in flight."""

    def __init__(self, sampler: Sampler) -> None:
        self.busy = SpanLog()
        self._sampler = sampler

    async def generate(
        self, request: GenerateRequest, on_chunk: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        with self.busy.one():
            return await self._sampler.generate(request, on_chunk)

    async def abort(self, request_id: str) -> None:
        await self._sampler.abort(request_id)
