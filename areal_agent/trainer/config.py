"""The config section of the trainer process. Imports no torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from areal_agent.section import Section

Beta = Annotated[float, Field(ge=0, lt=1)]
LearningRateSchedule = Literal["constant", "linear", "cosine"]


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): thin matrices that are trained in place of the model's own."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """The size between the two matrices of an adapter."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """What an adapter adds is multiplied by `alpha` through `rank`."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """The linear layers that get adapters, by the last part of their names; by default all of every layer."""
    push: Literal["merged", "adapter"] = "merged"
    """What engines get. `merged`: whole weights, which adapters are part of. `adapter`: adapters alone, which vLLM's
    servers apply as they sample: little goes over, and each token takes longer."""

    @property
    def scale(self) -> float:
        """Of what an adapter adds."""
        return self.alpha / self.rank

    @field_validator("target_modules")
    @classmethod
    def _names_each_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"names {twice[0]!r} twice; name it once")
        return names


class TrainerConfig(Section):
    """How weights are updated; the defaults are the AReaL paper's (Table 3)."""

    learning_rate: Annotated[float, Field(gt=0)] = 2e-5
    """Of AdamW, at the end of the warm-up."""
    schedule: LearningRateSchedule = "constant"
    """What follows the warm-up: `constant`, or a `linear` or `cosine` fall to zero over all steps of the run."""
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.001
    """The share of the run's optimiser updates (`steps` times `algorithm.minibatches`) over which the learning rate
    rises linearly."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the root of AdamW's second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """Of matrices; norms and biases are not decayed."""
    gradient_clip: Annotated[float, Field(gt=0)] = 1.0
    """The gradient's norm is scaled down to it."""
    tokens_per_micro_batch: Annotated[int, Field(ge=1)] = 8192
    """Tokens that go through the model at once, padding included."""
    oversized: Literal["alone", "refuse"] = "alone"
    """A sequence longer than `tokens_per_micro_batch` goes `alone`, whatever memory that takes; `refuse`: a config
    under which there can be one, by `engine.max_context_tokens`, is an error."""
    gradient_checkpointing: bool = False
    """Keep of each layer its input alone, and compute the rest again in the backward pass: up to a third more time, for
    a fraction of the memory that long sequences take. Gradients stay what they are."""
    packing: Literal["balanced", "first_fit", "padded"] = "balanced"
    """How sequences share a micro-batch, each seeing itself alone. `balanced`: one row, no padding, by Algorithm 1 of
    the paper. `first_fit`: the same by first-fit decreasing. `padded`: a row each, of like lengths."""
    num_ranks: Annotated[int, Field(ge=1, le=1024)] = 1
    """Trainer processes on this machine, which share weights and work (FSDP2); on cuda each has a device of its own."""
    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads of each trainer process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda when there is one. Weights are float32; on cuda the matrices are multiplied in bfloat16."""
    transfer: Literal["shared_memory", "disk", "distributed"] = "shared_memory"
    """How new weights reach the engine. `shared_memory`: through /dev/shm. `disk`: through folders in the machine's
    temporary directory, for where /dev/shm is too small, as it is in many containers. `distributed`: by
    torch.distributed, in a process group of the trainer and a server: NCCL where each has a GPU of its own, else gloo.
    Servers of `engine.urls` take it that were started by areal_agent's launcher for them."""
    transfer_host: str = "127.0.0.1"
    """With `transfer: distributed`: the address of this machine at which servers find the trainer. Whoever reaches it
    can read the weights."""
    transfer_bucket_mib: Annotated[int, Field(ge=1, le=2047)] = 64
    """With `transfer: distributed`: MiB that are sent at once."""
    lora: LoraConfig | None = None
    """Train adapters (LoRA), and leave the model as it is: optimiser and gradients are of the adapters alone, and the
    reference is the model without them. Engines and checkpoints get the merged weights, checkpoints the adapters too.
    They want a learning rate about ten times that of full training. `{}` takes the defaults below; by default, the
    whole model is trained. See docs/lora.md."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 10
    """Train steps between checkpoints."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Checkpoints that are kept, besides the one that the run was resumed from."""
    startup_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """How long the process may take to load the model."""

    @model_validator(mode="after")
    def _has_no_idle_options(self) -> Self:
        for name in ("transfer_host", "transfer_bucket_mib"):
            if self.transfer != "distributed" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"trainer.{name} is for trainer.transfer distributed; leave it out")
        return self
