"""The trainer as one object: model, optimiser, random state, and the channel through which weights leave.

worker.py calls it for every command; it can also be used alone, in one process.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from areal_agent.algorithms.batching import NO_IMAGES
from areal_agent.callback import LOOPBACK
from areal_agent.dtype import slowness
from areal_agent.errors import ConfigError
from areal_agent.observe.token_records import TokenRecorder
from areal_agent.trainer.checkpoint import TRAINING, Checkpoint, hidden_folder, publish_checkpoint, read_checkpoint
from areal_agent.trainer.compiled import Compiled
from areal_agent.trainer.config import TrainerConfig, TrainerSetup
from areal_agent.trainer.digests import digest_of_ranks, numerics, weights_digest
from areal_agent.trainer.forward import vocab_size
from areal_agent.trainer.model import Critic, Policy, choose_device
from areal_agent.trainer.optimizer import Optimizer, Schedule
from areal_agent.trainer.ranks import ALONE, Group, Precision
from areal_agent.trainer.saving import Saver
from areal_agent.trainer.state import Training, form_of, read_training
from areal_agent.trainer.step import Stepper
from areal_agent.trainer.wire import StepInput, StepReport, TrainerInfo
from areal_agent.types import DistributedWeights, JsonObject, TokenRecord, Weights
from areal_agent.weights.channels import (
    MOST_SHARED_BYTES,
    NUM_SLOTS,
    DeviceChannel,
    DiskChannel,
    DistributedChannel,
    SharedMemoryChannel,
    joined,
)

logger = logging.getLogger(__name__)

NOTHING: JsonObject = {}


class Trainer:
    """One policy in training, from a Hugging Face folder. End it with `close`. Raises ConfigError for a bad folder.

    With several ranks, each is in the same `group` and has a `device` of its own.
    """

    def __init__(
        self,
        setup: TrainerSetup,
        *,
        device: torch.device | None = None,
        group: Group = ALONE,
        address: str = LOOPBACK,
    ) -> None:
        """`address` is the one of this machine at which servers find this rank, unless the config has another."""
        config, algorithm, lora = setup.trainer, setup.algorithm, setup.trainer.lora
        device = device or choose_device(config.device)
        checkpoint = _checkpoint_in(setup.model) if setup.resume else None
        is_adapted_checkpoint = checkpoint is not None and lora is not None
        self._source = setup.base if setup.base is not None and is_adapted_checkpoint else setup.model
        self._begun_with = self._source if checkpoint is None else setup.model
        self._step = 0 if checkpoint is None else checkpoint.step
        self._setup = setup
        is_padded = config.packing == "padded"
        self._policy = policy = Policy.load(self._source, device, is_padded=is_padded, group=group)
        has_reference, reference = algorithm.reference == "initial", None
        if has_reference and lora is None:
            reference = Policy.load(self._source, device, is_padded=is_padded, group=group).frozen()
        teacher = None
        if setup.teacher is not None:
            teacher = load_teacher(setup.teacher, policy, is_padded=is_padded, group=group)
        config = settled(config, group, [one for one in (policy, teacher) if one is not None])
        if config.train_vision:
            policy.train_vision(True)
        precision = Precision.of(config, device, policy.hidden_size)
        if slow := slowness("trainer.dtype", config.dtype, is_gpu=device.type == "cuda"):
            logger.warning("%s", slow)
        self._group = group
        schedule = Schedule.of(config, setup.num_steps * algorithm.minibatches)
        is_compiled = config.compiles(is_gpu=device.type == "cuda", has_fsdp=group.mesh is not None)
        compiled = Compiled() if is_compiled else None
        # a critic copies the policy, which has to be done before that is adapted or sharded
        critic = None
        if algorithm.critic:
            critic = Critic(
                policy, config, algorithm, schedule=schedule, group=group, precision=precision, compiled=compiled
            )
        if lora is not None:
            policy.adapt(lora, setup.seed, precision)
        if compiled is not None:
            policy.compile_layers(compiled)
        if config.gradient_checkpointing:
            policy.recompute_layers()
        policy.shard(group, precision)
        for frozen in (reference, teacher):
            if frozen is not None:
                frozen.shard(group, precision)
        self._training = Training(
            policy=policy,
            lora=lora,
            optimizer=Optimizer(policy.trained_parameters().values(), config, schedule),
            generator=torch.Generator().manual_seed(setup.seed),
            critic=critic,
            reference=reference,
        )
        by_reference = None if reference is None else reference.logprobs_and_entropy
        if has_reference and lora is not None:  # without its adapter, the policy is what it was at the start
            by_reference = policy.logprobs_without_adapter
        recorder = None
        if setup.token_records is not None and setup.token_records_share > 0:
            recorder = TokenRecorder(setup.token_records, setup.token_records_share, group.rank)
        self._stepper = Stepper(
            policy,
            self._training.optimizer,
            self._training.generator,
            algorithm,
            config,
            reference=by_reference,
            teacher=None if teacher is None else teacher.logprobs_and_entropy,
            critic=critic,
            group=group,
            recorder=recorder,
        )
        self._channel = None
        self._former: DeviceChannel | None = None  # which engines may still be brought to
        if setup.publishes and (group.rank == 0 or config.transfer == "distributed"):
            self._host = config.transfer_host or address
            self._channel = _open_device_channel(setup, policy) or self._open_channel()
        if checkpoint is not None:
            read_training(setup.model, self._training)
        self.saver = Saver(self._training, group, config, source=self._source, chat_template=setup.chat_template)
        self.info = self._described(teacher)

    def _described(self, teacher: Policy | None) -> TrainerInfo:
        taught = {} if teacher is None else {f"teacher.{name}": one for name, one in teacher.named_parameters().items()}
        return TrainerInfo(
            step=self._step,
            num_parameters=sum(one.numel() for one in self._policy.named_parameters().values()),
            device=str(self._policy.device),
            weights=self._digest(self._training.trained()),
            frozen=self._digest({**self._training.frozen(), **taught}),
            numerics=numerics(self._policy.device),
        )

    def _digest(self, tensors: Mapping[str, Tensor]) -> str:
        """Return the digest of tensors that all ranks have, or have shards of. Collective; it is that of rank 0."""
        digests = self._group.collect(weights_digest(tensors.items()))
        return digest_of_ranks(digests) if digests else ""

    def train_step(self, given: StepInput) -> StepReport:
        """Train one step. Raises ValueError unless `given.step` follows the last step."""
        report = self._made(given.step, lambda: self._stepper.train(given))
        began_s = time.perf_counter()
        weights = self._digest(self._training.trained())
        took_s = time.perf_counter() - began_s
        metrics = {**report.metrics, "seconds_digest": took_s}
        return replace(report, metrics=metrics, seconds=report.seconds + took_s, weights=weights)

    def fit(
        self,
        step: int,
        records: Sequence[TokenRecord],
        *,
        rate: float = 1.0,
        images: Mapping[str, bytes] = NO_IMAGES,
    ) -> StepReport:
        """Make one supervised step, at `rate` times the schedule's learning rate. Raises ValueError as `train_step`."""
        return self._made(step, lambda: self._stepper.fit(records, rate, images))

    def measure(self, records: Sequence[TokenRecord], images: Mapping[str, bytes] = NO_IMAGES) -> list[Tensor]:
        """Return the log-probability of each loss token of each record, [M] float32, under the weights as they are."""
        return self._stepper.measure(records, images)

    def _made(self, step: int, train: Callable[[], dict[str, float]]) -> StepReport:
        if step != self._step + 1:
            raise ValueError(
                f"step {step} was requested, but the weights are those of step {self._step}; train step "
                f"{self._step + 1} next"
            )
        started_s = time.perf_counter()
        metrics = train()
        self._step = step
        if self._setup.shares_gpu and self._policy.device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep the memory that only a step needs
        return StepReport(step=step, metrics=metrics, seconds=time.perf_counter() - started_s)

    def _open_channel(self) -> SharedMemoryChannel | DiskChannel | DistributedChannel:
        setup = self._setup
        return _open_channel(setup.trainer, self._policy, setup.shared_memory, self._source, self._host, self._group)

    def _leave_device(self) -> None:
        """Publish through the host from now on. What was handed out last stays until the publish after this one."""
        if isinstance(self._channel, DeviceChannel):
            self._former, self._channel = self._channel, self._open_channel()

    def publish(self, *, through_host: bool = False) -> Weights | None:
        """Copy the weights to where engines read them. Collective; ranks other than 0 get None.

        With `through_host` that is from now on never the memory of a GPU, which the engine could not open.
        """
        if self._former is not None:
            self._former.close()
            self._former = None
        if through_host:
            self._leave_device()
        lora = self._setup.trainer.lora
        pushes_adapter = lora is not None and lora.push == "adapter"
        is_spread = isinstance(self._channel, DistributedChannel)
        parameters = (
            self._policy.whole_adapter().items()
            if pushes_adapter
            else self._policy.whole_parameters(on_all_ranks=is_spread)
        )
        if self._channel is None:
            deque(parameters, maxlen=0)  # takes part in gathering
            return None
        try:
            weights = self._channel.write(parameters)
        except RuntimeError as error:  # of CUDA, such as one of memory
            if not isinstance(self._channel, DeviceChannel) or self._group.size > 1:  # others have given their parts
                raise
            logger.warning("new weights go through the host's memory from now on: %s", error)
            self._leave_device()
            weights = self._channel.write(self._policy.whole_parameters())
        if not isinstance(weights, DistributedWeights):
            return weights
        written = self._group.collect(weights)
        return joined(written) if written else None

    def save(
        self, directory: Path, *, step: int, incarnation: int, run_state: JsonObject = NOTHING
    ) -> Checkpoint | None:
        """Publish a checkpoint that contains `run_state`. All ranks write; rank 0 publishes, the others get None.

        Beside training (`trainer.async_save`) it only begins, all get None, and `saver.ended` has the result. Raises
        ValueError unless `step` was trained last, and OSError on rank 0 if files cannot be written.
        """
        if step != self._step:
            raise ValueError(
                f"a checkpoint of step {step} was requested, but the weights are those of step {self._step}"
            )
        publish = partial(
            publish_checkpoint,
            directory,
            step=step,
            incarnation=incarnation,
            run_state=run_state,
            keep_last=self._setup.trainer.keep_last,
            begun_with=self._begun_with,
        )
        return self.saver.save(hidden_folder(directory, step, incarnation), publish)

    def close(self) -> None:
        self.saver.close()
        for channel in (self._channel, self._former):
            if channel is not None:
                channel.close()
        self._group.leave()


