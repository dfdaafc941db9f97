"""What a rank of the trainer takes, by phase; the formulas stand in memory.py. Pure arithmetic."""

from dataclasses import dataclass

from areal_agent.config import Config
from areal_agent.doctor.memory_parts import (
    BFLOAT16_BYTES,
    CUDA_CONTEXT_BYTES,
    FLOAT32_BYTES,
    TORCH_PROCESS_BYTES,
    Part,
    part_of,
    sum_of,
)
from areal_agent.doctor.shape import ModelShape
from areal_agent.trainer.config import LoraConfig

LOGITS_A_CHUNK = 2**24  # algorithms/logprobs.py
LOGIT_BYTES = 20
NUM_SLOTS = 2  # weights/shared_memory.py


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerMemory:
    """Of one rank, on whichever device."""

    shape: ModelShape
    config: Config
    is_gpu: bool

    def at_peak(self, rank: int) -> tuple[Part, ...]:
        """The phase that takes the most."""
        phases = [self.training(), self.updating(), self.loading(), self.publishing(rank)]
        return max(phases, key=sum_of)

    def training(self) -> tuple[Part, ...]:
        """While gradients are computed."""
        shape = self.shape
        copies = BFLOAT16_BYTES * (shape.num_parameters - self._held_in_bfloat16()) if self.is_gpu else 0
        gathered = FLOAT32_BYTES * (shape.num_embedding_parameters + 2 * shape.num_layer_parameters)
        gradient_bytes = FLOAT32_BYTES + (BFLOAT16_BYTES if self.is_gpu else 0)
        head = 0 if self._lora else gradient_bytes * shape.num_embedding_parameters  # adapters leave it as it is
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
        """While AdamW makes new weights: it works on all parameters at once."""
        return (
            *self._always(),
            *part_of("trainer: gradients", self._gradients()),
            *part_of("trainer: AdamW's workspace", self._share(FLOAT32_BYTES * self._trained_parameters())),
        )

    def loading(self) -> tuple[Part, ...]:
        """Each rank has its models whole before they are spread; there is no optimiser state yet."""
        return (
            Part(what="trainer: the models, whole", num_bytes=self._whole_bytes()),
            *part_of("trainer: CUDA", CUDA_CONTEXT_BYTES if self.is_gpu else 0),
        )

    def publishing(self, rank: int) -> tuple[Part, ...]:
        """Rank 0 has all weights in one piece when they were spread, and those that adapters are merged with anyway."""
        if self._pushes_adapter:
            return self._always()
        merged = self.shape.num_matrix_parameters if self._lora else 0
        whole = FLOAT32_BYTES * (self.shape.num_parameters - merged) if self._num_ranks > 1 else 0
        whole += self._published_item_bytes * merged
        return (*self._always(), *part_of("trainer: weights in one piece", whole if rank == 0 else 0))

    def activations(self) -> int:
        """Of all tokens that go through the model at once, for the backward pass."""
        layers, token = self.shape.num_layers, self.activation_bytes() + self._adapter_activation_bytes()
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
        """New weights, as engines take them: two slots in memory, where they go through that."""
        if self.config.trainer.transfer != "shared_memory":
            return ()
        return part_of("new weights in shared memory", NUM_SLOTS * self.published_bytes)

    @property
    def published_bytes(self) -> int:
        """Of one set of weights as it is handed to engines."""
        if self._pushes_adapter:
            return FLOAT32_BYTES * self._trained_parameters()
        return self._published_item_bytes * self.shape.num_parameters

    @property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint: an export in float32, Adam's moments, and the models that are no export.

        Adapters are there twice: to go on with, and for others.
        """
        critic, reference = self._critic_parameters(), self._reference_parameters()
        trained = (4 if self._lora else 2) * self._trained_parameters()
        return FLOAT32_BYTES * (self.shape.num_parameters + trained + 3 * critic + reference)

    # ------------------------------------------------------------------------------------------- internals

    @property
    def _keeps_what_it_publishes(self) -> bool:
        return self.config.trainer.transfer in ("cuda_ipc", "distributed")

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
        """Where adapters are trained it is the model without them."""
        has_own = self.config.algorithm.reference == "initial" and not self._lora
        return self.shape.num_parameters if has_own else 0

    def _trained_parameters(self) -> int:
        lora = self._lora
        if lora is None:
            return self.shape.num_parameters
        return self.shape.num_adapter_parameters(lora.rank, lora.target_modules)

    def _weight_bytes(self) -> int:
        """Of the policy's own."""
        held = self._held_in_bfloat16()
        return FLOAT32_BYTES * (self.shape.num_parameters - held) + BFLOAT16_BYTES * held

    def _held_in_bfloat16(self) -> int:
        """Parameters of the frozen matrices, on a GPU, where their files have them in no more."""
        is_held = self._lora is not None and self.is_gpu and self.shape.dtype == "bfloat16"
        return self.shape.num_matrix_parameters if is_held else 0

    def _adapter_activation_bytes(self) -> int:
        """Of one token in one layer, between the two matrices of each adapter."""
        lora = self._lora
        return 0 if lora is None else len(lora.target_modules) * lora.rank * self._published_item_bytes

    @property
    def _published_item_bytes(self) -> int:
        """Of one number as this device multiplies it."""
        return BFLOAT16_BYTES if self.is_gpu else FLOAT32_BYTES

    @property
    def _pushes_adapter(self) -> bool:
        return self._lora is not None and self._lora.push == "adapter"

    @property
    def _lora(self) -> LoraConfig | None:
        return self.config.trainer.lora

    def _share(self, num_bytes: int) -> int:
        return -(-num_bytes // self._num_ranks)
