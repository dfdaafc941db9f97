"""The socket between the main process and the trainer: frames, a step's records as arrays, and the trainer's answers.

A frame is a JSON header and named arrays; nothing is pickled. It can be read by blocking code and by asyncio.

    4 bytes   length of the header, big-endian
    header    JSON object
    8 bytes   length of the payload, big-endian
    payload   safetensors; empty when there are no arrays

Imports no torch.
"""

import asyncio
import struct
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors.numpy import load, save

from areal_agent.errors import ConfigError, DiskFull, TakenOver, TrainerDied
from areal_agent.types import ImageSpan, JsonObject, TokenRecord

HEADER_LENGTH = struct.Struct(">I")
PAYLOAD_LENGTH = struct.Struct(">Q")
DTYPES = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "turn_index": np.int32,
    "behavior_logprobs": np.float32,
    "temperatures": np.float32,
    "versions": np.int32,
    "incarnations": np.int32,
    "turn_rewards": np.float32,
    "truncated": np.bool_,
}
"""The arrays of a record: one number for each token, or for each turn (OF_TURNS)."""
OF_TURNS = ("turn_rewards", "truncated")
NAMES = [one.name for one in fields(TokenRecord) if one.name not in DTYPES]
NUM_TRACEBACK_LINES = 8
Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInput:
    """The input of one train step. Rewards and parts are by session id, for each rollout that has a record."""

    step: int  # the version of the weights that the step produces
    records: Sequence[TokenRecord]
    rewards: Mapping[str, float]  # in total
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])  # named
    incarnation: int = 0  # of the starting weights: tokens of this incarnation and version step - 1 are fresh
    teacher: Sequence[NDArray[np.float32]] | None = None  # log-probabilities of a server's teacher, [M] a record
    images: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  # the files of the records' images, by digest


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The result of one train step. The names in `metrics` are those of `trainer.step.Stepper.train`."""

    step: int
    metrics: Mapping[str, float]
    seconds: float
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])  # digests of what was given, by field
    weights: str = ""  # the digest of the trained weights after the step (digests.py); "" from `fit`


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerInfo:
    """The trainer's report once it has loaded its model."""

    step: int  # of the checkpoint that it resumed from; 0 for a model folder
    num_parameters: int
    device: str
    weights: str  # the digest of the trained weights that it begins with
    frozen: str  # the digest of those that stay as they are: below adapters, of a reference or a teacher
    numerics: Mapping[str, str]  # what the last bits of its steps depend on: versions, processor, threads


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCall:
    """How a rank other than 0 has to be started, so that it can call rank 0 (callback.py)."""

    options: Sequence[str]  # the last words of its command line
    variables: Mapping[str, str]  # of its environment


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveEnd:
    """How a save ended: with a checkpoint's folder, or with the reason why its files could not be written."""

    path: Path | None = None
    fault: str | None = None


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
    """A buffered blocking byte stream: `read` returns fewer bytes than asked for only at the end."""

    def read(self, size: int, /) -> bytes: ...


def read_frame(file: Readable) -> Frame:
    """Block until a whole frame has arrived. Raises EOFError when the other side is gone."""
    header = _exactly(file, _length(HEADER_LENGTH, _exactly(file, HEADER_LENGTH.size)))
    payload = _exactly(file, _length(PAYLOAD_LENGTH, _exactly(file, PAYLOAD_LENGTH.size)))
    return _decode(header, payload)


async def receive_frame(reader: asyncio.StreamReader) -> Frame:
    """Wait until a whole frame has arrived. Raises EOFError when the other side is gone."""
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


def encode_records(records: Sequence[TokenRecord]) -> tuple[list[JsonObject], Arrays]:
    """Return the records' names and lengths, and one array for each field, concatenated over all records."""
    names: list[JsonObject] = [
        {name: getattr(record, name) for name in NAMES}
        | {"num_tokens": len(record.token_ids), "num_turns": len(record.turn_rewards)}
        for record in records
    ]
    if not records:
        return names, {}
    return names, {
        name: np.concatenate([getattr(record, name) for record in records]).astype(dtype, copy=False)
        for name, dtype in DTYPES.items()
    }


