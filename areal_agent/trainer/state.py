"""A trainer's files in a checkpoint folder: its weights as a Hugging Face export, and what resuming needs besides.

This file reads and writes; checkpoint.py publishes folders. All ranks read and write together, each its own part:
`torch.distributed.checkpoint` stores tensors as safetensors with their place in the whole, so M ranks can read what N
ranks wrote. Nothing is pickled: numbers are JSON, and hyperparameters come from the config.

    training/shard-....safetensors   optimizer.*  generator  critic.*  critic_optimizer.*  reference.*  adapter.*
             progress.json           numbers of updates, the last gradients' norms, which of these parts exist, and the
                                     adapters' settings
    adapter/                         the trained adapters, for other programs to load

If adapters are trained, the export has them merged in; the weights without them are only in the folder that the run
began with. What is written is a `Content`, which has the live tensors or copies of them.
"""

import shutil
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from areal_agent.engine.foreign.weight_folders import AdapterForm, read_file_shapes
from areal_agent.engine.pushes import weight_files
from areal_agent.errors import ConfigError
from areal_agent.files import MANIFEST, no_device
from areal_agent.trainer.checkpoint import ADAPTER, RUN_STATE, TRAINING
from areal_agent.trainer.config import LoraConfig
from areal_agent.trainer.model import Critic, Policy
from areal_agent.trainer.optimizer import Optimizer
from areal_agent.trainer.ranks import shard_of, whole
from areal_agent.types import TensorEntry
from areal_agent.weights.channels import write_adapter, write_model

PROGRESS = "progress.json"
CHAT_TEMPLATE = "chat_template.jinja"
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
"""Tokenizer and template files. Files that save_pretrained wrote are not overwritten."""

ROUNDING = 1e-5
"""How much a merged weight may differ when it is merged again with another number of threads."""

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""Key an optimiser's state by parameter name, because parameter numbers differ between ranks."""


