"""The memory of a machine, the estimated memory that a run needs of it and of each GPU, and what would make it fit.

P parameters, V vocabulary, H hidden size, I intermediate size, L layers, Q D and K D sizes of queries and of keys
(other letters: model.py). N trainer ranks, or those of one replica (`trainer.replicas`). T tokens that go through the
trainer's model at once: the budget of a micro-batch, or the longest context where that may go alone; with
`trainer.context_parallel` a rank's share. Bytes:

    a rank of the trainer, always      12 P / N         weights and Adam's two moments, in float32
                                        4 P / N         a reference (algorithm.reference)
                                        4 P" / N        a teacher of P" parameters (algorithm.teacher)
                                       12 (P' + H) / N  a critic, whose P' are the policy's below its output layer
      while it trains, besides          4 P / N         gradients, and 4 (P' + H) / N of a critic
                                        c (V H + 2 layers)  with N > 1: what is gathered at a time
                                        2 P + 2 (P' + H)    one rank in bfloat16: copies of what computes in it
                                        T (L + 1) a     activations; checkpointed: T (c H L + 2 a)
                                        2 min(c T V, 2^27)  logits of one chunk, and their gradient
                                        8 min(T V, 2^23)    float32 of a block of them; on a CPU 2^18
                                        8 V H           the gradient of the output layer on its way (float32: 4 V H)
      while it loads                    4 P             of each model
                           with N > 1   4 P / N         of each model; and what its attention is proved with:
                                        4 (P - (L - 1) layer)  one layer, and all that is no layer

      while it saves beside training    a checkpoint over N, in the machine's memory (`trainer.async_save`; `auto`: on
                                        a GPU, where half of what the rest leaves free is enough)

      c bytes is a number that is computed with (`trainer.dtype`); of V H and of logits it is 4 on a CPU, and with
      `trainer.fp32_lm_head`.
      a, of a token and a layer, in bfloat16 (norms inside in float32), counted on a CPU:
              16 H + 6 Q D + 4 K D + 8 I  + 6 (Q D + K D) where queries and keys are normalised
      and in float32:
              24 H + 12 Q D + 8 K D + 16 I  + 8 (Q D + K D)
      where adapters are trained (`trainer.lora`), of A parameters, beside M parameters in matrices of layers:
         always                         4 P / N         weights; of the M in bfloat16 2 M where files are in it too
                                       12 A / N         adapters and their moments; no reference
         while it trains, besides       4 A / N         gradients, none of the output layer
                                        T L c R          a target: between the matrices of each adapter

    an engine                           e P             weights, e bytes each (`engine.dtype`)
                                                        on a CPU 4 bytes each outside the layers, and of a large model
                                                        (H of 512 or more) those of all products twice, and of the
                                                        output layer a third time while it is copied anew
                                        2 e L K D       keys and values of one token, times the tokens kept
                                        8 V R           logits of R running requests
      with SGLang                       what `--mem-fraction-static` gives, or `kv_tokens` where that is less
    new weights on their way            2 e P           in shared memory (two slots; e is 4 from a CPU), and once
                                                        more in the engine: 4 P on a CPU, else e P;
                                        2 e P           on a GPU of an embedded engine and the trainer instead, and e P
                                                        once more in the engine, if the 2 e P are at most 2^30
                                          e P           with `distributed`: in all ranks together, in the engine, and
                                        2 e P           in each process of SGLang's, vLLM's

Where an engine lends the memory of its keys (`engine.release_kv`), they and a train step are never there at once. The
constants below stand for what no formula covers: Python and its libraries, CUDA, an engine's graphs.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, groupby, product
from typing import Any

from areal_agent.config import Config
from areal_agent.doctor.findings import GIB, Finding, State, gib
from areal_agent.doctor.machines import Machine, Share, placement_findings, shares_of, told, uses_gpu, without_room
from areal_agent.doctor.model import BFLOAT16_BYTES, FLOAT32_BYTES, ModelShape
from areal_agent.dtype import LARGE, computed_in
from areal_agent.engine.config import EnginePlan, default_kv_tokens, may_open_memory
from areal_agent.errors import ConfigError
from areal_agent.trainer.config import LoraConfig

Parts = Counter[str]
"""Bytes by what takes them. Sums of parts have only those that take any."""

KEYS = "engine: keys and values"
NEW_WEIGHTS = "engine: new weights before they serve"

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


def opens_memory(shape: ModelShape, config: Config) -> bool:
    """Return whether new weights lie in the memory of a GPU that the trainer and the engine share."""
    is_small = NUM_SLOTS * BFLOAT16_BYTES * shape.num_parameters <= MOST_SHARED_BYTES
    by_memory = config.trainer.transfer == "shared_memory" and config.cluster.kind == "local"
    lora = config.trainer.lora
    is_whole = lora is None or lora.push == "merged"
    return is_small and by_memory and is_whole and may_open_memory(config.engine, config.trainer.num_ranks)


class EngineMemory:
    """The engine's memory, as one process or several servers; nothing for an engine that runs already."""

    def __init__(self, *, shape: ModelShape, config: Config, machine: Machine) -> None:
        self._shape = shape
        self._engine = config.engine
        self._machine = machine
        self._plan = EnginePlan.of(config.engine)
        self._is_embedded = config.engine.backend == "embedded"
        self._is_gpu = uses_gpu(config.engine.device, machine)
        self._is_distributed = config.trainer.transfer == "distributed"
        is_half = computed_in(config.engine.dtype, shape.hidden_size, is_gpu=self._is_gpu) == "bfloat16"
        self._item_bytes = BFLOAT16_BYTES if is_half else FLOAT32_BYTES
        of_rest = self._item_bytes if self._is_gpu or not self._is_embedded else FLOAT32_BYTES
        in_layers = shape.num_layers * shape.num_layer_parameters
        self._weight_bytes = self._item_bytes * in_layers + of_rest * (shape.num_parameters - in_layers)
        is_packed = self._is_embedded and not self._is_gpu and shape.hidden_size >= LARGE
        in_products = self._item_bytes * in_layers + 2 * FLOAT32_BYTES * shape.vocab_size * shape.hidden_size
        self._packed_bytes = in_products if is_packed else 0
        self._overhead_bytes = CUDA_CONTEXT_BYTES if self._is_embedded else SERVER_BYTES
        logits = 2 * FLOAT32_BYTES * shape.vocab_size * config.engine.max_running_requests
        self._logit_bytes = logits if self._is_embedded else 0  # a foreign server's are in its workspaces
        stages = self._is_distributed or opens_memory(shape, config)
        self._stages_on_gpu = self._is_embedded and stages and self._is_gpu

    def on_gpu(self, num_servers: int) -> Parts:
        """Return the use of one GPU with a shard of so many servers."""
        if not num_servers:
            return Parts()
        weights = self._weight_bytes // self._plan.num_shards
        return +Parts(
            {
                "engine: weights": num_servers * weights,
                KEYS: num_servers * self._kv_bytes(weights, num_shards=self._plan.num_shards),
                "engine: logits": num_servers * self._logit_bytes,
                NEW_WEIGHTS: weights if self._stages_on_gpu else 0,
                "engine: CUDA": num_servers * self._overhead_bytes,
            }
        )

    def on_machine(self, num_servers: int) -> Parts:
        """Return the use of the memory of a machine with so many servers."""
        if not num_servers:
            return Parts()
        # a server of SGLang or vLLM that gets weights by `distributed` holds two sets in each of its processes
        copies = 2 * self._plan.num_gpus if self._is_distributed and not self._is_embedded else 1
        taken = self._weight_bytes if self._is_gpu else FLOAT32_BYTES * self._shape.num_parameters
        one = Parts(
            {
                "engine: processes": TORCH_PROCESS_BYTES if self._is_embedded else SERVER_PROCESS_BYTES,
                NEW_WEIGHTS: 0 if self._stages_on_gpu else copies * taken,
            }
        )
        if not self._is_gpu:
            weights = self._weight_bytes + self._packed_bytes
            kv_bytes = self._kv_bytes(weights, num_shards=1)
            one |= Parts({"engine: weights": weights, KEYS: kv_bytes, "engine: logits": self._logit_bytes})
        return +Parts({what: num_servers * num_bytes for what, num_bytes in one.items()})

    def _kv_bytes(self, weights: int, *, num_shards: int) -> int:
        """Return the bytes of keys and values: as many tokens as the config says, or as the engine takes by default."""
        token = max(1, self._shape.kv_bytes(self._item_bytes) // num_shards)
        place = self._machine.gpu_bytes if self._is_gpu else self._machine.memory_bytes
        kv_tokens, leave_gib = self._engine.kv_tokens, self._engine.leave_gib
        if place is None:
            raise ConfigError("the engine computes on the CPU, and the memory of its machine is not known; give --ram")
        if self._is_embedded:
            kv_tokens = kv_tokens or default_kv_tokens(
                is_gpu=self._is_gpu,
                free_bytes=place - weights,
                all_bytes=place,
                leave_bytes=None if leave_gib is None else int(leave_gib * GIB),
                num_sharing=self._plan.num_sharing,
                token_bytes=token,
                num_slots=self._engine.max_running_requests,
                max_context_tokens=self._engine.max_context_tokens,
            )
            return kv_tokens * token
        within = self._overhead_bytes if self._plan.is_share_of_all else 0
        share = max(0, int(self._plan.memory_fraction * place) - weights - within)
        return share if kv_tokens is None else min(share, kv_tokens * token)


CHUNK_BYTES, BLOCK_ON_CPU, BLOCK_ON_GPU = 2**27, 2**18, 2**23  # algorithms/batching.py
NUM_SLOTS, MOST_SHARED_BYTES = 2, 2**30  # weights/channels.py


class TrainerMemory:
    """The memory of one rank, on a CPU or a GPU.

    `tokens` is T. `published_bytes` is one set of weights as it is handed to engines. `checkpoint_bytes` is one
    checkpoint: an export in float32, Adam's moments, and the models that are no export. Adapters are in it twice: to go
    on with, and for other programs.
    """

    def __init__(self, *, shape: ModelShape, config: Config, is_gpu: bool) -> None:
        trainer, lora = config.trainer, config.trainer.lora
        self._shape, self._trainer, self._is_gpu, self._lora = shape, trainer, is_gpu, lora
        longest = config.engine.max_context_tokens
        tokens = max(trainer.tokens_per_micro_batch, longest if trainer.oversized == "alone" else 0)
        self.tokens = -(-tokens // trainer.context_parallel)
        self._critic = shape.num_backbone_parameters + shape.hidden_size if config.algorithm.critic else 0
        # beside adapters, the reference is the model without them
        self._reference = shape.num_parameters if config.algorithm.reference == "initial" and not lora else 0
        self._trained = shape.num_adapter_parameters(lora.rank, lora.target_modules) if lora else shape.num_parameters
        self._is_half = computed_in(trainer.dtype, shape.hidden_size, is_gpu=is_gpu) == "bfloat16"
        # frozen matrices stay in bfloat16, where their files are
        self._in_bfloat16 = shape.num_matrix_parameters if lora and self._is_half and shape.dtype == "bfloat16" else 0
        self._computed_bytes = BFLOAT16_BYTES if self._is_half else FLOAT32_BYTES  # of one number in a layer
        self._item_bytes = BFLOAT16_BYTES if is_gpu else FLOAT32_BYTES  # of one number as an engine gets it
        self._shares_memory = opens_memory(shape, config)
        self._pushes_adapter = lora is not None and lora.push == "adapter"
        self.published_bytes = (
            FLOAT32_BYTES * self._trained if self._pushes_adapter else self._item_bytes * shape.num_parameters
        )
        of_trained = (4 if lora else 2) * self._trained
        self.checkpoint_bytes = FLOAT32_BYTES * (shape.num_parameters + of_trained + 3 * self._critic + self._reference)

    def at_peak(self) -> Parts:
        """Return the parts of the phase that takes the most."""
        return max(self.training(), self.loading(), key=Parts.total)

    def training(self) -> Parts:
        """Return the parts while gradients are computed."""
        shape = self._shape
        of_rest = self._computed_bytes if self._is_gpu and not self._trainer.fp32_lm_head else FLOAT32_BYTES
        gathered = of_rest * shape.num_embedding_parameters + 2 * self._computed_bytes * shape.num_layer_parameters
        is_alone = self._trainer.num_ranks == 1
        copied = shape.num_parameters + self._critic
        if of_rest == FLOAT32_BYTES:  # the rest has no copies
            copied = shape.num_layers * shape.num_layer_parameters * (2 if self._critic else 1)
        copied += (self._trained if self._lora else 0) - self._in_bfloat16
        num_logits, block = self.tokens * shape.vocab_size, BLOCK_ON_GPU if self._is_gpu else BLOCK_ON_CPU
        logits = 2 * min(of_rest * num_logits, CHUNK_BYTES) + 2 * FLOAT32_BYTES * min(num_logits, block)
        head = 0 if self._lora else shape.num_embedding_parameters  # adapters do not change the output layer
        return self._always() + Parts(
            {
                "trainer: gradients": self._gradients(),
                "trainer: gathered layers": 0 if is_alone else gathered,
                "trainer: copies in bfloat16": BFLOAT16_BYTES * copied if is_alone and self._is_half else 0,
                "trainer: activations": self._activations(),
                "trainer: logits": logits,
                "trainer: output layer's gradient": FLOAT32_BYTES * (2 if self._is_half else 1) * head,
            }
        )

    def loading(self) -> Parts:
        """Return the parts while models are loaded. Several ranks load their rows. There are no moments yet."""
        shape = self._shape
        of_trial = shape.num_parameters - (shape.num_layers - 1) * shape.num_layer_parameters
        is_trial_apart = self._trainer.num_ranks > 1
        return +Parts(
            {
                "trainer: the models": self._share(self._whole_bytes()),
                "trainer: a layer and what is none": FLOAT32_BYTES * of_trial if is_trial_apart else 0,
                "trainer: CUDA": self._cuda_bytes(),
            }
        )

    def publishing(self) -> Parts:
        """Return the parts while weights are published, one tensor after the other."""
        return self._always()

    def saving(self, num_ranks: int, free_bytes: int | None) -> Parts:
        """Return the copies that so many ranks write beside training, where their machine has that much free."""
        copies = num_ranks * self._share(self.checkpoint_bytes)
        is_beside = self._trainer.saves_beside(copies, free_bytes, is_gpu=self._is_gpu)
        return +Parts({"trainer: a checkpoint being written": copies if is_beside else 0})

    def on_machine(self, num_ranks: int) -> Parts:
        """Return the use of the memory of a machine with so many ranks: on a CPU all, else what goes through it."""
        parts = Parts({"trainer: processes": num_ranks * TORCH_PROCESS_BYTES})
        if self._is_gpu:
            # several ranks have a tensor at a time
            of_rank = (
                FLOAT32_BYTES * self._shape.num_embedding_parameters
                if self._trainer.num_ranks > 1
                else self._whole_bytes()
            )
            return parts + Parts({"trainer: weights on their way to a GPU": num_ranks * of_rank})
        return sum((self.at_peak() for _ in range(num_ranks)), parts)

    def on_its_way(self) -> Parts:
        """Return new weights on their way to engines: two slots in memory, where they go through memory."""
        is_in_memory = self._trainer.transfer == "shared_memory"
        return +Parts({"new weights in shared memory": NUM_SLOTS * self.published_bytes if is_in_memory else 0})

    def _always(self) -> Parts:
        weights = FLOAT32_BYTES * (self._shape.num_parameters - self._in_bfloat16) + BFLOAT16_BYTES * self._in_bfloat16
        published = self._share(self.published_bytes) if self._trainer.transfer == "distributed" else 0
        if self._is_gpu and self._shares_memory:
            published = NUM_SLOTS * self.published_bytes
        return +Parts(
            {
                "trainer: weights": self._share(weights),
                "trainer: adapters": self._share(FLOAT32_BYTES * self._trained) if self._lora else 0,
                "trainer: Adam's moments": self._share(2 * FLOAT32_BYTES * self._trained),
                "trainer: critic with its moments": self._share(3 * FLOAT32_BYTES * self._critic),
                "trainer: reference": self._share(FLOAT32_BYTES * self._reference),
                "trainer: teacher": self._share(FLOAT32_BYTES * self._shape.num_teacher_parameters),
                "trainer: new weights for the engine": published,
                "trainer: CUDA": self._cuda_bytes(),
            }
        )

    def _activations(self) -> int:
        """Return the bytes kept for the backward pass, over all tokens that go through the model at once."""
        shape, lora = self._shape, self._lora
        normalised = shape.query_size + shape.kv_size if shape.has_head_norms else 0
        if self._is_half:  # `a` above, of one token in one layer
            plain = 16 * shape.hidden_size + 6 * shape.query_size + 4 * shape.kv_size + 8 * shape.intermediate_size
            token = plain + 6 * normalised
        else:
            plain = 24 * shape.hidden_size + 12 * shape.query_size + 8 * shape.kv_size + 16 * shape.intermediate_size
            token = plain + 8 * normalised
        if lora is not None:  # between the two matrices of each adapter
            token += len(lora.target_modules) * lora.rank * self._computed_bytes
        if not self._trainer.gradient_checkpointing:
            return self.tokens * (shape.num_layers + 1) * token
        return self.tokens * (self._computed_bytes * shape.hidden_size * shape.num_layers + 2 * token)

    def _gradients(self) -> int:
        return self._share(FLOAT32_BYTES * (self._trained + self._critic))

    def _whole_bytes(self) -> int:
        loaded = self._shape.num_parameters + self._reference + self._critic
        return FLOAT32_BYTES * (loaded + self._shape.num_teacher_parameters)

    def _cuda_bytes(self) -> int:
        return CUDA_CONTEXT_BYTES if self._is_gpu else 0

    def _share(self, num_bytes: int) -> int:
        return -(-num_bytes * self._trainer.replicas // self._trainer.num_ranks)


def estimate(
    shape: ModelShape, config: Config, machine: Machine, share: Share | None = None
) -> dict[int | None, Parts]:
    """Return what a machine (None) and each of its GPUs that is used need at their peak, for a share of the run.

    Without a share, the machine is the run's only or first one.
    """
    share = share or shares_of(config, machine)[0]
    trainer = TrainerMemory(shape=shape, config=config, is_gpu=uses_gpu(config.trainer.device, machine))
    engine = EngineMemory(shape=shape, config=config, machine=machine)
    host = Parts({"main process": MAIN_BYTES * share.has_main, "rollout workers": share.num_workers * WORKER_BYTES})
    host += trainer.on_its_way() if share.has_main else Parts()
    host += engine.on_machine(len(share.servers)) + trainer.on_machine(share.num_ranks)
    host += trainer.saving(share.num_ranks, machine.memory_bytes and machine.memory_bytes - host.total())
    needs: dict[int | None, Parts] = {None: host}
    for number in range(max(machine.num_gpus, share.num_gpus)):
        sampling = engine.on_gpu(share.num_servers_on(number))
        if number >= share.num_training_gpus:
            needs[number] = sampling
        elif config.engine.release_kv:  # the engine lends the memory of its keys while the trainer trains
            lent = Parts({what: num_bytes for what, num_bytes in sampling.items() if what != KEYS})
            phases = (sampling + trainer.publishing(), lent + trainer.at_peak())
            needs[number] = max(phases, key=Parts.total)
        else:
            needs[number] = sampling + trainer.at_peak()
    return {place: parts for place, parts in needs.items() if parts}


TIGHT = 0.95
"""Beyond this share of a place a run may not fit: the estimate leaves out fragmentation."""

NUM_NAMED = 4


async def memory_findings(shape: ModelShape, config: Config, machine: Machine) -> list[Finding]:
    """Return a finding for the room on a cluster, and for each kind of machine its memory and its GPUs that are used.

    GPUs that need the same are in one finding.
    """
    findings, kinds = [*placement_findings(config, machine)], dict[Share, list[int]]()
    for number, share in enumerate(shares_of(config, machine)):
        kinds.setdefault(share, []).append(number)
    for share, numbers in kinds.items():
        where = f"{told(numbers)}: " if machine.num_nodes > 1 else ""
        needs = estimate(shape, config, machine, share)
        for (parts, _), same in groupby(needs, key=lambda place: (needs[place], _size_of(place, machine))):
            findings.append(_finding([*same], parts, where, shape, config, machine))
    return findings


def _finding(
    places: Sequence[int | None], parts: Parts, where: str, shape: ModelShape, config: Config, machine: Machine
) -> Finding:
    gpu = places[0]
    has = _size_of(gpu, machine)
    check = "memory" if gpu is None else f"GPU {gpu}" + f"-{places[-1]}" * (len(places) > 1)
    needed = parts.total()
    named = ", ".join(f"{what} {gib(num_bytes)}" for what, num_bytes in parts.most_common(NUM_NAMED))
    named += ", ..." * (len(parts) > NUM_NAMED)
    found = f"{where}about {gib(needed)} of {gib(has or 0)}: {named}"
    free = machine.available_bytes if gpu is None else None
    if has is None:
        found = f"{where}about {gib(needed)}: {named}; not compared with anything"
        return Finding(check, State.SKIP, found, "give --ram")
    if gpu is not None and not has:
        missing = f"this machine has no such GPU; about {gib(needed)}: {named}"
        is_trainers = gpu < config.trainer.num_ranks and uses_gpu(config.trainer.device, machine)
        fewer = "trainer.num_ranks" if is_trainers else "engine.num_servers, or engine.first_gpu (--base-gpu-id)"
        return Finding(check, State.FAIL, missing, f"lower {fewer}, or add GPUs")
    if needed > has:
        return Finding(check, State.FAIL, found, advice(gpu, shape, config, machine))
    if needed > TIGHT * has:
        return Finding(check, State.WARN, f"{found}; that is tight", advice(gpu, shape, config, machine))
    if free is not None and needed > free:
        return Finding(check, State.WARN, f"{found}; {gib(free)} are free now", "end other programs that use memory")
    return Finding(check, State.OK, found)


def _size_of(gpu: int | None, machine: Machine) -> int | None:
    """Return the memory of a GPU, 0 for one that is missing, or the machine's own; None where it was not described."""
    return machine.memory_bytes if gpu is None else machine.gpu_bytes if gpu < machine.num_gpus else 0


MAX_CHANGES = 3
MIN_TOKENS = 1024


def advice(gpu: int | None, shape: ModelShape, config: Config, machine: Machine) -> str:
    """Return the fewest changes that make a place fit, by the estimate, and make no other place too small."""
    before, enough = _too_small(shape, config, machine), list[str]()
    for number in range(1, MAX_CHANGES + 1):
        for kinds in combinations(_changes(config, machine), number):
            for together in product(*kinds):
                changes = {key: value for one in together for key, value in one.items()}
                if _too_small(shape, _changed(config, changes), machine) <= before - {gpu}:
                    enough.append(" ".join(f"{key}={_told(value)}" for key, value in changes.items()))
                    break  # the later ones of these kinds change more
        if enough:
            return f"set {', or '.join(enough if number == 1 else enough[:1])}"
    return f"use a smaller model, or {'a machine' if gpu is None else 'GPUs'} with more memory"


def _changes(config: Config, machine: Machine) -> Sequence[Sequence[Mapping[str, Any]]]:
    """Return what could be set to save memory, by kind; in each kind the least change first."""
    trainer, engine = config.trainer, config.engine
    budget, longest = trainer.tokens_per_micro_batch, engine.max_context_tokens
    step = math.lcm(trainer.context_parallel, trainer.replicas)
    num_gpus = machine.num_gpus * machine.num_nodes
    shorter = [
        ({"trainer.tokens_per_micro_batch": number} if budget > number else {})
        | ({"engine.max_context_tokens": number} if longest > number else {})
        for number in _halves(max(budget, longest), MIN_TOKENS)
    ]
    return (
        [] if trainer.gradient_checkpointing else [{"trainer.gradient_checkpointing": True}],
        [{"engine.kv_tokens": number} for number in _halves(engine.kv_tokens or 2**20, longest)],
        [{"trainer.replicas": 1}] if trainer.replicas > 1 else [],
        [{"trainer.num_ranks": number} for number in range(trainer.num_ranks + step, num_gpus + 1, step)],
        [] if trainer.lora else [{"trainer.lora": LoraConfig()}],
        shorter,
    )


def _halves(largest: int, smallest: int) -> Sequence[int]:
    return [largest >> number for number in range(1, largest.bit_length()) if largest >> number >= smallest]


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    for key, value in changes.items():
        name, _, leaf = key.partition(".")
        config = config.model_copy(update={name: getattr(config, name).model_copy(update={leaf: value})})
    return config


def _told(value: object) -> str:
    return "{} (adapters, docs/lora.md)" if isinstance(value, LoraConfig) else str(value).lower()


def _too_small(shape: ModelShape, config: Config, machine: Machine) -> set[int | str | None]:
    """Return the places where a config is tight, or does not fit, and what finds no room on a cluster."""
    places: set[int | str | None] = {
        place
        for share in {*shares_of(config, machine)}
        for place, parts in estimate(shape, config, machine, share).items()
        if (size := _size_of(place, machine)) is not None and parts.total() > TIGHT * size
    }
    return places | ({left} if (left := without_room(config, machine)) else set())
