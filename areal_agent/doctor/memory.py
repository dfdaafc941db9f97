"""The estimated memory of a run, by place (this machine's, and each GPU's), and what would make it fit.

P parameters, V vocabulary, H hidden size, I intermediate size, L layers, Q D and K D sizes of queries and of keys
(other letters: model.py). N trainer ranks. T tokens that go through the trainer's model at once: the budget of a
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
      where adapters are trained (`trainer.lora`), of A parameters, beside M parameters in matrices of layers:
         always                         4 P / N         weights; of the M on a GPU 2 M where files are in bfloat16
                                       12 A / N         adapters and their moments; no reference
         while it trains, besides       4 A / N         gradients, none of the output layer, and 2 (P - M) of copies
                                        T L e R          a target: between the matrices of each adapter
         while it publishes             e M             merged weights, on rank 0

    an engine                           e P             weights, e bytes each: 4 on a CPU, 2 on a GPU
                                        2 e L K D       keys and values of one token, times the tokens kept
                                        8 V R           logits of R running requests
      with SGLang                       what `--mem-fraction-static` gives, or `kv_tokens` where that is less
    new weights on their way            2 e P           in shared memory (two slots), and e P once more in the engine;
                                          e P           with `distributed`: in the trainer and the engine, and
                                        2 e P           in each process of SGLang's, vLLM's

Where an engine lends the memory of its keys (`engine.release_kv`), they and a train step are never there at once. The
constants below stand for what no formula covers: Python and its libraries, CUDA, an engine's graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from areal_agent.config import Config
from areal_agent.doctor.findings import Finding, State
from areal_agent.doctor.machine import GIB, Machine, gib
from areal_agent.doctor.model import FLOAT32_BYTES, ModelShape
from areal_agent.engine.config import EnginePlan, default_kv_tokens
from areal_agent.trainer.config import LoraConfig

BFLOAT16_BYTES = 2

KEYS = "engine: keys and values"

MAIN_BYTES = GIB // 4
WORKER_BYTES = GIB // 4
TORCH_PROCESS_BYTES = GIB // 2
"""Python, torch and transformers, before there is a model."""
CUDA_CONTEXT_BYTES = GIB // 2
"""A process's use of a GPU before any tensor: kernels and workspaces."""
SERVER_BYTES = 5 * GIB // 2
"""GPU memory of a foreign server beside weights and keys: CUDA graphs, workspaces and activations."""
SERVER_PROCESS_BYTES = 3 * GIB
"""Host memory of a server's processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One use of memory."""

    what: str
    num_bytes: int


def part_of(what: str, num_bytes: int) -> tuple[Part, ...]:
    """Return one part, or none for 0 bytes."""
    return (Part(what=what, num_bytes=num_bytes),) if num_bytes else ()


def sum_of(parts: Sequence[Part]) -> int:
    return sum(part.num_bytes for part in parts)


def uses_gpu(device: str, machine: Machine) -> bool:
    """Return whether a device is a GPU; `auto` takes one where there is one."""
    return device == "cuda" or (device == "auto" and machine.num_gpus > 0)


NEW_WEIGHTS = "engine: new weights before they serve"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """The engine's memory, as one process or several servers; nothing for an engine that runs already."""

    shape: ModelShape
    config: Config
    machine: Machine

    def on_gpu(self, number: int) -> tuple[Part, ...]:
        """Return its use of one GPU."""
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
        """Return its use of the machine's memory."""
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
        """Return the bytes that one server needs in host memory to receive new weights and to restore the old ones."""
        if self._is_gpu and self._stages_on_gpu:
            return 0
        holds_two = self._is_distributed and not self._is_embedded  # in each process of a server
        return (2 * self._plan.num_gpus if holds_two else 1) * element * self.shape.num_parameters

    def _kv_bytes(self, weights: int, *, num_shards: int) -> int:
        """Return the bytes of keys and values: as many tokens as the config says, or as the engine takes by default."""
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
        """Return the bytes of logits; a foreign server's are in its workspaces."""
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
        return self._is_embedded and self._is_distributed

    @property
    def _is_embedded(self) -> bool:
        return self.config.engine.backend == "embedded"

    @property
    def _is_started(self) -> bool:
        return not self.config.engine.urls and self.config.engine.url is None

    @property
    def _is_gpu(self) -> bool:
        return uses_gpu(self.config.engine.device, self.machine)


