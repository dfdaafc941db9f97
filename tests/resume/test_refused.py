"""A resume with settings that cannot be gone on with: 1. it leaves the run's config as it was, so that the run can
still be resumed without them; 2. a model with another tokenizer is refused before anything is started.
"""

import asyncio
import shutil
from pathlib import Path

import pytest

from areal_agent.config import Config
from areal_agent.errors import ConfigError
from areal_agent.run import Run
from tests.run.test_run import config, end, solve, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> tuple[Config, Path]:
    """A run of one step, and its folder."""
    settings = config(tmp_path_factory.mktemp("saved"), small_model, batch_size=1)
    return settings, asyncio.run(one_step(settings))


async def one_step(settings: Config) -> Path:
    async with Run(settings, workflow=solve) as run:
        await train(run, 1)
        await end(run)
    return run.folder.path


async def refusal(settings: Config, folder: Path, **changes: object) -> str:
    changed = Config.parse(settings.model_dump(mode="json") | changes)
    with pytest.raises(ConfigError) as caught:
        async with Run(changed, workflow=solve, resume=str(folder)):
            pass
    return str(caught.value)


async def test_a_refused_resume_leaves_the_config_as_it_was(saved: tuple[Config, Path]) -> None:
    settings, folder = saved
    before = (folder / "config.yaml").read_text()
    assert "was saved without a critic" in await refusal(settings, folder, algorithm={"preset": "ppo"})
    assert (folder / "config.yaml").read_text() == before


async def test_a_model_with_another_tokenizer_is_refused(
    saved: tuple[Config, Path], small_model: Path, tmp_path: Path
) -> None:
    settings, folder = saved
    other = shutil.copytree(small_model, tmp_path / "other")
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    reason = await refusal(settings, folder, model=str(other))
    assert "is not the one that the checkpoint" in reason
    assert "step_000001" in reason
