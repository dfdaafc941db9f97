"""The main process's end of the trainer: each command is a coroutine. Imports no torch and starts no process.

One command runs at a time. A reader task, owned by the client, waits for answers and matches them to commands by
number, so the answer to a cancelled command does not confuse the next one.
"""

import asyncio
import contextlib
import itertools
import math
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.credit import reward_parts
from areal_agent.errors import TrainerDied, TrainerError
from areal_agent.trainer.config import TrainerSetup
from areal_agent.trainer.wire import (
    Frame,
    RankCall,
    SaveEnd,
    StepInput,
    StepReport,
    TrainerInfo,
    encode_step,
    error_of,
    receive_frame,
)
from areal_agent.types import JsonObject, RolloutBatch, Weights

INFO = TypeAdapter(TrainerInfo)
CALLS = TypeAdapter(list[RankCall])
SAVE_END = TypeAdapter(SaveEnd)
NO_ARGUMENTS: JsonObject = {}
NO_IMAGES: Mapping[str, bytes] = {}
WEIGHTS: TypeAdapter[Weights] = TypeAdapter(Annotated[Weights, Field(union_mode="left_to_right")])


class TrainerClient:
    """Talks to `python -m areal_agent.trainer` over a socket, which the first command gets from `connect`."""

    def __init__(self, connect: Callable[[], Awaitable[socket.socket]]) -> None:
        """`connect` waits until the process has called back. It raises EOFError when that ends before."""
        self._open = connect
        self._algorithm = AlgorithmConfig()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._end: TrainerDied | None = None

    async def expect(self, num_ranks: int) -> Sequence[RankCall]:
        """Have rank 0 listen for the other ranks; return how they have to be started, before `init`."""
        return CALLS.validate_python((await self._call("expect", {"num_ranks": num_ranks}))["calls"])

    async def init(self, setup: TrainerSetup) -> TrainerInfo:
        """Load the model, on all ranks once they have called.

        Raises ConfigError for a model or a device that cannot be used.
        """
        self._algorithm = setup.algorithm
        return INFO.validate_python(await self._call("init", {"setup": setup.model_dump(mode="json")}))

    async def train_step(
        self,
        batch: RolloutBatch,
        *,
        incarnation: int = 0,
        teacher: Sequence[NDArray[np.float32]] | None = None,
        images: Mapping[str, bytes] = NO_IMAGES,
    ) -> StepReport:
        """Train one step on a batch's records, with the total rewards of its trajectories and their parts by name.

        `incarnation` is that of the run; it tells which tokens were sampled by this trainer's own weights. `teacher`
        are the log-probabilities that a teacher elsewhere gives the loss tokens, [M] a record. `images` has the files
        of the records' images, by digest.
        """
        given = StepInput(
            step=batch.step,
            records=batch.records,
            rewards={trajectory.session_id: trajectory.rewards.total for trajectory in batch.trained},
            parts={trajectory.session_id: reward_parts(trajectory, self._algorithm) for trajectory in batch.trained},
            incarnation=incarnation,
            teacher=teacher,
            images=images,
        )
        answer = await self._call("train_step", given=given)
        # JSON has no NaN: numbers that are not finite arrive as null
        metrics = {name: math.nan if value is None else value for name, value in answer["metrics"].items()}
        return StepReport(
            step=batch.step,
            metrics=metrics,
            seconds=answer["seconds"],
            inputs=answer["inputs"],
            weights=answer["weights"],
        )

    async def publish(self, through_host: bool = False) -> Weights:
        """Copy the weights to where engines read them. They stay intact at least until the next call.

        With `through_host` that is from now on never the memory of a GPU.
        """
        return WEIGHTS.validate_python(await self._call("publish", {"through_host": through_host}))

    async def save(self, directory: Path, *, step: int, incarnation: int, run_state: JsonObject) -> SaveEnd | None:
        """Publish a checkpoint in `directory` and remove old ones (see checkpoint.py).

        A save beside training (`trainer.async_save`) returns None once the weights are copied; `saved` has its end.
        """
        answer = await self._call(
            "save", {"directory": str(directory), "step": step, "incarnation": incarnation, "run_state": run_state}
        )
        return SAVE_END.validate_python(answer) if answer else None

    async def saved(self) -> SaveEnd | None:
        """Return how the asynchronous save ended; None while it is under way."""
        answer = await self._call("saved", {})
        return SAVE_END.validate_python(answer) if answer else None

    async def shutdown(self) -> None:
        """Ask the process to exit."""
        await self._call("shutdown", {})

    async def aclose(self) -> None:
        """Close the socket, which makes the process exit if it still runs. Pending commands raise TrainerDied."""
        self.fail(TrainerDied("the connection to the trainer is closed"))
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        if self._writer is not None:
            self._writer.transport.abort()  # no wait until a trainer that is cut off takes what is queued
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    async def _call(
        self,
        command: str,
        arguments: JsonObject = NO_ARGUMENTS,
        given: StepInput | None = None,
    ) -> dict[str, Any]:
        """Send one command and wait for its answer. Commands are sent in the order of the calls."""
        number = next(self._numbers)
        request = {"number": number, "command": command, **arguments}
        async with self._lock:  # taken before encoding, so that a batch that takes long to encode keeps its place
            encoded = await asyncio.to_thread(_encoded, request, given)
            writer = await self._connect()
            answer = self._answers[number] = asyncio.get_running_loop().create_future()
            try:
                writer.write(encoded)
                header = (await answer).header
            finally:
                del self._answers[number]
        if "error" in header:
            raise error_of(header["error"], TrainerError, f"the trainer's {command} failed")
        return header["result"]

    async def _connect(self) -> asyncio.StreamWriter:
        if self._end is not None:
            raise self._end
        if self._writer is None:
            try:
                sock = await self._open()
            except EOFError:
                raise TrainerDied("the trainer process ended before it called back; its log says why") from None
            reader, self._writer = await asyncio.open_connection(sock=sock)
            self._reading = asyncio.create_task(self._read(reader), name="trainer answers")
        return self._writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand every answer to its command until the trainer closes its end."""
        try:
            while True:
                frame = await receive_frame(reader)
                answer = self._answers.get(frame.header["number"])
                if answer is not None and not answer.done():
                    answer.set_result(frame)
        except (EOFError, OSError):
            self.fail(TrainerDied("the trainer process ended before it answered; its log says why"))

    def fail(self, error: TrainerDied) -> None:
        """Have all commands raise `error`, pending and later ones. The first one counts."""
        self._end = self._end or error
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)


def _encoded(header: JsonObject, given: StepInput | None) -> bytes:
    arguments, arrays = ({}, {}) if given is None else encode_step(given)
    return Frame(header={**header, **arguments}, arrays=arrays).encode()