LOGITS_A_CHUNK = 2**24  # algorithms/batching.py
LOGIT_BYTES = 20
NUM_SLOTS = 2  # weights/channels.py


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerMemory:
    """The memory of one rank, on a CPU or a GPU."""

    shape: ModelShape
    config: Config
    is_gpu: bool

    def at_peak(self, rank: int) -> tuple[Part, ...]:
        """Return the parts of the phase that takes the most."""
        phases = [self.training(), self.updating(), self.loading(), self.publishing(rank)]
        return max(phases, key=sum_of)

    def training(self) -> tuple[Part, ...]:
        """Return the parts while gradients are computed."""
        shape = self.shape
        copies = BFLOAT16_BYTES * (shape.num_parameters - self._held_in_bfloat16()) if self.is_gpu else 0
        gathered = FLOAT32_BYTES * (shape.num_embedding_parameters + 2 * shape.num_layer_parameters)
        gradient_bytes = FLOAT32_BYTES + (BFLOAT16_BYTES if self.is_gpu else 0)
        head = 0 if self._lora else gradient_bytes * shape.num_embedding_parameters  # adapters do not change it
        return (
            *self._always(),
            *part_of("trainer: gradients", self._gradients()),
            *part_of("trainer: weights in bfloat16", copies),
            *part_of("trainer: gathered layers", gathered if self._num_ranks > 1 else 0),
            *part_of("trainer: activations", self.activations()),
            *part_of("trainer: logits", LOGIT_BYTES * min(self.tokens * shape.vocab_size, LOGITS_A_CHUNK)),
            *part_of("trainer: output layer's gradient", head),
        )

    def updating(self) -> tuple[Part, ...]:
        """Return the parts while AdamW makes new weights: it works on all parameters at once."""
        return (
            *self._always(),
            *part_of("trainer: gradients", self._gradients()),
            *part_of("trainer: AdamW's workspace", self._share(FLOAT32_BYTES * self._trained_parameters())),
        )

    def loading(self) -> tuple[Part, ...]:
        """Return the parts while ranks load their models whole, before these are spread. There are no moments yet."""
        return (
            Part(what="trainer: the models, whole", num_bytes=self._whole_bytes()),
            *part_of("trainer: CUDA", CUDA_CONTEXT_BYTES if self.is_gpu else 0),
        )

    def publishing(self, rank: int) -> tuple[Part, ...]:
        """Return the parts while weights are published; rank 0 has spread or merged weights in one piece."""
        if self._pushes_adapter:
            return self._always()
        merged = self.shape.num_matrix_parameters if self._lora else 0
        whole = FLOAT32_BYTES * (self.shape.num_parameters - merged) if self._num_ranks > 1 else 0
        whole += self._published_item_bytes * merged
        return (*self._always(), *part_of("trainer: weights in one piece", whole if rank == 0 else 0))

    def activations(self) -> int:
        """Return the bytes kept for the backward pass, over all tokens that go through the model at once."""
        layers, token = self.shape.num_layers, self.activation_bytes() + self._adapter_activation_bytes()
        if not self.config.trainer.gradient_checkpointing:
            return self.tokens * (layers + 1) * token
        return self.tokens * (FLOAT32_BYTES * self.shape.hidden_size * layers + 2 * token)

    def activation_bytes(self) -> int:
        """Return the bytes of one token in one layer: `a` above."""
        shape = self.shape
        normalised = shape.query_size + shape.kv_size if shape.has_head_norms else 0
        if self.is_gpu:
            plain = 26 * shape.hidden_size + 6 * shape.query_size + 4 * shape.kv_size + 8 * shape.intermediate_size
            return plain + 6 * normalised
        plain = 24 * shape.hidden_size + 12 * shape.query_size + 8 * shape.kv_size + 16 * shape.intermediate_size
        return plain + 8 * normalised

    @property
    def tokens(self) -> int:
        """T: the tokens that go through the model at once."""
        trainer, longest = self.config.trainer, self.config.engine.max_context_tokens
        return max(trainer.tokens_per_micro_batch, longest if trainer.oversized == "alone" else 0)

    def on_machine(self) -> tuple[Part, ...]:
        """Return the use of the machine's memory: everything for a trainer on the CPU, else what goes through it."""
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
        """Return new weights on their way to engines: two slots in memory, where they go through memory."""
        if self.config.trainer.transfer != "shared_memory":
            return ()
        return part_of("new weights in shared memory", NUM_SLOTS * self.published_bytes)

    @property
    def published_bytes(self) -> int:
        """The bytes of one set of weights as it is handed to engines."""
        if self._pushes_adapter:
            return FLOAT32_BYTES * self._trained_parameters()
        return self._published_item_bytes * self.shape.num_parameters

    @property
    def checkpoint_bytes(self) -> int:
        """The bytes of one checkpoint: an export in float32, Adam's moments, and the models that are no export.

        Adapters are in it twice: to go on with, and for other programs.
        """
        critic, reference = self._critic_parameters(), self._reference_parameters()
        trained = (4 if self._lora else 2) * self._trained_parameters()
        return FLOAT32_BYTES * (self.shape.num_parameters + trained + 3 * critic + reference)

    # ------------------------------------------------------------------------------------------- internals

    @property
    def _keeps_what_it_publishes(self) -> bool:
        return self.config.trainer.transfer == "distributed"

    @property
    def _num_ranks(self) -> int:
        return self.config.trainer.num_ranks

    def _always(self) -> tuple[Part, ...]:
        trained, critic = self._trained_parameters(), self._critic_parameters()
        return (
            Part(what="trainer: weights", num_bytes=self._share(self._weight_bytes())),
            *part_of("trainer: adapters", self._share(FLOAT32_BYTES * trained) if self._lora else 0),
            Part(what="trainer: Adam's moments", num_bytes=self._share(2 * FLOAT32_BYTES * trained)),
            *part_of("trainer: critic with its moments", self._share(3 * FLOAT32_BYTES * critic)),
            *part_of("trainer: reference", self._share(FLOAT32_BYTES * self._reference_parameters())),
            *part_of(
                "trainer: new weights for the engine", self.published_bytes if self._keeps_what_it_publishes else 0
            ),
            *part_of("trainer: CUDA", CUDA_CONTEXT_BYTES if self.is_gpu else 0),
        )

    def _gradients(self) -> int:
        return self._share(FLOAT32_BYTES * (self._trained_parameters() + self._critic_parameters()))

    def _whole_bytes(self) -> int:
        every = self.shape.num_parameters + self._reference_parameters() + self._critic_parameters()
        return FLOAT32_BYTES * every

    def _critic_parameters(self) -> int:
        return self.shape.num_backbone_parameters + self.shape.hidden_size if self.config.algorithm.critic else 0

    def _reference_parameters(self) -> int:
        """Return the reference's own parameters: none beside adapters, where it is the model without them."""
        has_own = self.config.algorithm.reference == "initial" and not self._lora
        return self.shape.num_parameters if has_own else 0

    def _trained_parameters(self) -> int:
        lora = self._lora
        if lora is None:
            return self.shape.num_parameters
        return self.shape.num_adapter_parameters(lora.rank, lora.target_modules)

    def _weight_bytes(self) -> int:
        """Return the bytes of the policy's own weights."""
        held = self._held_in_bfloat16()
        return FLOAT32_BYTES * (self.shape.num_parameters - held) + BFLOAT16_BYTES * held

    def _held_in_bfloat16(self) -> int:
        """Return the parameters of frozen matrices that a GPU keeps in bfloat16, because their files do."""
        is_held = self._lora is not None and self.is_gpu and self.shape.dtype == "bfloat16"
        return self.shape.num_matrix_parameters if is_held else 0

    def _adapter_activation_bytes(self) -> int:
        """Return the bytes of one token in one layer between the two matrices of each adapter."""
        lora = self._lora
        return 0 if lora is None else len(lora.target_modules) * lora.rank * self._published_item_bytes

    @property
    def _published_item_bytes(self) -> int:
        """The bytes of one number as this device multiplies it."""
        return BFLOAT16_BYTES if self.is_gpu else FLOAT32_BYTES

    @property
    def _pushes_adapter(self) -> bool:
        return self._lora is not None and self._lora.push == "adapter"

    @property
    def _lora(self) -> LoraConfig | None:
        return self.config.trainer.lora

    def _share(self, num_bytes: int) -> int:
        return -(-num_bytes // self._num_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """The peak memory of a run in one place."""

    gpu: int | None  # number of the GPU; None: the machine's memory
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum_of(self.parts)


def estimate(shape: ModelShape, config: Config, machine: Machine) -> tuple[Need, ...]:
    """Return what a run of `config` needs of `machine` and of each of its GPUs that is used."""
    trainer = TrainerMemory(shape=shape, config=config, is_gpu=uses_gpu(config.trainer.device, machine))
    engine = EngineMemory(shape=shape, config=config, machine=machine)
    host = [Part(what="main process", num_bytes=MAIN_BYTES)]
    host += part_of("rollout workers", config.rollout.workers * WORKER_BYTES)
    host += [*engine.on_machine(), *trainer.on_machine(), *trainer.on_its_way()]
    ranks = config.trainer.num_ranks if trainer.is_gpu else 0
    numbers = range(max(machine.num_gpus, ranks))
    gpus = {number: _on_gpu(engine, trainer, number, has_rank=number < ranks) for number in numbers}
    return (
        Need(gpu=None, parts=tuple(host)),
        *(Need(gpu=number, parts=parts) for number, parts in gpus.items() if parts),
    )


def _on_gpu(engine: EngineMemory, trainer: TrainerMemory, number: int, *, has_rank: bool) -> tuple[Part, ...]:
    """Return the peak of engine and trainer on a GPU. An engine that lends its keys' memory has them at other times."""
    sampling = engine.on_gpu(number)
    if not has_rank:
        return sampling
    if not engine.config.engine.release_kv:
        return (*sampling, *trainer.at_peak(number))
    lent = tuple(part for part in sampling if part.what != KEYS)
    phases = [(*sampling, *trainer.publishing(number)), (*lent, *trainer.at_peak(number))]
    return max(phases, key=sum_of)


TIGHT = 0.95
"""Beyond this share of a place a run may not fit: the estimate leaves out fragmentation."""

NUM_NAMED = 4


async def memory_findings(shape: ModelShape, config: Config, machine: Machine) -> list[Finding]:
    """Return a finding for the machine's memory, and one for each GPU that is used."""
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
        return _at(place, State.WARN, f"{found}; {gib(free)} are free now", "end other programs that use memory")
    return _at(place, State.OK, found)


def advice(need: Need, config: Config) -> str:
    """Return what would save the most, judged by the largest part."""
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
