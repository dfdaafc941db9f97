"""The memory that a run is estimated to take, against what a machine has: where it fits, and what would make it fit."""

from areal_agent.config import Config
from areal_agent.doctor.finding import Finding, State
from areal_agent.doctor.machine import Machine, gib
from areal_agent.doctor.memory import Need, estimate
from areal_agent.doctor.memory_parts import KEYS
from areal_agent.doctor.shape import ModelShape

TIGHT = 0.95
"""Beyond this share of a place it may not fit: the estimate knows nothing of fragmentation."""

NUM_NAMED = 4


async def memory_findings(shape: ModelShape, config: Config, machine: Machine) -> list[Finding]:
    """One for the machine's memory, and one for each GPU that is used."""
    return [_finding(need, config, machine) for need in estimate(shape, config, machine)]


def _finding(need: Need, config: Config, machine: Machine) -> Finding:
    has = machine.memory_bytes if need.gpu is None else machine.gpu_bytes if need.gpu < machine.num_gpus else 0
    place = "memory" if need.gpu is None else f"GPU {need.gpu}"
    largest = sorted(need.parts, key=lambda part: -part.num_bytes)[:NUM_NAMED]
    parts = ", ".join(f"{part.what} {gib(part.num_bytes)}" for part in largest)
    found = f"about {gib(need.num_bytes)} of {gib(has)}: {parts}{', ...' * (len(need.parts) > NUM_NAMED)}"
    free = machine.available_bytes if need.gpu is None else None
    if not has:
        return _at(place, State.FAIL, f"this machine has no such GPU; {found}", "lower trainer.num_ranks, or add GPUs")
    if need.num_bytes > has:
        return _at(place, State.FAIL, found, advice(need, config))
    if need.num_bytes > TIGHT * has:
        return _at(place, State.WARN, f"{found}; that is tight", advice(need, config))
    if free is not None and need.num_bytes > free:
        return _at(place, State.WARN, f"{found}; {gib(free)} are free now", "end what else takes memory")
    return _at(place, State.OK, found)


def advice(need: Need, config: Config) -> str:
    """What would take the most off, by the largest part."""
    largest = max(need.parts, key=lambda part: part.num_bytes).what
    match largest:
        case "trainer: activations" if not config.trainer.gradient_checkpointing:
            return "set trainer.gradient_checkpointing=true, or lower trainer.tokens_per_micro_batch"
        case "trainer: activations":
            return "lower trainer.tokens_per_micro_batch, or engine.max_context_tokens"
        case _ if largest == KEYS:
            return "set engine.kv_tokens to less, or the share of the GPU in engine.server_args"
        case _ if need.gpu is None:
            return "use a smaller model, or a machine with more memory"
        case _:
            return "spread the trainer by trainer.num_ranks, or keep the engine on other GPUs (--base-gpu-id)"


def _at(place: str, state: State, found: str, change: str = "") -> Finding:
    return Finding(check=place, state=state, found=found, change=change)
