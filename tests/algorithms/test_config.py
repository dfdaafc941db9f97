"""The algorithm section.

- grpo divides by the standard deviation and rloo does not, unless told otherwise.
- An unknown preset, and a clip that cannot be, are refused.
"""

import pytest
from pydantic import ValidationError

from areal_agent.algorithms.config import AlgorithmConfig


@pytest.mark.parametrize(
    ("preset", "override", "divides"),
    [("grpo", None, True), ("rloo", None, False), ("grpo", False, False), ("rloo", True, True)],
)
def test_division_by_the_standard_deviation(preset, override, divides):
    assert AlgorithmConfig(preset=preset, normalize_by_std=override).divides_by_std is divides


@pytest.mark.parametrize("fault", [{"preset": "gpro"}, {"clip_low": 1.0}, {"behavior_weight_cap": 0.5}])
def test_faults_are_refused(fault):
    with pytest.raises(ValidationError):
        AlgorithmConfig.model_validate(fault)
