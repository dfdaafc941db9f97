"""A tokenizer trained on demonstrations, and a recipe so small that building takes a second."""

from dataclasses import replace
from itertools import islice

import pytest
from transformers import PreTrainedTokenizerFast

from areal_agent.models.recipe import RECIPE, Conversation, Recipe, render, train_tokenizer
from envs.calculator.demonstrations import demonstrations


@pytest.fixture(scope="session")
def conversations() -> list[Conversation]:
    return list(islice(demonstrations(7), 2000))


@pytest.fixture(scope="session")
def tokenizer(conversations: list[Conversation]) -> PreTrainedTokenizerFast:
    return train_tokenizer(map(render, conversations), vocab_size=RECIPE.vocab_size)


@pytest.fixture(scope="session")
def small_recipe() -> Recipe:
    return replace(
        RECIPE,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        head_dim=16,
        num_tokenizer_conversations=500,
        batch_size=4,
        num_warmup_steps=2,
        check_every=2,
        num_check_conversations=4,
        max_gate_steps=4,
        num_decay_steps=2,
    )
