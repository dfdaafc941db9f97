"""Digests of what a train step was given and of the weights that it made, and what else its numbers depend on.

With them a replay (areal_agent/replay) compares its steps with the run's, and names what differs. A digest is
XXH3 (64 or 128 bits) of bytes, in hexadecimal: it tells bytes apart by chance alone, and keeps up with memory.
"""

import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
import transformers
import xxhash
from torch import Tensor

from areal_agent import __version__
from areal_agent.trainer.ranks import shard_of
from areal_agent.trainer.wire import IMAGE, NAMES, Arrays
from areal_agent.types import JsonObject

CPU_INFO = Path("/proc/cpuinfo")


def input_digests(given: JsonObject, arrays: Arrays) -> dict[str, str]:
    """Return a digest for each field of a step's records, its rewards and parts, and a teacher's log-probabilities.

    `given` and `arrays` are those of the command `train_step` (wire.py). Images are told apart by their own digests,
    and a step without any has none of this field.
    """
    records: Sequence[Mapping[str, Any]] = given["records"]
    values: dict[str, bytes] = {name: _json([one[name] for one in records]) for name in NAMES}
    values |= {name: _json(sorted(given[name].items())) for name in ("rewards", "parts")}
    values |= {name: array.tobytes() for name, array in arrays.items() if not name.startswith(IMAGE)}
    if not any(one["images"] for one in records):
        del values["images"]
    return {name: xxhash.xxh3_64_hexdigest(value) for name, value in sorted(values.items())}


def _json(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def weights_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the digest of named tensors, in their order: of this rank's shards where they are sharded."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        shard = shard_of(tensor.detach()).contiguous().cpu()
        digest.update(f"{name} {shard.dtype} {tuple(shard.shape)}".encode())
        digest.update(shard.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digest_of_ranks(digests: Sequence[str]) -> str:
    """Return one digest for those of all ranks; that of one rank is its own."""
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_hexdigest("".join(digests).encode())


def numerics(device: torch.device) -> dict[str, str]:
    """Return what the last bits of a step depend on besides its input: versions, processor or GPU, threads."""
    found = {
        "areal_agent": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device.type,
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return found


def _processor() -> str:
    """Return the processor's name as Linux tells it."""
    if CPU_INFO.is_file():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