def settled(config: TrainerConfig, group: Group, models: Sequence[Policy]) -> TrainerConfig:
    """Return the config with another `packing` if it asks for trees and they cannot be had; the reason is logged.

    Raises ConfigError for what is not there for a model that takes images, or for its images alone.
    """
    if models[0].vision is not None:
        if config.packing in ("balanced", "first_fit"):
            raise ConfigError(
                f"trainer.packing is {config.packing!r}, and sequences with images need a row each; set it to 'padded'"
            )
        if config.context_parallel > 1:
            raise ConfigError(
                f"trainer.context_parallel is {config.context_parallel}, which divides packed rows, and sequences with "
                "images need a row each; set it to 1"
            )
        if config.lora is not None and config.lora.push == "adapter":
            raise ConfigError(
                "trainer.lora.push is 'adapter', which is not proved for models that take images; set it to 'merged'"
            )
        if config.packing != "padded":
            logger.info("each sequence has a row of its own (trainer.packing padded): the model takes images")
        return config.model_copy(update={"packing": "padded"})
    if config.train_vision:
        raise ConfigError("trainer.train_vision is true, and the model takes no images; leave it out")
    faults = [one.tree_fault for one in models if one.tree_fault is not None]
    if group.context is not None:
        faults.append("trainer.context_parallel shares out rows of whole sequences")
    if config.packing != "tree" or not faults:
        return config
    logger.info("prefixes that sequences share are computed once for each (trainer.packing balanced): %s", faults[0])
    return config.model_copy(update={"packing": "balanced"})


