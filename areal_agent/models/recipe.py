"""The tiny model's recipe: its shape and warm start, its demonstrations, and its folder in the cache. Imports no torch.

A cached model is named by everything that determines it: the recipe, the demonstrations and the seed.
"""

import hashlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import orjson

from areal_agent.errors import ConfigError
from areal_agent.models.tokenizer import Conversation


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Shape, tokenizer and warm start of a model of about a million parameters."""

    version: int = 1  # increase it when the code that follows the recipe changes its result

    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 2
    num_heads: int = 6
    head_dim: int = 32
    rope_theta: float = 1_000.0  # positions matter within a hundred tokens
    max_context_tokens: int = 1024

    vocab_size: int = 1024  # at most; the demonstrations determine it
    num_tokenizer_conversations: int = 4_000

    batch_size: int = 16  # conversations
    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    num_warmup_steps: int = 30

    check_every: int = 25  # steps between two measurements of how well it copies
    num_check_conversations: int = 128
    copy_gate: float = 0.9  # copying at least this well starts the decay of the learning rate
    typical_gate_steps: int = 150  # for the progress bar
    max_gate_steps: int = 500  # the decay starts here at the latest
    num_decay_steps: int = 150


RECIPE = Recipe()

DEMONSTRATIONS = "envs.calculator.demonstrations:demonstrations"
"""The default demonstrations of the tiny model: an import path, so that no environment is imported."""
TINY = "tiny"


def demonstrations_of(model: str) -> str | None:
    """Return the demonstrations for the tiny model of a config; None when `model` names another model.

    >>> demonstrations_of("tiny:my.module:function"), demonstrations_of("org/name")
    ('my.module:function', None)
    """
    name, colon, path = model.partition(":")
    if name != TINY:
        return None
    return path if colon else DEMONSTRATIONS


def cache_root() -> Path:
    """Return `$AREAL_AGENT_CACHE`, else `areal_agent` in the user's cache folder (XDG)."""
    own = os.environ.get("AREAL_AGENT_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areal_agent"


def model_folder(recipe: Recipe, seed: int, demonstrations: str) -> Path:
    """Return the folder in the cache for this model, which need not exist.

    `demonstrations` is `package.module:name`; the source of the module's package is part of the folder's name.
    """
    parts = [orjson.dumps(asdict(recipe)), demonstrations.encode(), *_sources(demonstrations.partition(":")[0])]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return cache_root() / f"tiny-{digest[:16]}-seed{seed}"


def _sources(module: str) -> list[bytes]:
    """Read the sources in the module's package, which the demonstrations depend on."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return []
    return [path.read_bytes() for path in sorted(Path(spec.origin).parent.glob("*.py"))]


Demonstrations = Callable[[int], Iterator[Conversation]]
"""`demonstrations(seed)` yields conversations without end."""


def load_demonstrations(path: str) -> Demonstrations:
    """Import `package.module:function`. Raises ConfigError that says which half is wrong."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"demonstrations: {path!r} is not of the form 'package.module:function'; give such a path")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise ConfigError(
            f"demonstrations: importing {module_name!r} failed: {error}; run it where that package can be imported"
        ) from error
    if not callable(found):
        raise ConfigError(f"demonstrations: {module_name!r} has no function {name!r}")
    return cast(Demonstrations, found)