class TrainingProgress(BaseModel):
    """What the training state has beside tensors: `PROGRESS`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    parts: list[str]  # which were there
    num_updates: dict[str, NonNegativeInt]  # by optimiser
    norms: dict[str, list[float]] = {}  # of the last gradients; older checkpoints have none
    lora: dict[str, Any] | None = None  # the adapters' settings

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read that of a checkpoint. Raises ConfigError when it is damaged."""
        path = folder / TRAINING / PROGRESS
        try:
            return cls.model_validate_json(no_device(path).read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigError(
                f"cannot resume: {str(path)!r} cannot be read ({error!s:.300}); delete the checkpoint {str(folder)!r} "
                "to go on from the one before it"
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What a checkpoint is written from: this rank's shards of all tensors by name."""

    layout: tuple[TensorEntry, ...]  # of the exported weights
    parameters: Mapping[str, Tensor]  # the policy's with its adapters, of which the export is made
    training: Mapping[str, Tensor]
    progress: TrainingProgress

    @classmethod
    def of(cls, training: "Training") -> Self:
        """Return the live tensors. An optimiser that has made no update has no state to write."""
        optimizers = {name: one for name, (_, one) in training.optimizers().items()}
        parts = [*training.weights(), *(name for name, one in optimizers.items() if one.adamw.state)]
        return cls(
            layout=training.policy.published(torch.float32),
            parameters=dict(training.policy.model.named_parameters()),
            training=_tensors(training, parts),
            progress=TrainingProgress(
                parts=parts,
                num_updates={name: one.num_updates for name, one in optimizers.items()},
                norms={name: list(one.norms) for name, one in optimizers.items()},
                lora=_lora(training),
            ),
        )

    @property
    def num_bytes(self) -> int:
        """The bytes of copies of this rank's shards."""
        both = (*self.parameters.values(), *self.training.values())
        return sum(shard_of(one).nbytes for one in both)

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Self:
        """Return the same with a copy of each tensor."""
        both = ({name: copy(one) for name, one in of.items()} for of in (self.parameters, self.training))
        return replace(self, parameters=next(both), training=next(both))


def write_export(
    folder: Path, policy: Policy, source: Path, chat_template: str | None = None, content: Content | None = None
) -> None:
    """Write the weights in float32 with their config, and copy the tokenizer files of the folder `source`.

    The weights are the policy's own, or those of `content`.
    `chat_template`, if given, becomes the tokenizer's template: transformers prefers this file to any other place.
    """
    weights = policy.whole_parameters(torch.float32, content and content.parameters)
    try:
        if _is_first_rank():
            write_model(folder, content.layout if content else policy.published(torch.float32), weights)
            _write_description(folder, policy, source, chat_template)
    finally:
        deque(weights, maxlen=0)  # the other ranks take part in gathering, also when the first cannot write


def _write_description(folder: Path, policy: Policy, source: Path, chat_template: str | None) -> None:
    """Write what a Hugging Face folder has besides its weights."""
    if not policy.is_part:  # else the config that describes all of it is copied below
        config = policy.model.config
        config.architectures = [type(policy.model).__name__]
        config.save_pretrained(folder)
    for pattern in COPIED:
        for file in source.glob(pattern):
            is_ours = file.name in (MANIFEST, RUN_STATE) or "safetensors" in file.name
            if not is_ours and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
    if chat_template is not None:
        (folder / CHAT_TEMPLATE).write_text(chat_template)


def export_adapter(folder: Path, training: "Training", base: Path, content: Content) -> None:
    """Write the adapters, if any are trained, to the subfolder `adapter`. `base` is the folder of the frozen model."""
    if training.lora is None:
        return
    matrices = {name: whole(content.parameters[name].detach()) for name in training.policy.trained_parameters()}
    if _is_first_rank():
        (folder / ADAPTER).mkdir()
        write_adapter(folder / ADAPTER, matrices, form_of(training.lora, base))


def form_of(lora: LoraConfig, base: Path) -> AdapterForm:
    """Describe the adapters that are trained on the model in `base`."""
    return AdapterForm(base=base, rank=lora.rank, alpha=lora.alpha, target_modules=lora.target_modules)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The state that resuming needs besides the exported weights."""

    policy: Policy
    lora: LoraConfig | None  # None: the whole model is trained
    optimizer: Optimizer
    generator: torch.Generator
    critic: Critic | None
    reference: Policy | None  # its weights are those that the run began with, which are stored nowhere else

    def optimizers(self) -> Mapping[str, tuple[nn.Module, Optimizer]]:
        """Return the optimisers by name, each with the model whose parameters it updates."""
        found: dict[str, tuple[nn.Module, Optimizer]] = {"optimizer": (self.policy.model, self.optimizer)}
        if self.critic is not None:
            found["critic_optimizer"] = (self.critic.model, self.critic.optimizer)
        return found

    def trained(self) -> Mapping[str, Tensor]:
        """Return what the optimisers change, by name; with several ranks, this one's shards."""
        critic = {} if self.critic is None else dict(self.critic.model.named_parameters())
        return {**self.policy.trained_parameters(), **{f"critic.{name}": one for name, one in critic.items()}}

    def frozen(self) -> Mapping[str, Tensor]:
        """Return what stays as it is beside that: weights below adapters, a vision tower, and a reference."""
        trained = self.policy.trained_parameters()
        below = {name: one for name, one in self.policy.named_parameters().items() if name not in trained}
        reference = {} if self.reference is None else self.reference.named_parameters()
        return {**below, **{f"reference.{name}": one for name, one in reference.items()}}

    def weights(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return by name the weights that the Hugging Face export does not hold. Tied weights appear once."""
        found: dict[str, Mapping[str, Tensor]] = {}
        if self.lora is not None:
            found["adapter"] = self.policy.trained_parameters()
        if self.critic is not None:
            found["critic"] = dict(self.critic.model.named_parameters())
        if self.reference is not None:
            found["reference"] = self.reference.named_parameters()
        return found


class _Writer(HuggingFaceStorageWriter):
    """Does not make the checkpoint's folder, which rank 0 has made: where it is missing, a shared disk is away."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not (folder := Path(self.path).parent).is_dir():
            raise FileNotFoundError(f"{folder} is not on the machine of every rank; bring its shared disk back")
        return super().prepare_local_plan(plan)


def write_training(folder: Path, content: Content, world: dist.ProcessGroup | None) -> None:
    """Write the rest of `content`, each rank of `world` its shards. Raises on all ranks what one of them raises."""
    writer = _Writer(str(folder / TRAINING), save_distributed=True)
    try:
        with _alone_without_warning():
            save(dict(content.training), storage_writer=writer, process_group=world)
    except CheckpointException as failed:  # a BaseException
        faults = [fault for fault, _ in failed.failures.values()]
        raise next((one for one in faults if not isinstance(one, OSError)), faults[0]) from None
    if _is_first_rank():
        (folder / TRAINING / PROGRESS).write_text(content.progress.model_dump_json())


def read_training(folder: Path, training: Training) -> None:
    """Restore what `write_training` wrote.

    Raises ConfigError when the checkpoint is damaged, lacks a critic or reference that the algorithm needs, or has
    other adapters.
    """
    progress = TrainingProgress.read(folder)
    if progress.lora != _lora(training):
        raise ConfigError(
            f"cannot resume: the checkpoint {str(folder)!r} was saved with trainer.lora = {progress.lora}, but the "
            f"config now has {_lora(training)}; resume with the setting that the run began with"
        )
    parts = [name for name in progress.parts if name in {*training.weights(), *training.optimizers()}]
    missing = [name for name in training.weights() if name not in parts]
    if missing := [*missing, *(training.optimizers().keys() - progress.num_updates.keys())]:
        raise ConfigError(
            f"cannot resume: the checkpoint {str(folder)!r} was saved without a {missing[0]}, which the algorithm now "
            "needs; resume with the algorithm that the run began with"
        )
    tensors = _tensors(training, parts)
    with _alone_without_warning():
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder / TRAINING)))
    training.generator.set_state(tensors["generator"])  # models were loaded in place
    for name, (model, optimizer) in training.optimizers().items():
        if name in parts:
            state = get_optimizer_state_dict(model, optimizer.adamw, options=FLAT)
            read = {key: tensors[f"{name}.{key}"].reshape(one.shape) for key, one in _only_tensors(state).items()}
            state |= cast(dict[str, Any], read)
            set_optimizer_state_dict(model, optimizer.adamw, state, options=FLAT)
        optimizer.num_updates = progress.num_updates[name]
        optimizer.norms.extend(progress.norms.get(name, ()))
    if training.lora is not None:
        _require_same_base(folder, training.policy)