def load_teacher(folder: Path, policy: Policy, *, is_padded: bool, group: Group) -> Policy:
    """Load a frozen teacher beside the policy. Raises ConfigError if it cannot score every id that this may sample."""
    try:
        teacher = Policy.load(folder, policy.device, is_padded=is_padded, group=group).frozen()
    except ConfigError as error:
        raise ConfigError(f"algorithm.teacher: {error}") from error
    if (teacher.vision is None) != (policy.vision is None):
        which = "the policy" if teacher.vision is None else "the teacher"
        raise ConfigError(f"algorithm.teacher: {which} alone takes images; choose a teacher of the policy's family")
    known, needed = vocab_size(teacher.model), vocab_size(policy.model)
    if known < needed:
        raise ConfigError(
            f"algorithm.teacher: {str(folder)!r} knows {known} ids, and the policy may sample any of {needed}; choose "
            "a teacher with as many"
        )
    return teacher


def _open_device_channel(setup: TrainerSetup, policy: Policy) -> DeviceChannel | None:
    """Share memory of the GPU with an engine there, if little is enough, or say why it cannot be."""
    config, lora = setup.trainer, setup.trainer.lora
    pushes_weights = config.transfer == "shared_memory" and (lora is None or lora.push == "merged")
    if not (pushes_weights and setup.may_open_memory and policy.device.type == "cuda"):
        return None
    entries = policy.published()
    if NUM_SLOTS * (entries[-1].offset + entries[-1].num_bytes) > MOST_SHARED_BYTES:
        return None
    try:
        return DeviceChannel(entries, policy.device, setup.shared_memory)
    except Exception as error:  # a boundary: CUDA's refusals share no type, and the host's memory always works
        logger.warning("new weights go through the host's memory, because the GPU's cannot be shared: %s", error)
        return None


