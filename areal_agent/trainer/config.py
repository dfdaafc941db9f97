"""The config section of the trainer process, and the settings that it starts with. Imports no torch."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.dtype import DType
from areal_agent.section import Section
from areal_agent.threads import Threads

Beta = Annotated[float, Field(ge=0, lt=1)]
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LearningRateSchedule = Literal["constant", "linear", "cosine"]


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): thin matrices that are trained in place of the model's own."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """The rank: the inner dimension of an adapter's two matrices."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """An adapter's output is multiplied by `alpha / rank`."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = LINEAR_LAYERS
    """The linear layers that get adapters, by the last part of their names; by default all of every layer."""
    push: Literal["merged", "adapter"] = "merged"
    """What engines get. `merged`: whole weights with the adapters merged in. `adapter`: the adapters alone, which
    vLLM's servers apply as they sample: less is transferred, and each token takes longer."""

    @property
    def scale(self) -> float:
        """The factor that an adapter's output is multiplied by."""
        return self.alpha / self.rank

    @field_validator("target_modules")
    @classmethod
    def _names_each_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"names {twice[0]!r} twice; name it once")
        return names


class TrainerConfig(Section):
    """Optimiser, micro-batches, processes and weight transfer. The defaults are those of the AReaL paper (Table 3)."""

    learning_rate: Annotated[float, Field(gt=0)] = 2e-5
    """AdamW's learning rate at the end of the warm-up."""
    schedule: LearningRateSchedule = "constant"
    """What follows the warm-up: `constant`, or a `linear` or `cosine` decay to `learning_rate_floor` over all steps of
    the run."""
    learning_rate_floor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The fraction of `learning_rate` that a `linear` or `cosine` schedule ends at."""
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.001
    """The fraction of the run's optimiser updates (`steps` times `algorithm.minibatches`) over which the learning rate
    rises linearly."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the root of AdamW's second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """Weight decay of matrices; norms and biases are not decayed."""
    gradient_clip: Annotated[float, Field(gt=0)] = 1.0
    """Gradients with a larger norm are scaled down to this norm."""
    gradient_clip_quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Gradients are also scaled down to this quantile of the norms of the last 64 gradients before, once there are 8.
    `gradient_clip` is a number of one model and task; this follows the gradients' own scale as it changes over a run.
    0.5 is the median, for large models. 0.1 makes nearly all updates equally long, for tiny models whose rare failures
    have gradients many times the usual ones."""
    tokens_per_micro_batch: Annotated[int, Field(ge=1)] = 8192
    """Tokens that go through the model at once, padding included."""
    oversized: Literal["alone", "refuse"] = "alone"
    """What to do with a sequence longer than `tokens_per_micro_batch`. `alone`: it gets a micro-batch of its own,
    whatever memory that takes. `refuse`: a config whose `engine.max_context_tokens` allows one is an error."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input and recompute the rest in the backward pass: up to a third more time, for a fraction
    of the memory that long sequences take. Gradients do not change."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each layer but its attention (torch.compile): fewer passes over its activations, of which fewer are
    kept. The first step takes up to a minute longer. Gradients differ by rounding. `auto`: where one rank trains on a
    GPU. With one rank the first step tries whether it works, which takes a C compiler; if not, layers run as they are,
    and the log says so. Not measured on a GPU yet."""
    packing: Literal["tree", "balanced", "first_fit", "padded"] = "tree"
    """How sequences share a micro-batch; none sees another. `tree`: one row in which prefixes that several have are
    there once (docs/trees.md); where that saves little, or the model or `context_parallel` does not permit it, as
    `balanced`; for a model that takes images as `padded`. `balanced`: one row without padding, by Algorithm 1 of the
    AReaL paper. `first_fit`: one row, by first-fit decreasing. `padded`: one row for each, of similar lengths; models
    that take images or have a state that runs from token to token need it (docs/models.md)."""
    train_vision: bool = False
    """Train the vision tower of a model that takes images, too; else it stays as it is, and takes no optimiser state
    (docs/models.md)."""
    num_ranks: Annotated[int, Field(ge=1, le=1024)] = 1
    """Trainer processes, which share weights and work (FSDP2). On cuda each has its own GPU. On a Ray cluster they may
    be on several machines."""
    context_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    """Ranks that share the tokens of each packed row, for sequences whose activations one GPU cannot hold. It divides
    `num_ranks` and the model's attention heads; windowed attention longer than its window is refused."""
    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Copies of the model, each sharded over `num_ranks / replicas` neighbouring ranks (HSDP). Weights are gathered
    within a copy, and gradients alone are summed between copies, for machines that are slowly connected. It divides
    `num_ranks`, and a rank holds so many times more."""
    threads: Threads = "auto"
    """CPU threads of each trainer process. `auto` is as in `engine.threads`; in supervised fine-tuning the trainer has
    all cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda if there is a GPU."""
    dtype: DType = "auto"
    """What the model computes in; `auto` decides as `engine.dtype` does. Weights, sums of gradients and the optimiser
    are float32 in any case; on a CPU embeddings, last norm and output layer too. With bfloat16 one rank has a copy of
    the weights in it while it trains; of several, each casts a layer's when it runs (FSDP2), and none keeps a second
    copy of the model."""
    fp32_lm_head: bool = False
    """With bfloat16 on a GPU: compute the embeddings, the last norm and the output layer in float32, and so
    log-probabilities as exactly as the layers' outputs allow (MiniMax-M1, arXiv 2506.13585). Products of the output
    layer become several times slower. It narrows the difference to engines that do the same."""
    transfer: Literal["shared_memory", "disk", "distributed"] = "shared_memory"
    """How new weights reach the engine. `shared_memory`: through /dev/shm, or on one GPU that an embedded engine shares
    with the trainer through the memory of that GPU, if it can be shared. `disk`: through folders in the machine's
    temporary directory, for machines whose /dev/shm is too small, as in many containers; on a Ray cluster in the
    shared folder, and the default there. `distributed`: by torch.distributed, in a process group of the trainer and a
    server: NCCL if each has its own GPU, else gloo. Servers in `engine.urls` support it if areal_agent's launcher
    started them."""
    transfer_host: str | None = None
    """With `transfer: distributed`: the address of this machine at which servers find the trainer. By default it is
    `127.0.0.1`, and on a Ray cluster that of each rank's machine in `cluster.network`."""
    transfer_bucket_mib: Annotated[int, Field(ge=1, le=2047)] = 64
    """With `transfer: distributed`: the size of each message in MiB."""
    lora: LoraConfig | None = None
    """Train adapters (LoRA) and leave the model as it is: optimiser and gradients are of the adapters alone, and the
    reference is the model without them. Engines and checkpoints get the merged weights, checkpoints the adapters too.
    Adapters need about ten times the learning rate of full training. `{}` uses the defaults below; without this key
    the whole model is trained. See docs/lora.md."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 10
    """Train steps between checkpoints."""
    async_save: bool | Literal["auto"] = "auto"
    """Train on while a checkpoint is written: every rank copies its shards to the machine's memory and writes the
    copies. One save is under way at a time; the next one and the end of the run wait for it. `auto`: on a GPU, when
    the copies take at most half of the memory that is free then."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Checkpoints that are kept, besides the one that the run was resumed from."""
    startup_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """How long the process may take to load the model."""

    def compiles(self, *, is_gpu: bool, has_fsdp: bool) -> bool:
        """Return whether layers are to run compiled. With FSDP2 there is no trial, so only where it is asked for.

        >>> [TrainerConfig().compiles(is_gpu=True, has_fsdp=one) for one in (False, True)]
        [True, False]
        """
        return is_gpu and not has_fsdp if self.compile == "auto" else self.compile

    def saves_beside(self, num_bytes: int, free_bytes: int | None, *, is_gpu: bool) -> bool:
        """Return whether training goes on while a checkpoint is written, whose copies take `num_bytes` of a machine.

        >>> [TrainerConfig().saves_beside(40, free, is_gpu=True) for free in (100, 60, None)]
        [True, False, False]
        """
        if self.async_save != "auto":
            return self.async_save
        return is_gpu and free_bytes is not None and 2 * num_bytes <= free_bytes

    @property
    def num_threads(self) -> int:
        """`threads` as a number; 1 for an `auto` that nobody has resolved (areal_agent/threads.py)."""
        return 1 if self.threads == "auto" else self.threads

    @model_validator(mode="after")
    def _has_no_idle_options(self) -> Self:
        if self.fp32_lm_head and self.dtype == "float32":
            raise ValueError(
                "trainer.fp32_lm_head is true, but with trainer.dtype float32 every layer is float32; leave one out"
            )
        if self.fp32_lm_head and self.device == "cpu":
            raise ValueError(
                "trainer.fp32_lm_head is true, but with trainer.device cpu the output layer is float32; leave it out"
            )
        if self.train_vision and self.lora is not None:
            raise ValueError("trainer.train_vision is true, and trainer.lora trains adapters of text; leave one out")
        if self.train_vision and self.num_ranks > 1:
            raise ValueError(
                f"trainer.train_vision is true, and trainer.num_ranks is {self.num_ranks}, of which some may have no "
                "image in a micro-batch; set it to 1, or leave train_vision out"
            )
        for name in ("transfer_host", "transfer_bucket_mib"):
            if self.transfer != "distributed" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"trainer.{name} only applies to trainer.transfer distributed; leave it out")
        if self.context_parallel > 1 and self.packing == "padded":
            raise ValueError(
                f"trainer.context_parallel is {self.context_parallel}, which divides packed rows, and trainer.packing "
                "is 'padded'; set it to 1, or packing to 'balanced'"
            )
        for name in ("context_parallel", "replicas"):
            if self.num_ranks % (number := getattr(self, name)):
                raise ValueError(
                    f"trainer.{name} is {number}, which does not divide trainer.num_ranks = {self.num_ranks}; choose a "
                    "divisor of it"
                )
        if self.schedule == "constant" and self.learning_rate_floor:
            raise ValueError("trainer.learning_rate_floor only applies to trainer.schedule linear and cosine")
        return self

    def of_size(self, num_ranks: int) -> Self:
        """Return this config for another number of ranks. Raises ValueError where its other keys do not permit it."""
        return type(self).model_validate({**self.model_dump(), "num_ranks": num_ranks})

    def sizes(self) -> Iterator[int]:
        """Yield the numbers of ranks up to `num_ranks` that the other keys permit, the largest first.

        >>> list(TrainerConfig(num_ranks=6, context_parallel=2).sizes())
        [6, 4, 2]
        """
        for number in range(self.num_ranks, 0, -1):
            with contextlib.suppress(ValueError):
                yield self.of_size(number).num_ranks


