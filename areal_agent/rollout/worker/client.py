"""The main process's end of a worker: its calls as coroutines.

A reader task, owned by the client, hands every answer to the call with its number.
"""

import asyncio
import itertools
import socket
from collections.abc import Callable

from areal_agent.engine.fleet.member import FleetView
from areal_agent.errors import ConfigError, WorkerError
from areal_agent.rollout.runner import RolloutSpec
from areal_agent.rollout.worker.messages import (
    Answer,
    Call,
    CancelCall,
    Channel,
    Counted,
    Ended,
    EnginesCall,
    Failed,
    Ready,
    Refused,
    RunCall,
    StatsCall,
    Warned,
    WorkerSettings,
    decode_answer,
    encode,
)
from areal_agent.types import Status

CANCEL_WAIT_S = 15.0
"""The time that a cancelled rollout has to end: a blocked worker must not hold up the end of a run."""


class WorkerGone(Exception):
    """The worker's process ended before it answered. Its shard has all that is left of the rollout."""


class WorkerClient:
    """Speaks to `python -m areal_agent.rollout.worker` over a connected socket, which it owns."""

    def __init__(self, sock: socket.socket, on_warning: Callable[[str], None]) -> None:
        self._socket = sock
        self._on_warning = on_warning
        self._channel: Channel | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._is_gone = False

    async def start(self, settings: WorkerSettings) -> None:
        """Send the settings and wait until the worker takes calls. Raises ConfigError when it refuses them."""
        self._channel = await Channel.over(self._socket)
        self._channel.send(encode(settings))
        try:
            answer = await self._receive(self._channel)
        except EOFError:
            raise WorkerGone from None
        if isinstance(answer, Refused):
            raise ConfigError(answer.message)
        assert isinstance(answer, Ready), answer
        self._reading = asyncio.create_task(self._read(self._channel), name="worker answers")

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
                case Failed(message=message):
                    raise WorkerError(f"a worker could not run rollout {spec.session_id}: {message}; its log says why")
                case other:
                    raise WorkerError(f"a worker answered {other!r:.200} to the call to run {spec.session_id}")
        except asyncio.CancelledError:
            self._send(CancelCall(number=number))
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
            self._send(EnginesCall(view=view))

    async def aclose(self) -> None:
        """Close the socket, which ends the worker if it still runs. Harmless when done before."""
        self._lose_all()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        if self._channel is None:
            self._socket.close()
        else:
            await self._channel.aclose()

    def _ask(self, call: RunCall | StatsCall) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_look_at)
        self._answers[call.number] = answer
        answer.add_done_callback(lambda _: self._answers.pop(call.number))
        if self._is_gone:
            answer.set_exception(WorkerGone())
        else:
            self._send(call)
        return answer

    def _send(self, call: Call) -> None:
        assert self._channel is not None, "start comes first"
        self._channel.send(encode(call))

    async def _read(self, channel: Channel) -> None:
        try:
            while True:
                answer = await self._receive(channel)
                assert isinstance(answer, Ended | Failed | Counted), answer
                waiting = self._answers.get(answer.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except EOFError:
            self._lose_all()

    async def _receive(self, channel: Channel) -> Answer:
        """Return the next answer; warnings before it are passed to `on_warning`."""
        while isinstance(answer := decode_answer(await channel.receive()), Warned):
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
