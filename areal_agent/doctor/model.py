"""The model of a config: whether it is here, whether it can be served and trained, and how large it is."""

from dataclasses import dataclass
from pathlib import Path

from areal_agent.cluster.models import describe_model, obtain_model
from areal_agent.config import Config
from areal_agent.doctor.finding import Finding, State
from areal_agent.doctor.machine import gib
from areal_agent.doctor.shape import ModelShape
from areal_agent.errors import ConfigError
from areal_agent.models.recipe import RECIPE, demonstrations_of
from areal_agent.observe.progress import Progress
from areal_agent.preflight import MODEL_TYPES, check_model, check_model_folder

FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Where a model is; None: a tiny one that is not built yet, and was not asked for."""

    folder: Path | None


async def find_model(config: Config, logs: Path, *, with_weights: bool) -> Found:
    """The folder that a run would use, built or downloaded as a run does it; without weights only what is small.

    Raises ConfigError and ProcessDied.
    """
    check_model(config.model)
    if not with_weights:
        return Found(folder=await describe_model(config.model, config.seed))
    folder = await obtain_model(config.model, config.seed, logs, Progress(total_steps=0, mode="none"))
    check_model_folder(folder)
    return Found(folder=folder)


async def shape_of(config: Config, folder: Path | None) -> ModelShape:
    """The model's sizes. Raises ConfigError where they are not known."""
    if folder is not None:
        return ModelShape.read(folder)
    if demonstrations_of(config.model) is None:
        raise ConfigError(f"the sizes of {config.model!r} are not known, for it is not here; give a folder")
    return ModelShape.of_recipe(RECIPE)


def model_finding(config: Config, folder: Path | None, shape: ModelShape) -> Finding:
    """What it is, and whether engine and trainer know its kind."""
    million = shape.num_parameters / 1e6
    where = "built on first use" if folder is None else str(folder)
    found = (
        f"{shape.model_type}, {million:,.1f} million parameters, stored in {shape.dtype or 'an untold type'} "
        f"({gib(FLOAT32_BYTES * shape.num_parameters)} in float32): {where}"
    )
    longest, asked = shape.max_context_tokens, config.engine.max_context_tokens
    if shape.model_type not in MODEL_TYPES:
        return Finding(
            check="model",
            state=State.FAIL,
            found=f"{found}; type {shape.model_type!r} is not served",
            change=f"use a model of type {', '.join(MODEL_TYPES)}",
        )
    if longest is not None and asked > longest and not config.is_online:
        return Finding(
            check="model",
            state=State.FAIL,
            found=f"{found}; it was made for {longest} tokens, and engine.max_context_tokens is {asked}",
            change=f"set engine.max_context_tokens to at most {longest}",
        )
    return Finding(check="model", state=State.OK, found=found)
