"""The folder that an engine is started with: a model, or the adapters that its servers are to apply to one."""

from pathlib import Path

from areal_agent.engine.foreign.adapters import AdapterForm, begin_adapter
from areal_agent.errors import ConfigError, WeightUpdateError
from areal_agent.trainer.checkpoint import ADAPTER
from areal_agent.trainer.config import TrainerConfig


def engine_weights(config: TrainerConfig, model: Path, checkpoint: Path | None, folder: Path) -> Path:
    """What a run that began with `model`, and goes on from `checkpoint`, starts its engine with.

    Adapters are written into `folder`: servers may be started again long after. Raises ConfigError.
    """
    if config.lora is None or config.lora.push == "merged":
        return checkpoint or model
    form = AdapterForm(
        base=model, rank=config.lora.rank, alpha=config.lora.alpha, target_modules=config.lora.target_modules
    )
    try:
        return begin_adapter(folder / "begun_with", form, checkpoint / ADAPTER if checkpoint else None)
    except (OSError, WeightUpdateError) as error:
        raise ConfigError(f"trainer.lora.push is 'adapter', and there is nothing to begin with: {error}") from error