def decode_records(names: Sequence[JsonObject], arrays: Arrays) -> tuple[TokenRecord, ...]:
    """Read what `encode_records` returned."""
    tokens = np.cumsum([0, *(one["num_tokens"] for one in names)])
    turns = np.cumsum([0, *(one["num_turns"] for one in names)])
    records: list[TokenRecord] = []
    for index, one in enumerate(names):
        values = {name: one[name] for name in NAMES}
        values["images"] = tuple(span if isinstance(span, ImageSpan) else ImageSpan(**span) for span in one["images"])
        for name in DTYPES:
            ends = turns if name in OF_TURNS else tokens
            values[name] = arrays[name][ends[index] : ends[index + 1]]
        records.append(TokenRecord(**values))
    return tuple(records)


IMAGE = "image/"
"""What the arrays of images are named by, before their digests: the bytes of a file each."""


def encode_images(images: Mapping[str, bytes]) -> Arrays:
    return {f"{IMAGE}{digest}": np.frombuffer(data, dtype=np.uint8) for digest, data in images.items()}


def decode_images(arrays: Arrays) -> dict[str, bytes]:
    """Read what `encode_images` returned, and nothing else."""
    return {name.removeprefix(IMAGE): one.tobytes() for name, one in arrays.items() if name.startswith(IMAGE)}


TEACHER = "teacher"
"""The array of a teacher's log-probabilities, of the loss tokens of all records."""


def encode_step(given: StepInput) -> tuple[JsonObject, Arrays]:
    """Return the arguments and the arrays of the command `train_step`."""
    names, arrays = encode_records(given.records)
    arrays = {**arrays, **encode_images(given.images)}
    if given.teacher is not None:
        arrays = {**arrays, TEACHER: np.concatenate([np.zeros(0, dtype=np.float32), *given.teacher])}
    values = {name: getattr(given, name) for name in ("step", "incarnation", "rewards", "parts")}
    return {**values, "records": names}, arrays


def decode_step(arguments: JsonObject, arrays: Arrays) -> StepInput:
    """Read what `encode_step` returned."""
    records = decode_records(arguments["records"], arrays)
    return StepInput(
        step=arguments["step"],
        records=records,
        rewards=arguments["rewards"],
        parts=arguments["parts"],
        incarnation=arguments["incarnation"],
        teacher=decode_teacher(records, arrays),
        images=decode_images(arrays),
    )


def decode_teacher(records: Sequence[TokenRecord], arrays: Arrays) -> list[NDArray[np.float32]] | None:
    """Read the log-probabilities of a teacher, [M] a record; None where the batch came without."""
    if TEACHER not in arrays:
        return None
    ends = np.cumsum([int(record.loss_mask.sum()) for record in records])
    return np.split(arrays[TEACHER].astype(np.float32, copy=False), ends)[:-1]


def describe_error(error: Exception) -> JsonObject:
    lines = "".join(traceback.format_exception(error)).splitlines()
    return {"type": type(error).__name__, "message": str(error), "traceback": lines[-NUM_TRACEBACK_LINES:]}


AS_IT_WAS = (ConfigError, DiskFull, TakenOver, TrainerDied)


def error_of(described: JsonObject, kind: type[Exception], what: str) -> Exception:
    """Return what `describe_error` was given: an error of `AS_IT_WAS`, or a `kind`, which `what` introduces."""
    for known in AS_IT_WAS:
        if described["type"] == known.__name__:
            return known(described["message"])
    where = "".join(f"\n    {line}" for line in described["traceback"])
    return kind(f"{what}: {described['type']}: {described['message']}{where}")
