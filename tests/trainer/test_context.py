"""Ranks that share the tokens of a row (Ulysses): what cannot be shared is refused.

What they compute is in test_four_ranks.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from areal_agent.config import Config
from areal_agent.errors import ConfigError
from areal_agent.trainer.attention import Rule, segment_attention
from areal_agent.trainer.context import Context

ROOT = Path(__file__).parents[2]


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
        (["trainer.num_ranks=4", "trainer.replicas=3"], "replicas is 3, which does not divide trainer.num_ranks = 4"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.load(ROOT / "configs" / "quickstart.yaml", settings)
