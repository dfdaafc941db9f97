"""A sequence that is longer than a micro-batch.

- It goes alone, and is trained.
- With `trainer.oversized: refuse`, a config under which there can be one is refused, others are not.
- A gateway elsewhere says nothing of lengths: there it cannot be refused.
"""

import pytest

from areal_agent.config import Config
from areal_agent.errors import ConfigError
from tests.trainer.lab import Lab


def test_it_goes_alone_and_is_trained(model_folder, make_batch, as_input):
    given = as_input(make_batch(1))
    metrics = Lab(model_folder, budget=1).stepper.train(given)
    assert metrics["num_micro_batches"] == len(given.records)
    assert metrics["num_loss_tokens"] == sum(int(record.loss_mask.sum()) for record in given.records)


def config(**trainer: object) -> Config:
    return Config.parse({"tasks": "a:b", "engine": {"max_context_tokens": 2049}, "trainer": trainer})


def test_a_config_under_which_there_can_be_one_is_refused():
    assert config(tokens_per_micro_batch=2047).trainer.oversized == "alone"
    assert config(tokens_per_micro_batch=2048, oversized="refuse").trainer.tokens_per_micro_batch == 2048
    with pytest.raises(ConfigError, match=r"max_context_tokens = 2049 does not fit into .* = 2047; raise that"):
        config(tokens_per_micro_batch=2047, oversized="refuse")


def test_it_cannot_be_refused_with_a_gateway_elsewhere():
    online = {"rollout": {"gateway_url": "http://127.0.0.1:1"}, "engine": {"url": "http://127.0.0.1:2"}}
    with pytest.raises(ConfigError, match=r"trainer\.oversized is 'refuse', which needs the run's own engine"):
        Config.parse({**online, "trainer": {"oversized": "refuse"}})