class TrainerSetup(Section):
    """All that a trainer starts with."""

    model: Path
    """A Hugging Face folder."""
    base: Path | None = None
    """The model folder that the run began with, whose weights the adapters of a checkpoint need."""
    teacher: Path | None = None
    """The folder of the teacher that is loaded here (`algorithm.teacher.model`)."""
    trainer: TrainerConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    seed: int
    shared_memory: Path
    """The folder in which weights are published."""
    publishes: bool = True
    """Whether engines read the weights. Without, they leave in checkpoints alone."""
    resume: bool = True
    """If `model` is a checkpoint, continue exactly where it was saved. Without, only its weights are loaded."""
    chat_template: str | None = None
    """Saved with every checkpoint; None means that of `model`."""
    num_steps: int = 1
    """The steps that the learning rate schedule spans."""
    token_records: Path | None = None
    """The folder in which what single tokens were trained with is kept; None: nowhere."""
    token_records_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of the trajectories for which it is kept."""
    has_one_gpu: bool = False
    """Each rank sees its own GPU alone; without, all see those of one machine."""
    shares_gpu: bool = False
    """An engine uses the same GPU between steps, so memory that only a step needs is freed after it."""
    may_open_memory: bool = False
    """The engine may open memory of the trainer's GPU (`engine.config.may_open_memory`)."""
