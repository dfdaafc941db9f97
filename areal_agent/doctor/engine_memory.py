"""What an engine takes, one process or several servers; the formulas stand in memory.py. Pure arithmetic."""

from dataclasses import dataclass

from areal_agent.config import Config
from areal_agent.doctor.machine import GIB, Machine
from areal_agent.doctor.memory_parts import (
    BFLOAT16_BYTES,
    CUDA_CONTEXT_BYTES,
    FLOAT32_BYTES,
    KEYS,
    SERVER_BYTES,
    SERVER_PROCESS_BYTES,
    TORCH_PROCESS_BYTES,
    Part,
    part_of,
    uses_gpu,
)
from areal_agent.doctor.shape import ModelShape
from areal_agent.engine.gpus import EnginePlan
from areal_agent.engine.kv_default import default_kv_tokens

NEW_WEIGHTS = "engine: new weights before they serve"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Of the engine, one process or several servers; nothing of one that runs already."""

    shape: ModelShape
    config: Config
    machine: Machine

    def on_gpu(self, number: int) -> tuple[Part, ...]:
        """What it takes of one GPU."""
        plan = self._plan
        num_servers = plan.num_servers_on(number) if self._is_gpu and self._is_started else 0
        if not num_servers:
            return ()
        weights = BFLOAT16_BYTES * self.shape.num_parameters // plan.num_shards
        kv = self._kv_bytes(weights, num_shards=plan.num_shards)
        return (
            Part(what="engine: weights", num_bytes=num_servers * weights),
            Part(what=KEYS, num_bytes=num_servers * kv),
            *part_of("engine: logits", num_servers * self._logits()),
            *part_of(NEW_WEIGHTS, weights if self._stages_on_gpu else 0),
            Part(what="engine: CUDA", num_bytes=num_servers * self._overhead()),
        )

    def on_machine(self) -> tuple[Part, ...]:
        """What it takes of the machine's memory."""
        if not self._is_started:
            return ()
        number = self.config.engine.num_servers
        process = TORCH_PROCESS_BYTES if self._is_embedded else SERVER_PROCESS_BYTES
        parts = (Part(what="engine: processes", num_bytes=number * process),)
        if self._is_gpu:
            return (*parts, *part_of(NEW_WEIGHTS, number * self._staged(BFLOAT16_BYTES)))
        weights = FLOAT32_BYTES * self.shape.num_parameters
        return (
            *parts,
            Part(what="engine: weights", num_bytes=number * weights),
            Part(what=KEYS, num_bytes=number * self._kv_bytes(weights, num_shards=1)),
            *part_of("engine: logits", number * self._logits()),
            *part_of(NEW_WEIGHTS, number * self._staged(FLOAT32_BYTES)),
        )

    def _staged(self, element: int) -> int:
        """What one server has of new weights in the machine's memory, and of those before, to put them back."""
        if self._is_gpu and self._stages_on_gpu:
            return 0
        holds_two = self._is_distributed and not self._is_embedded  # in each process of a server
        return (2 * self._plan.num_gpus if holds_two else 1) * element * self.shape.num_parameters

    def _kv_bytes(self, weights: int, *, num_shards: int) -> int:
        """As many tokens as the config says, or as the engine takes by itself."""
        element = BFLOAT16_BYTES if self._is_gpu else FLOAT32_BYTES
        token = max(1, self.shape.kv_bytes(element) // num_shards)
        place = self.machine.gpu_bytes if self._is_gpu else self.machine.memory_bytes
        kv_tokens, leave_gib = self.config.engine.kv_tokens, self.config.engine.leave_gib
        if self._is_embedded:
            kv_tokens = kv_tokens or default_kv_tokens(
                is_gpu=self._is_gpu,
                free_bytes=place - weights,
                all_bytes=place,
                leave_bytes=None if leave_gib is None else int(leave_gib * GIB),
                num_sharing=self._plan.num_sharing,
                token_bytes=token,
                num_slots=self.config.engine.max_running_requests,
                max_context_tokens=self.config.engine.max_context_tokens,
            )
            return kv_tokens * token
        within = self._overhead() if self._plan.is_share_of_all else 0
        share = max(0, int(self._plan.memory_fraction * place) - weights - within)
        return share if kv_tokens is None else min(share, kv_tokens * token)

    def _logits(self) -> int:
        """A server's are among its graphs and workspaces."""
        if not self._is_embedded:
            return 0
        return 2 * FLOAT32_BYTES * self.shape.vocab_size * self.config.engine.max_running_requests

    def _overhead(self) -> int:
        return CUDA_CONTEXT_BYTES if self._is_embedded else SERVER_BYTES

    @property
    def _plan(self) -> EnginePlan:
        return EnginePlan.of(self.config.engine)

    @property
    def _is_distributed(self) -> bool:
        return self.config.trainer.transfer == "distributed"

    @property
    def _stages_on_gpu(self) -> bool:
        return self._is_embedded and self.config.trainer.transfer in ("cuda_ipc", "distributed")

    @property
    def _is_embedded(self) -> bool:
        return self.config.engine.backend == "embedded"

    @property
    def _is_started(self) -> bool:
        return not self.config.engine.urls and self.config.engine.url is None

    @property
    def _is_gpu(self) -> bool:
        return uses_gpu(self.config.engine.device, self.machine)
