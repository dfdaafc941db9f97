"""What is checked before a run starts: 1. a model that is no folder here is said to be taken for one on the hub;
2. nothing is said of one that is here, or is built."""

from pathlib import Path

import pytest

from areal_agent.config import Config
from areal_agent.preflight import Preflight

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize(("model", "is_on_the_hub"), [("runs/mistyped", True), ("tiny", False)])
def test_the_summary_says_when_a_model_is_on_the_hub(model: str, is_on_the_hub: bool, tmp_path: Path) -> None:
    config = Config.load(QUICKSTART, [f"model={model}", f"run_dir={tmp_path / 'run'}"])
    assert ("on the hub" in Preflight.check(config).summary()) == is_on_the_hub
