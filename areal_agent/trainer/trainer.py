"""The trainer as one object: model, optimiser, random state, and the channel through which weights leave.

worker.py calls it for every command; it can also be used alone, in one process.
"""

import time
from pathlib import Path
from typing import Self

import torch

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.errors import ConfigError
from areal_agent.trainer.checkpoint import TRAINING, Checkpoint, hidden_folder, publish_checkpoint, read_checkpoint
from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.model import Critic, Policy, choose_device
from areal_agent.trainer.optimizer import Optimizer, Schedule
from areal_agent.trainer.ranks import ALONE, Group
from areal_agent.trainer.state import Training, export_adapter, form_of, read_training, write_export, write_training
from areal_agent.trainer.step import Stepper
from areal_agent.trainer.wire import StepInput, StepReport, TrainerInfo
from areal_agent.types import JsonObject, TensorEntry, Weights
from areal_agent.weights.channels import DiskChannel, DistributedChannel, SharedMemoryChannel, layout

NOTHING: JsonObject = {}


class Trainer:
    """One policy in training. Make it with `load`, end it with `close`."""

    def __init__(
        self,
        policy: Policy,
        *,
        reference: Policy | None = None,
        source: Path,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        seed: int,
        shared_memory: Path,
        chat_template: str | None,
        num_steps: int,
        group: Group = ALONE,
        shares_gpu: bool = False,
    ) -> None:
        self._group = group
        self._policy = policy
        self._source = source
        self._begun_with = source
        self._chat_template = chat_template
        self._config = config
        self._shares_gpu = shares_gpu
        self._step = 0
        schedule = Schedule.of(config, num_steps * algorithm.minibatches)
        self._critic = _new_critic(
            policy, config, algorithm, schedule, group
        )  # copies the policy before it is adapted or sharded
        if config.lora is not None:
            policy.adapt(config.lora, seed)
        if config.gradient_checkpointing:
            policy.recompute_layers()
        policy.shard(group)
        if reference is not None:
            reference.shard(group)
        self._optimizer = Optimizer(policy.trained_parameters().values(), config, schedule)
        is_own_reference = config.lora is not None and algorithm.reference == "initial"
        self._generator = torch.Generator().manual_seed(seed)
        self._reference = reference
        self._stepper = Stepper(
            policy,
            self._optimizer,
            self._generator,
            algorithm,
            config,
            reference=policy.without_adapter() if is_own_reference else reference,
            critic=self._critic,
            group=group,
        )
        self._channel = _open_channel(config, policy, shared_memory, source) if group.rank == 0 else None

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        base: Path | None = None,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        seed: int,
        shared_memory: Path,
        resume: bool = True,
        chat_template: str | None = None,
        num_steps: int = 1,
        device: torch.device | None = None,
        group: Group = ALONE,
        shares_gpu: bool = False,
    ) -> Self:
        """Load a Hugging Face folder. Raises ConfigError if it cannot be used.

        With `resume` a checkpoint continues exactly where it was saved; without, only its weights are loaded. `base` is
        the folder that the run began with, whose weights the adapters of a checkpoint need. Checkpoints get
        `chat_template`, or the folder's own. The learning rate schedule spans `num_steps`. With several ranks, each is
        in the same `group` and has a `device` of its own. With `shares_gpu`, memory that only a step needs is freed
        after it.
        """
        device = device or choose_device(config.device)
        checkpoint = _checkpoint_in(folder) if resume else None
        has_reference = algorithm.reference == "initial" and config.lora is None
        source = base if base is not None and checkpoint is not None and config.lora is not None else folder
        trainer = cls(
            Policy.load(source, device),
            reference=Policy.load(source, device).frozen() if has_reference else None,
            source=source,
            config=config,
            algorithm=algorithm,
            seed=seed,
            shared_memory=shared_memory,
            chat_template=chat_template,
            num_steps=num_steps,
            group=group,
            shares_gpu=shares_gpu,
        )
        if checkpoint is not None:
            read_training(folder, trainer._training)
            trainer._begun_with = folder
            trainer._step = checkpoint.step
        return trainer

    @property
    def info(self) -> TrainerInfo:
        return TrainerInfo(
            step=self._step,
            num_parameters=sum(one.numel() for one in self._policy.named_parameters().values()),
            device=str(self._policy.device),
        )

    def train_step(self, given: StepInput) -> StepReport:
        """Train one step. Raises ValueError unless `given.step` follows the last step."""
        if given.step != self._step + 1:
            raise ValueError(
                f"step {given.step} was requested, but the weights are those of step {self._step}; train step "
                f"{self._step + 1} next"
            )
        started_s = time.perf_counter()
        metrics = self._stepper.train(given)
        self._step = given.step
        if self._shares_gpu and self._policy.device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep the memory that only a step needs
        return StepReport(step=given.step, metrics=metrics, seconds=time.perf_counter() - started_s)

    def publish(self) -> Weights | None:
        """Copy the weights to where engines read them. Collective; ranks other than 0 get None."""
        pushes_adapter = self._config.lora is not None and self._config.lora.push == "adapter"
        parameters = self._policy.whole_adapter() if pushes_adapter else self._policy.whole_parameters()
        return None if self._channel is None else self._channel.write(parameters)

    def save(
        self, directory: Path, *, step: int, incarnation: int, run_state: JsonObject = NOTHING
    ) -> Checkpoint | None:
        """Publish a checkpoint that contains `run_state`. All ranks write; rank 0 publishes, the others get None.

        Raises ValueError unless `step` was trained last.
        """
        if step != self._step:
            raise ValueError(
                f"a checkpoint of step {step} was requested, but the weights are those of step {self._step}"
            )
        if self._group.rank:
            self._write(hidden_folder(directory, step))
            return None
        return publish_checkpoint(
            directory,
            step=step,
            incarnation=incarnation,
            run_state=run_state,
            write=self._write,
            keep_last=self._config.keep_last,
            begun_with=self._begun_with,
        )

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._group.leave()

    def _write(self, folder: Path) -> None:
        write_export(folder, self._policy, self._source, self._chat_template)
        export_adapter(folder, self._training, self._source)
        write_training(folder, self._training)

    @property
    def _training(self) -> Training:
        return Training(
            policy=self._policy,
            lora=self._config.lora,
            optimizer=self._optimizer,
            generator=self._generator,
            critic=self._critic,
            reference=self._reference,
        )


