"""Ranks that share the tokens of a row (Ulysses) compute what one rank does.

1. loss and gradients in float64 are one rank's: two ranks, four with fewer key-value heads, two by two; 2. a train step
by FSDP2 with a critic makes the weights and metrics of one rank; 3. what cannot be shared is refused.
"""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.config import Config
from areal_agent.errors import ConfigError
from areal_agent.trainer.attention import Rule, segment_attention
from areal_agent.trainer.context import Context
from tests.trainer.context_ranks import LAYOUTS, loss_and_gradient
from tests.trainer.lab import GRADIENT_DESCENT, Lab

ROOT = Path(__file__).parents[2]
ALGORITHM = AlgorithmConfig(preset="ppo", minibatches=1)
NOT_COMPARED = ("seconds", "padding_fraction", "num_micro_batches")


@pytest.fixture
def found(model_folder: Path, make_batch: Any, as_input: Any, tmp_path: Path) -> dict[str, Any]:
    """What four ranks find. The model has 4 heads, which share 2 key-value heads."""
    work = model_folder, as_input(make_batch(1)), GRADIENT_DESCENT, ALGORITHM
    (tmp_path / "work.pickle").write_bytes(pickle.dumps(work))
    subprocess.run([sys.executable, "-m", "tests.trainer.context_ranks", str(tmp_path)], cwd=ROOT, check=True)
    return torch.load(tmp_path / "outcome.pt", weights_only=True)


@pytest.mark.slow
def test_ranks_that_share_rows_compute_what_one_does(found, model_folder, make_batch, as_input):
    loss, gradient = loss_and_gradient(model_folder, [[0, 1, 2]])
    for name in LAYOUTS:
        of_ranks, of_gradient = found[name]
        assert abs(of_ranks - loss) < 1e-9, name
        assert (of_gradient - gradient).abs().max() < 1e-9, name
    assert gradient.abs().max() > 0.1
    alone = Lab(model_folder, GRADIENT_DESCENT, ALGORITHM)
    metrics = alone.stepper.train(as_input(make_batch(1)))
    step = found["step"]
    torch.testing.assert_close(step["weights"] - alone.before, alone.weights() - alone.before, atol=2e-6, rtol=1e-4)
    compared = {name: value for name, value in metrics.items() if not name.startswith(NOT_COMPARED)}
    assert {name: step["metrics"][name] for name in compared} == pytest.approx(compared, rel=1e-3, abs=1e-5)


def context(size: int) -> Context:
    group: Any = None
    return Context(group=group, rank=0, size=size)


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    context(4).check(8)
    with pytest.raises(
        ConfigError, match=r"context_parallel is 3, which does not divide the model's 8 .* \[1, 2, 4, 8\]"
    ):
        context(3).check(8)


def test_a_window_within_a_sequence_is_refused() -> None:
    query = torch.zeros(1, 2, 8, 4)
    rule = Rule(reach=4, arguments={})
    with pytest.raises(ConfigError, match="windows or chunks, of 4 tokens, and a sequence has 10; set it to 1"):
        segment_attention(torch.nn.Module(), query, query, query, rule, segments=(10, 6), context=context(2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.num_ranks=4", "trainer.context_parallel=3"], "which does not divide trainer.num_ranks = 4"),
        (["trainer.num_ranks=2", "trainer.context_parallel=2", "trainer.packing=padded"], "which divides packed rows"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.load(ROOT / "configs" / "quickstart.yaml", settings)
