"""What a checkpoint folder holds of a trainer: its weights as a Hugging Face export, and what going on needs besides.

Reading and writing only; how a folder is published is checkpoint.py's. Loading never unpickles: safetensors, JSON, and
torch.load with weights_only=True.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from areal_agent.errors import ConfigError
from areal_agent.trainer.checkpoint import MANIFEST, TRAINING
from areal_agent.trainer.critic import Critic
from areal_agent.trainer.model import Policy
from areal_agent.trainer.optimizer import Optimizer

STATE_FILE = "state.pt"
CHAT_TEMPLATE = "chat_template.jinja"
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
"""Tokenizer and template files; what save_pretrained writes itself is not copied over."""


def write_export(folder: Path, policy: Policy, source: Path, chat_template: str | None = None) -> None:
    """Write the weights in float32 with their config, and the tokenizer files of the folder they were loaded from.

    With `chat_template`, that is the tokenizer's template: transformers takes the file before any other place.
    """
    policy.model.save_pretrained(folder)
    for pattern in COPIED:
        for file in source.glob(pattern):
            is_ours = file.name == MANIFEST or "safetensors" in file.name
            if not is_ours and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
    if chat_template is not None:
        (folder / CHAT_TEMPLATE).write_text(chat_template)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What going on needs besides the weights: optimiser and number of updates, random state, and two models."""

    optimizer: Optimizer
    generator: torch.Generator
    critic: Critic | None
    reference: Policy | None  # its weights are those that the run began with, which nothing else keeps


def write_training(folder: Path, training: Training) -> None:
    """Write all of it."""
    (folder / TRAINING).mkdir()
    state: dict[str, Any] = {
        "optimizer": training.optimizer.state_dict(),
        "generator": training.generator.get_state(),
    }
    if training.critic is not None:
        state["critic"] = training.critic.state_dict()
    if training.reference is not None:
        state["reference"] = training.reference.model.state_dict()
    torch.save(state, folder / TRAINING / STATE_FILE)


def read_training(folder: Path, training: Training) -> None:
    """Restore what `write_training` wrote. Raises ConfigError when the run had no critic or no reference until now."""
    state: dict[str, Any] = torch.load(folder / TRAINING / STATE_FILE, weights_only=True, map_location="cpu")
    training.optimizer.load_state_dict(state["optimizer"])
    training.generator.set_state(state["generator"])
    if training.critic is not None:
        training.critic.load_state_dict(_part(state, "critic", folder))
    if training.reference is not None:
        training.reference.model.load_state_dict(_part(state, "reference", folder))


def _part(state: Mapping[str, Any], name: str, folder: Path) -> Mapping[str, Any]:
    if name not in state:
        raise ConfigError(
            f"cannot resume: the checkpoint {str(folder)!r} was saved without a {name}, which the algorithm now asks "
            "for; resume with the algorithm that the run began with"
        )
    return state[name]