def _open_channel(
    config: TrainerConfig, policy: Policy, folder: Path, base: Path
) -> SharedMemoryChannel | DiskChannel | DistributedChannel:
    if config.lora is not None and config.lora.push == "adapter":
        return DiskChannel(folder / "adapters", torch.float32, form_of(config.lora, base))
    if config.transfer == "disk":
        return DiskChannel(folder / "weights", policy.publish_dtype)
    entries = layout(policy.named_parameters().items(), policy.publish_dtype)
    if config.transfer == "shared_memory":
        return SharedMemoryChannel(folder, entries)
    return _open_distributed(config, entries, policy.device)


def _open_distributed(
    config: TrainerConfig, entries: tuple[TensorEntry, ...], device: torch.device
) -> DistributedChannel:
    try:
        return DistributedChannel(
            entries, device, host=config.transfer_host, bucket_bytes=config.transfer_bucket_mib * 2**20
        )
    except OSError as error:
        raise ConfigError(
            f"trainer.transfer_host is {config.transfer_host!r}, but the trainer cannot listen there: {error}; give an "
            "address of this machine"
        ) from error


def _new_critic(
    policy: Policy, config: TrainerConfig, algorithm: AlgorithmConfig, schedule: Schedule, group: Group
) -> Critic | None:
    if not algorithm.critic:
        return None
    return Critic(
        policy,
        config,
        learning_rate=algorithm.critic_learning_rate,
        clip=algorithm.value_clip,
        schedule=schedule,
        group=group,
    )


def _checkpoint_in(folder: Path) -> Checkpoint | None:
    """Return `folder` as a checkpoint, or None for a plain model folder. Raises ConfigError for a damaged one."""
    if not (folder / TRAINING).is_dir():
        return None
    try:
        return read_checkpoint(folder)
    except ValueError as error:
        raise ConfigError(f"cannot resume: {error}; remove that checkpoint to resume from the one before") from None
