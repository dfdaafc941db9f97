"""The main process's end of the trainer: each command is a coroutine. Imports no torch and starts no process.

One command runs at a time. A reader task, owned by the client, waits for answers and matches them to commands by
number, so the answer to a cancelled command does not confuse the next one.
"""

import asyncio
import contextlib
import itertools
import math
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.errors import ArealAgentError, ConfigError, ProcessDied, TrainerError
from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.wire import Frame, StepReport, TrainerInfo, encode_records, receive_frame
from areal_agent.types import (
    DiskWeights,
    DistributedWeights,
    JsonObject,
    RolloutBatch,
    SharedMemoryWeights,
    TensorEntry,
    TokenRecord,
    Weights,
)


class TrainerClient:
    """Talks to `python -m areal_agent.trainer` over a connected socket, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._end: ProcessDied | None = None

    async def init(
        self,
        *,
        model: Path,
        base: Path | None = None,
        trainer: TrainerConfig,
        algorithm: AlgorithmConfig,
        seed: int,
        shared_memory: Path,
        resume: bool = True,
        chat_template: str | None = None,
        num_steps: int = 1,
        shares_gpu: bool = False,
    ) -> TrainerInfo:
        """Load `model`, a Hugging Face folder. With `resume`, also load the training state if it is a checkpoint.

        This must be the first command. `base` is the model folder that the run began with, which the adapters of a
        checkpoint need. `chat_template` is saved with every checkpoint; None means that of `model`. The learning rate
        schedule spans `num_steps`. `shared_memory` is the folder in which weights are published. `shares_gpu` means
        that an engine uses the same GPU between steps. Raises ConfigError for a model or a device that cannot be used.
        """
        answer = await self._call(
            "init",
            {
                "model": str(model),
                "base": str(base) if base else None,
                "trainer": trainer.model_dump(mode="json"),
                "algorithm": algorithm.model_dump(mode="json"),
                "seed": seed,
                "shared_memory": str(shared_memory),
                "resume": resume,
                "chat_template": chat_template,
                "num_steps": num_steps,
                "shares_gpu": shares_gpu,
            },
        )
        process_ids = tuple(answer.pop("rank_process_ids"))
        return TrainerInfo(**answer, rank_process_ids=process_ids)

    async def train_step(self, batch: RolloutBatch, *, incarnation: int = 0) -> StepReport:
        """Train one step on a batch's records, with the total rewards of its trajectories and their named parts.

        `incarnation` is that of the run; it tells which tokens were sampled by this trainer's own weights.
        """
        rewards = {trajectory.session_id: trajectory.rewards.total for trajectory in batch.trained}
        parts = {trajectory.session_id: dict(trajectory.rewards.parts) for trajectory in batch.trained}
        answer = await self._call(
            "train_step",
            {"step": batch.step, "incarnation": incarnation, "rewards": rewards, "parts": parts},
            records=batch.records,
        )
        # JSON has no NaN: numbers that are not finite arrive as null
        metrics = {name: math.nan if value is None else value for name, value in answer["metrics"].items()}
        return StepReport(step=batch.step, metrics=metrics, seconds=answer["seconds"])

    async def publish(self) -> Weights:
        """Copy the weights to where engines read them. They stay intact at least until the next call."""
        answer = await self._call("publish", {})
        if "host" in answer:
            answer["entries"] = tuple(_tensor_entry(one) for one in answer["entries"])
            return DistributedWeights(**answer)
        if "entries" not in answer:
            return DiskWeights(path=answer["path"])
        entries = tuple(_tensor_entry(one) for one in answer["entries"])
        return SharedMemoryWeights(path=answer["path"], entries=entries, crc32=answer["crc32"])

    async def save(self, directory: Path, *, step: int, incarnation: int, run_state: JsonObject) -> Path:
        """Publish a checkpoint in `directory`, remove old ones (see checkpoint.py) and return its folder."""
        answer = await self._call(
            "save",
            {"directory": str(directory), "step": step, "incarnation": incarnation, "run_state": run_state},
        )
        return Path(answer["path"])

    async def shutdown(self) -> None:
        """Ask the process to exit."""
        await self._call("shutdown", {})

    async def aclose(self) -> None:
        """Close the socket, which makes the process exit if it still runs. Pending commands raise ProcessDied."""
        self._fail(ProcessDied("the connection to the trainer is closed"))
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    async def _call(
        self, command: str, arguments: JsonObject, records: Sequence[TokenRecord] | None = None
    ) -> dict[str, Any]:
        """Send one command and wait for its answer. Commands are sent in the order of the calls."""
        number = next(self._numbers)
        request = {"number": number, "command": command, **arguments}
        async with self._lock:  # taken before encoding, so that a batch that takes long to encode keeps its place
            encoded = await asyncio.to_thread(_encoded, request, records)
            writer = await self._connect()
            answer = self._answers[number] = asyncio.get_running_loop().create_future()
            try:
                writer.write(encoded)
                header = (await answer).header
            finally:
                del self._answers[number]
        if "error" in header:
            raise _error_of(command, header["error"])
        return header["result"]

    async def _connect(self) -> asyncio.StreamWriter:
        if self._end is not None:
            raise self._end
        if self._writer is None:
            reader, self._writer = await asyncio.open_connection(sock=self._socket)
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
            self._fail(ProcessDied("the trainer process ended before it answered; its log says why"))

    def _fail(self, error: ProcessDied) -> None:
        self._end = self._end or error
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)


def _encoded(header: JsonObject, records: Sequence[TokenRecord] | None) -> bytes:
    if records is None:
        return Frame(header=header).encode()
    names, arrays = encode_records(records)
    return Frame(header={**header, "records": names}, arrays=arrays).encode()


def _tensor_entry(values: dict[str, Any]) -> TensorEntry:
    values["shape"] = tuple(values["shape"])
    return TensorEntry(**values)


def _error_of(command: str, error: JsonObject) -> ArealAgentError:
    if error["type"] == ConfigError.__name__:
        return ConfigError(error["message"])
    where = "".join(f"\n    {line}" for line in error["traceback"])
    return TrainerError(f"the trainer's {command} failed: {error['type']}: {error['message']}{where}")
