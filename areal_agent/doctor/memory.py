"""How much memory a run takes, by place: this machine's, and each GPU's. Pure arithmetic; it measures nothing.

P parameters, V vocabulary, H hidden size, I intermediate size, L layers, Q D and K D sizes of queries and of keys (the
rest of the letters: shape.py). N trainer ranks. T tokens that go through the trainer's model at once: the budget of a
micro-batch, or the longest context where that may go alone. Bytes:

    a rank of the trainer, always      12 P / N         weights and Adam's two moments, in float32
                                        4 P / N         a reference (algorithm.reference)
                                       12 (P' + H) / N  a critic, whose P' are the policy's below its output layer
      while it trains, besides          4 P / N         gradients, and 4 (P' + H) / N of a critic
                                        2 P             on a GPU: the matrices in bfloat16, kept for the backward pass
                                        4 (V H + 2 layers)  with N > 1: what is gathered at a time
                                        T (L + 1) a     activations; checkpointed: T (4 H L + 2 a)
                                       20 min(T V, 2^24)    logits of one chunk: five float32 tensors of them
                                        6 V H           the gradient of the output layer on its way (on a CPU 4 V H)
      while it updates, besides         8 P / N         gradients, and AdamW's own workspace
      while it loads                    4 P             of each model, whole, before it is spread
      while it publishes, N > 1         4 P             more on rank 0: the weights in one piece

      a, of a token and a layer, on a GPU (residuals and norms in float32, the rest in bfloat16):
              26 H + 6 Q D + 4 K D + 8 I  + 6 (Q D + K D) where queries and keys are normalised
      and on a CPU, all in float32:
              24 H + 12 Q D + 8 K D + 16 I  + 8 (Q D + K D)

    an engine                           e P             weights, e bytes each: 4 on a CPU, 2 on a GPU
                                        2 e L K D       keys and values of one token, times the tokens kept
                                        8 V R           logits of R running requests
      with SGLang                       what `--mem-fraction-static` gives, or `kv_tokens` where that is less

    new weights on their way            2 e P           in shared memory (two slots), and e P once more in the engine;
                                          e P           with `cuda_ipc`: in the GPU that both share

Where an engine lends the memory of its keys (`engine.release_kv`), they and a train step are never there at once.

The constants below stand for what no formula tells: Python and its libraries, CUDA, an engine's graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from areal_agent.config import Config
from areal_agent.doctor.engine_gpus import EnginePlan
from areal_agent.doctor.machine import GIB, Machine
from areal_agent.doctor.shape import ModelShape
from areal_agent.engine.kv_default import default_kv_tokens

FLOAT32_BYTES = 4
BFLOAT16_BYTES = 2
LOGITS_A_CHUNK = 2**24  # algorithms/logprobs.py
LOGIT_BYTES = 20
NUM_SLOTS = 2  # weights/shared_memory.py

KEYS = "engine: keys and values"

MAIN_BYTES = GIB // 4
WORKER_BYTES = GIB // 4
TORCH_PROCESS_BYTES = GIB // 2
"""Python, torch and transformers, before there is a model."""
CUDA_CONTEXT_BYTES = GIB // 2
"""What a process takes of a GPU by being there: kernels and workspaces."""
SERVER_BYTES = 5 * GIB // 2
"""Of a GPU, beside weights and keys: an SGLang server's CUDA graphs, workspaces and activations."""
SERVER_PROCESS_BYTES = 3 * GIB
"""Of the machine: the processes of a server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One thing that takes memory."""

    what: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What a run takes in one place at the most."""

    gpu: int | None  # its number; None: the machine's memory
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return _sum(self.parts)


def estimate(shape: ModelShape, config: Config, machine: Machine) -> tuple[Need, ...]:
    """What a run of `config` takes of `machine`, and of each of its GPUs that is used."""
    trainer = TrainerMemory(shape=shape, config=config, is_gpu=uses_gpu(config.trainer.device, machine))
    engine = EngineMemory(shape=shape, config=config, machine=machine)
    host = [Part(what="main process", num_bytes=MAIN_BYTES)]
    host += _part("rollout workers", config.rollout.workers * WORKER_BYTES)
    host += [*engine.on_machine(), *trainer.on_machine(), *trainer.on_its_way()]
    ranks = config.trainer.num_ranks if trainer.is_gpu else 0
    numbers = range(max(machine.num_gpus, ranks))
    gpus = {number: _on_gpu(engine, trainer, number, has_rank=number < ranks) for number in numbers}
    return (
        Need(gpu=None, parts=tuple(host)),
        *(Need(gpu=number, parts=parts) for number, parts in gpus.items() if parts),
    )


def _on_gpu(engine: "EngineMemory", trainer: "TrainerMemory", number: int, *, has_rank: bool) -> tuple[Part, ...]:
    """Engine and trainer at their most; an engine that lends its keys' memory has them at another time."""
    sampling = engine.on_gpu(number)
    if not has_rank:
        return sampling
    if not engine.config.engine.release_kv:
        return (*sampling, *trainer.at_peak(number))
    lent = tuple(part for part in sampling if part.what != KEYS)
    phases = [(*sampling, *trainer.publishing(number)), (*lent, *trainer.at_peak(number))]
    return max(phases, key=_sum)