def _open_channel(
    config: TrainerConfig, policy: Policy, folder: Path, base: Path, host: str, group: Group
) -> SharedMemoryChannel | DiskChannel | DistributedChannel:
    if config.lora is not None and config.lora.push == "adapter":
        return DiskChannel(folder / "adapters", torch.float32, form_of(config.lora, base))
    entries = policy.published()
    if config.transfer == "disk":
        return DiskChannel(folder / "weights", policy.publish_dtype, entries=entries)
    if config.transfer == "shared_memory":
        try:
            return SharedMemoryChannel(folder, entries)
        except OSError as error:
            raise ConfigError(
                f"trainer.transfer is 'shared_memory', but {folder} cannot hold the weights twice: {error.strerror}; "
                "make room there, or set trainer.transfer=disk"
            ) from error
    bucket_bytes = config.transfer_bucket_mib * 2**20
    share = {"rank": group.rank, "num_ranks": group.size}
    try:
        return DistributedChannel(entries, policy.device, host=host, bucket_bytes=bucket_bytes, **share)
    except OSError as error:
        raise ConfigError(
            f"trainer.transfer_host is {host!r}, but the trainer cannot listen there: {error}; give an "
            "address of this machine"
        ) from error


def _checkpoint_in(folder: Path) -> Checkpoint | None:
    """Return `folder` as a checkpoint, or None for a plain model folder. Raises ConfigError for a damaged one."""
    if not (folder / TRAINING).is_dir():
        return None
    try:
        return read_checkpoint(folder)
    except ValueError as error:
        raise ConfigError(f"cannot resume: {error}; remove that checkpoint to resume from the one before") from None
