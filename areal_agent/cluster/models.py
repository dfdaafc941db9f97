"""Obtains the folder of the model that a config names: a folder, a hub name, or the tiny model, built when needed."""

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from areal_agent.errors import ConfigError
from areal_agent.models.recipe import RECIPE, demonstrations_of, model_folder
from areal_agent.observe.progress import Progress
from areal_agent.process import ManagedProcess

POLL_S = 0.25
WEIGHTS = "*.safetensors"
TOKENIZER = "tokenizer.json"
HUB_FILES = (WEIGHTS, "*.json", "*.jinja", "*.model", "*.txt")  # no pickles, no code


async def obtain_model(model: str, seed: int, logs: Path, progress: Progress) -> Path:
    """Return the Hugging Face folder of `model`.

    Raises ConfigError when it is not on the hub, ProcessDied when building fails.
    """
    if (demonstrations := demonstrations_of(model)) is not None:
        return await _tiny(seed, demonstrations, logs, progress)
    if (Path(model) / "config.json").is_file():
        return Path(model)
    progress.phase(f"downloading {model}")
    return await _download(model, HUB_FILES)


async def describe_model(model: str, seed: int) -> Path | None:
    """Return a folder with the config and tokenizer of `model`, and with weights only where they are here already.

    None for a tiny model that is not built yet. Raises ConfigError when the hub does not have the model.
    """
    if (demonstrations := demonstrations_of(model)) is not None:
        folder = model_folder(RECIPE, seed, demonstrations)
        return folder if (folder / "config.json").is_file() else None
    if (Path(model) / "config.json").is_file():
        return Path(model)
    return await _download(model, [pattern for pattern in HUB_FILES if pattern != WEIGHTS])


async def _download(model: str, patterns: Iterable[str]) -> Path:
    try:
        return Path(await asyncio.to_thread(snapshot_download, model, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        cause = str(error).splitlines()[0]
        raise ConfigError(
            f"model {model!r}: there is no such folder, and it cannot be downloaded from the hub: {cause}; name a "
            "Hugging Face folder, or a model of the hub (org/name) that this machine can reach or has downloaded"
        ) from None


def require_same_tokenizer(model: Path, checkpoint: Path) -> None:
    """Raise ConfigError unless a checkpoint was trained with the tokenizer of `model`."""
    ours, theirs = model / TOKENIZER, checkpoint / TOKENIZER
    if ours.is_file() and theirs.is_file() and ours.read_bytes() != theirs.read_bytes():
        raise ConfigError(
            f"cannot resume: the tokenizer of model {str(model)!r} is not the one that the checkpoint "
            f"{str(checkpoint)!r} was trained with; resume with the model (and seed) that the run began with"
        )


async def _tiny(seed: int, demonstrations: str, logs: Path, progress: Progress) -> Path:
    """Build the tiny model in a process of its own, so that torch stays out of this one.

    It uses one thread: a small model gains little from a second, and loses much when another program wants that core.
    """
    folder = model_folder(RECIPE, seed, demonstrations)
    if (folder / "config.json").is_file():
        return folder
    progress.phase("building the tiny model")
    argv = [
        sys.executable,
        "-m",
        "areal_agent.models.tiny",
        "--out",
        str(folder),
        "--seed",
        str(seed),
        "--threads",
        "1",
        "--demonstrations",
        demonstrations,
    ]
    process = await ManagedProcess.start("model building", argv, log_path=logs / "model.log")
    try:
        while process.is_running:
            await asyncio.sleep(POLL_S)
            fraction, text = read_progress(process.log_tail(1))
            progress.phase_progress(fraction, text)
        if not (folder / "config.json").is_file():
            raise await process.died()
    finally:
        await process.aclose()
    return folder


def read_progress(line: str) -> tuple[float, str]:
    """Read `42% warm start, step 130`; a line of another form means no progress.

    >>> read_progress("42% warm start"), read_progress("Loading")
    ((0.42, 'warm start'), (0.0, ''))
    """
    number, percent, text = line.strip().partition("%")
    return (int(number) / 100, text.strip()) if percent and number.isdigit() else (0.0, "")
