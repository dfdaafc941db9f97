"""What a checkpoint folder holds of a trainer: its weights as a Hugging Face export, and what going on needs besides.

Reading and writing only; how a folder is published is checkpoint.py's. Loading never unpickles: safetensors, JSON, and
torch.load with weights_only=True.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from areal_agent.trainer.checkpoint import MANIFEST, TRAINING
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


def write_training(folder: Path, optimizer: Optimizer, generator: torch.Generator) -> None:
    """Write optimiser, number of updates and random state."""
    (folder / TRAINING).mkdir()
    state = {"optimizer": optimizer.state_dict(), "generator": generator.get_state()}
    torch.save(state, folder / TRAINING / STATE_FILE)


def read_training(folder: Path, optimizer: Optimizer, generator: torch.Generator) -> None:
    """Restore what `write_training` wrote."""
    state: dict[str, Any] = torch.load(folder / TRAINING / STATE_FILE, weights_only=True, map_location="cpu")
    optimizer.load_state_dict(state["optimizer"])
    generator.set_state(state["generator"])
