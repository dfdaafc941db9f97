"""What is checked before a run starts: 1. a model that is no folder here is said to be taken for one on the hub;
2. nothing is said of one that is here, or is built; 3. a dry run finds an advantage or a loss that is not there.
"""

from pathlib import Path

import pytest

from areal_agent import ConfigError
from areal_agent.config import Config
from areal_agent.run.loop import train
from areal_agent.run.preflight import Preflight

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize(("model", "is_on_the_hub"), [("runs/mistyped", True), ("tiny", False)])
def test_the_summary_says_when_a_model_is_on_the_hub(model: str, is_on_the_hub: bool, tmp_path: Path) -> None:
    config = Config.load(QUICKSTART, [f"model={model}", f"run_dir={tmp_path / 'run'}"])
    assert ("on the hub" in Preflight.check(config).summary()) == is_on_the_hub


@pytest.mark.parametrize("key", ["algorithm.advantage", "algorithm.loss"])
def test_a_dry_run_imports_functions_of_the_users(key: str, tmp_path: Path) -> None:
    overrides = [f"run_dir={tmp_path / 'run'}", f"{key}=examples.custom_loss.loss:smoothclip"]
    with pytest.raises(ConfigError, match=f"{key}: 'examples.custom_loss.loss:smoothclip' cannot be imported"):
        train(QUICKSTART, overrides, resume=None, is_dry=True)


def test_a_dry_run_accepts_functions_that_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"run_dir={tmp_path / 'run'}", "algorithm.loss=examples.custom_loss.loss:smooth_clip"]
    assert train(QUICKSTART, overrides, resume=None, is_dry=True) == 0
    assert "nothing was started" in capsys.readouterr().out