def _tensors(training: Training, parts: list[str]) -> dict[str, Tensor]:
    """Return this rank's shards of the named parts as tensors, to write or to read into."""
    tensors = {"generator": training.generator.get_state()}
    for name, weights in training.weights().items():
        tensors |= {f"{name}.{key}": one.detach() for key, one in weights.items()}
    for name, (model, optimizer) in training.optimizers().items():
        if name in parts:
            state = get_optimizer_state_dict(model, optimizer.adamw, options=FLAT)
            for key, one in _only_tensors(state).items():
                # at least one dimension: the reader cannot slice a scalar such as an update count
                tensors[f"{name}.{key}"] = one.reshape(tuple(one.shape) or (1,))
    return tensors


def _only_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Drop the hyperparameters, so that those of the config apply even if they have changed."""
    return {key: one for key, one in state.items() if isinstance(one, Tensor)}


def _lora(training: Training) -> dict[str, Any] | None:
    """Return the adapter settings that must match, all but how they are pushed."""
    return None if training.lora is None else training.lora.model_dump(mode="json", exclude={"push"})


def _require_same_base(folder: Path, policy: Policy) -> None:
    """Check that model plus adapters equal the export; otherwise the base weights are not those of the run."""
    files = {name: file for file in weight_files(folder) for name in read_file_shapes(folder / file)}
    different: list[str] = []  # raised in the end: the other ranks take part until then
    for name, merged in policy.whole_parameters(torch.float32):
        with safe_open(folder / files[name], framework="pt") as exported:
            if not torch.allclose(exported.get_tensor(name), merged.cpu(), rtol=ROUNDING, atol=ROUNDING / 10):
                different.append(name)
    if different:
        raise ConfigError(
            f"cannot resume: the adapters of {str(folder)!r} were trained on weights that differ from those loaded now "
            f"(in {different[0]!r}); give the model that the run began with"
        )


def _alone_without_warning() -> AbstractContextManager[object]:
    """Suppress torch's warning about saving without a process group, which is intended here."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
