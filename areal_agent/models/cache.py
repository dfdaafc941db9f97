"""Where built models are kept. It knows no torch, so that asking whether one is there costs nothing.

A model is named by everything that decides it: the recipe, the demonstrations and the seed.
"""

import hashlib
import importlib.util
import os
from dataclasses import asdict
from pathlib import Path

import orjson

from areal_agent.models.recipe import Recipe


def cache_root() -> Path:
    """`$AREAL_AGENT_CACHE`, else `areal_agent` in the user's cache folder (XDG)."""
    own = os.environ.get("AREAL_AGENT_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areal_agent"


def model_folder(recipe: Recipe, seed: int, demonstrations: str) -> Path:
    """The folder in the cache for this model, whether it is there or not.

    `demonstrations` is `package.module:name`; the source of the module's package is part of the name.
    """
    parts = [orjson.dumps(asdict(recipe)), demonstrations.encode(), *_sources(demonstrations.partition(":")[0])]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return cache_root() / f"tiny-{digest[:16]}-seed{seed}"


def _sources(module: str) -> list[bytes]:
    """The sources beside the module: what it draws its demonstrations from."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return []
    return [path.read_bytes() for path in sorted(Path(spec.origin).parent.glob("*.py"))]