def _sum(parts: Sequence[Part]) -> int:
    return sum(part.num_bytes for part in parts)


def uses_gpu(device: str, machine: Machine) -> bool:
    """What `auto` takes."""
    return device == "cuda" or (device == "auto" and machine.num_gpus > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerMemory:
    """Of one rank, on whichever device."""

    shape: ModelShape
    config: Config
    is_gpu: bool

    def at_peak(self, rank: int) -> tuple[Part, ...]:
        """The phase that takes the most."""
        phases = [self.training(), self.updating(), self.loading(), self.publishing(rank)]
        return max(phases, key=_sum)

    def training(self) -> tuple[Part, ...]:
        """While gradients are computed."""
        shape = self.shape
        copies = BFLOAT16_BYTES * shape.num_parameters if self.is_gpu else 0
        gathered = FLOAT32_BYTES * (shape.num_embedding_parameters + 2 * shape.num_layer_parameters)
        gradient_bytes = FLOAT32_BYTES + (BFLOAT16_BYTES if self.is_gpu else 0)
        return (
            *self._always(),
            *_part("trainer: gradients", self._gradients()),
            *_part("trainer: weights in bfloat16", copies),
            *_part("trainer: gathered layers", gathered if self._num_ranks > 1 else 0),
            *_part("trainer: activations", self.activations()),
            *_part("trainer: logits", LOGIT_BYTES * min(self.tokens * shape.vocab_size, LOGITS_A_CHUNK)),
            *_part("trainer: output layer's gradient", gradient_bytes * shape.num_embedding_parameters),
        )

    def updating(self) -> tuple[Part, ...]:
        """While AdamW makes new weights: it works on all parameters at once."""
        return (
            *self._always(),
            *_part("trainer: gradients", self._gradients()),
            *_part("trainer: AdamW's workspace", self._share(FLOAT32_BYTES * self.shape.num_parameters)),
        )

    def loading(self) -> tuple[Part, ...]:
        """Each rank has its models whole before they are spread; there is no optimiser state yet."""
        return (
            Part(what="trainer: the models, whole", num_bytes=self._whole_bytes()),
            *_part("trainer: CUDA", CUDA_CONTEXT_BYTES if self.is_gpu else 0),
        )

    def publishing(self, rank: int) -> tuple[Part, ...]:
        """Rank 0 has all weights in one piece when they were spread."""
        whole = FLOAT32_BYTES * self.shape.num_parameters if self._num_ranks > 1 and rank == 0 else 0
        return (*self._always(), *_part("trainer: weights in one piece", whole))

    def activations(self) -> int:
        """Of all tokens that go through the model at once, for the backward pass."""
        layers, token = self.shape.num_layers, self.activation_bytes()
        if not self.config.trainer.gradient_checkpointing:
            return self.tokens * (layers + 1) * token
        return self.tokens * (FLOAT32_BYTES * self.shape.hidden_size * layers + 2 * token)

    def activation_bytes(self) -> int:
        """Of one token in one layer: `a` above."""
        shape = self.shape
        normalised = shape.query_size + shape.kv_size if shape.has_head_norms else 0
        if self.is_gpu:
            plain = 26 * shape.hidden_size + 6 * shape.query_size + 4 * shape.kv_size + 8 * shape.intermediate_size
            return plain + 6 * normalised
        plain = 24 * shape.hidden_size + 12 * shape.query_size + 8 * shape.kv_size + 16 * shape.intermediate_size
        return plain + 8 * normalised

    @property
    def tokens(self) -> int:
        """T"""
        trainer, longest = self.config.trainer, self.config.engine.max_context_tokens
        return max(trainer.tokens_per_micro_batch, longest if trainer.oversized == "alone" else 0)

    def on_machine(self) -> tuple[Part, ...]:
        """Of the machine's memory: everything where the trainer is on the CPU, else what goes through it."""
        processes = self._num_ranks * TORCH_PROCESS_BYTES
        if not self.is_gpu:
            peaks = [self.at_peak(rank) for rank in range(self._num_ranks)]
            by_name: dict[str, int] = {"trainer: processes": processes}
            for part in (part for parts in peaks for part in parts):
                by_name[part.what] = by_name.get(part.what, 0) + part.num_bytes
            return tuple(Part(what=what, num_bytes=num_bytes) for what, num_bytes in by_name.items())
        whole = self._num_ranks * self._whole_bytes()
        return (
            Part(what="trainer: processes", num_bytes=processes),
            Part(what="trainer: the models, before they are on a GPU", num_bytes=whole),
        )

    def on_its_way(self) -> tuple[Part, ...]:
        """New weights, as engines take them: two slots in memory, unless they go through a disk."""
        if self.config.trainer.transfer != "shared_memory":
            return ()
        return _part("new weights in shared memory", NUM_SLOTS * self.published_bytes)

    @property
    def published_bytes(self) -> int:
        """Of one set of weights as it is handed to engines."""
        return (BFLOAT16_BYTES if self.is_gpu else FLOAT32_BYTES) * self.shape.num_parameters

    @property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint: an export in float32, Adam's moments, and the models that are no export."""
        critic, reference = self._critic_parameters(), self._reference_parameters()
        return FLOAT32_BYTES * (3 * self.shape.num_parameters + 3 * critic + reference)

    # ------------------------------------------------------------------------------------------- internals

    @property
    def _is_within_gpu(self) -> bool:
        return self.config.trainer.transfer == "cuda_ipc"

    @property
    def _num_ranks(self) -> int:
        return self.config.trainer.num_ranks

    def _always(self) -> tuple[Part, ...]:
        policy, critic = self.shape.num_parameters, self._critic_parameters()
        return (
            Part(what="trainer: weights", num_bytes=self._share(FLOAT32_BYTES * policy)),
            Part(what="trainer: Adam's moments", num_bytes=self._share(2 * FLOAT32_BYTES * policy)),
            *_part("trainer: critic with its moments", self._share(3 * FLOAT32_BYTES * critic)),
            *_part("trainer: reference", self._share(FLOAT32_BYTES * self._reference_parameters())),
            *_part("trainer: new weights for the engine", self.published_bytes if self._is_within_gpu else 0),
            *_part("trainer: CUDA", CUDA_CONTEXT_BYTES if self.is_gpu else 0),
        )

    def _gradients(self) -> int:
        return self._share(FLOAT32_BYTES * (self.shape.num_parameters + self._critic_parameters()))

    def _whole_bytes(self) -> int:
        every = self.shape.num_parameters + self._reference_parameters() + self._critic_parameters()
        return FLOAT32_BYTES * every

    def _critic_parameters(self) -> int:
        return self.shape.num_backbone_parameters + self.shape.hidden_size if self.config.algorithm.critic else 0

    def _reference_parameters(self) -> int:
        return self.shape.num_parameters if self.config.algorithm.reference == "initial" else 0

    def _share(self, num_bytes: int) -> int:
        return -(-num_bytes // self._num_ranks)


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
            *_part("engine: logits", num_servers * self._logits()),
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
            staged = BFLOAT16_BYTES * self.shape.num_parameters
            return (*parts, Part(what="engine: new weights before they serve", num_bytes=number * staged))
        weights = FLOAT32_BYTES * self.shape.num_parameters
        return (
            *parts,
            Part(what="engine: weights", num_bytes=number * weights),
            Part(what=KEYS, num_bytes=number * self._kv_bytes(weights, num_shards=1)),
            *_part("engine: logits", number * self._logits()),
            Part(what="engine: new weights before they serve", num_bytes=number * weights),
        )

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
                token_bytes=token,
                num_slots=self.config.engine.max_running_requests,
                max_context_tokens=self.config.engine.max_context_tokens,
            )
            return kv_tokens * token
        share = max(0, int(self._plan.memory_fraction * place) - weights)
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
    def _is_embedded(self) -> bool:
        return self.config.engine.backend == "embedded"

    @property
    def _is_started(self) -> bool:
        return not self.config.engine.urls and self.config.engine.url is None

    @property
    def _is_gpu(self) -> bool:
        return uses_gpu(self.config.engine.device, self.machine)


def _part(what: str, num_bytes: int) -> tuple[Part, ...]:
    """Nothing is not worth a line."""
    return (Part(what=what, num_bytes=num_bytes),) if num_bytes else ()
