"""What the memory estimate is made of: parts, and the constants for what no formula tells. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from areal_agent.doctor.machine import GIB, Machine

FLOAT32_BYTES = 4
BFLOAT16_BYTES = 2

KEYS = "engine: keys and values"

MAIN_BYTES = GIB // 4
WORKER_BYTES = GIB // 4
TORCH_PROCESS_BYTES = GIB // 2
"""Python, torch and transformers, before there is a model."""
CUDA_CONTEXT_BYTES = GIB // 2
"""What a process takes of a GPU by being there: kernels and workspaces."""
SERVER_BYTES = 5 * GIB // 2
"""Of a GPU, beside weights and keys: a foreign server's CUDA graphs, workspaces and activations."""
SERVER_PROCESS_BYTES = 3 * GIB
"""Of the machine: the processes of a server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One thing that takes memory."""

    what: str
    num_bytes: int


def part_of(what: str, num_bytes: int) -> tuple[Part, ...]:
    """Nothing is not worth a line."""
    return (Part(what=what, num_bytes=num_bytes),) if num_bytes else ()


def sum_of(parts: Sequence[Part]) -> int:
    return sum(part.num_bytes for part in parts)


def uses_gpu(device: str, machine: Machine) -> bool:
    """What `auto` takes."""
    return device == "cuda" or (device == "auto" and machine.num_gpus > 0)
