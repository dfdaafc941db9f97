"""The algorithm section.

- grpo divides by the standard deviation and rloo does not, unless told otherwise.
- A preset is a table of choices; what is set wins over it; it survives being written and read again.
- An unknown preset, and a clip that cannot be, are refused, and so is every combination in which a key has no effect or
  lacks what it needs, with the reason.
"""

import pytest
from pydantic import ValidationError

from areal_agent.algorithms.config import AlgorithmConfig

LOADED = {"model": "folder"}


@pytest.mark.parametrize(
    ("preset", "override", "divides"),
    [("grpo", None, True), ("rloo", None, False), ("grpo", False, False), ("rloo", True, True)],
)
def test_division_by_the_standard_deviation(preset, override, divides):
    assert AlgorithmConfig(preset=preset, normalize_by_std=override).divides_by_std is divides


@pytest.mark.parametrize(
    ("preset", "chosen"),
    [
        ("grpo", {"advantage": "grpo", "loss": "ppo_clip", "aggregation": "token_mean", "critic": False}),
        ("rloo", {"advantage": "rloo", "loss": "ppo_clip"}),
        ("ppo", {"advantage": "gae", "critic": True, "loss": "ppo_clip", "divides_by_std": False, "whitens": True}),
        (
            "gspo",
            {"loss": "gspo", "aggregation": "sequence_mean", "clip_high": 4e-4, "minibatches": 4, "whitens": False},
        ),
        ("cispo", {"advantage": "grpo", "loss": "cispo", "proximal": "behavior", "clip_low": 1.0}),
        (
            "dapo",
            {
                "clip_low": 0.2,
                "clip_high": 0.28,
                "aggregation": "token_mean",
                "minibatches": 4,
                "dynamic_sampling": True,
                "reward_parts": {"overlong": 1.0},
            },
        ),
    ],
)
def test_presets_are_tables_of_choices(preset, chosen):
    config = AlgorithmConfig(preset=preset)
    assert {name: getattr(config, name) for name in chosen} == chosen
    assert AlgorithmConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_config_of_an_earlier_run_is_understood():
    assert AlgorithmConfig.model_validate({"behavior_weight_cap": 3.0}).behavior_weight_high == 3.0


def test_what_is_set_wins_over_the_preset():
    config = AlgorithmConfig(preset="gspo", clip_high=0.5, advantage="rloo")
    assert (config.loss, config.clip_low, config.clip_high, config.advantage) == ("gspo", 3e-4, 0.5, "rloo")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"advantage": "gae"}, "advantage gae needs values: set critic to true"),
        ({"preset": "ppo", "advantage": "rloo"}, "advantage 'rloo' reads no values: set critic to false"),
        ({"gae_lambda": 0.9}, "gae_lambda has no effect on advantage 'grpo'"),
        ({"value_clip": 0.1}, "value_clip and critic_learning_rate have no effect without a critic"),
        ({"critic_learning_rate": 0.1}, "value_clip and critic_learning_rate have no effect without a critic"),
        ({"advantage": "dr_grpo", "normalize_by_std": True}, "is never divided by a deviation"),
        ({"preset": "ppo", "step_group_weight": 1.0}, "step_group_weight has no effect on advantage 'gae'"),
        ({"preset": "gspo", "dual_clip": 3.0}, "dual_clip has no effect on loss 'gspo'"),
        ({"proximal": "approximate"}, "is for minibatches > 1: with one, recompute costs nothing and is exact"),
        ({"preset": "cispo", "behavior_weight_level": "sequence"}, "that weight is 1"),
        ({"aggregation": "constant"}, "aggregation constant needs aggregation_tokens"),
        ({"aggregation_tokens": 9}, "aggregation_tokens has no effect on aggregation 'token_mean'"),
        ({"overlong_buffer": 0.5}, "no effect without a weight for overlong"),
        ({"kl_coefficient": 0.1}, "kl_coefficient needs a reference to diverge from"),
        (
            {"advantage": "reinforce_pp", "normalize_by_std": False},
            "has none: set it to null; whether the batch is normalised is said by whiten",
        ),
        ({"kl_in": "reward"}, "kl_in and kl_estimator have no effect without kl_coefficient"),
        ({"reference": "initial", "kl_coefficient": 0.1, "kl_estimator": "k2"}, "k2 has no effect in the loss"),
        (
            {"reference": "initial", "kl_coefficient": 0.1, "kl_in": "reward", "advantage": "my.code:score"},
            "does not reach the advantage function 'my.code:score'",
        ),
        ({"advantage": "grop"}, "is 'grop'; give one of grpo, dr_grpo, rloo, reinforce_pp, gae, or"),
        ({"loss": "code.py"}, "is 'code.py'; give one of ppo_clip, gspo, cispo, or 'package.module:function'"),
        ({"dual_clip": 1.0}, "greater than 1"),
        ({"clip_low": 1.1}, "less than or equal to 1"),
        ({"behavior_weight_high": 0.5}, "greater than or equal to 1"),
        ({"behavior_weight_low": 1.5}, "less than or equal to 1"),
        ({"behavior_weight_level": "none", "behavior_weight_mode": "mask"}, "with behavior_weight_level none"),
        ({"preset": "cispo", "behavior_weight_low": 0.5}, "that weight is 1"),
        ({"teacher": {}}, "neither model nor url"),
        ({"teacher": {"url": "10.0.0.7:30000"}}, "teacher.url"),
        ({"teacher": {**LOADED, "wait_s": 5}}, "wait_s only applies"),
        ({"teacher": LOADED, "dynamic_sampling": True}, "dynamic_sampling drops groups from which a teacher"),
        ({"teacher": LOADED, "preset": "rloo"}, "advantage has no effect without rewards"),
        ({"teacher": LOADED, "preset": "ppo"}, "advantage, critic has no effect"),
        ({"teacher": LOADED, "discount": 0.9}, "raise teacher.reward_weight"),
        ({"teacher": {**LOADED, "reward_weight": 1}, "advantage": "rloo"}, "'rloo' is not normalised"),
        ({"preset": "gpro"}, "should be 'grpo', 'rloo', 'ppo', 'gspo', 'cispo' or 'dapo'"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_the_reason(values, reason):
    with pytest.raises(ValidationError, match=reason):
        AlgorithmConfig.model_validate(values)
