"""Supervised training on demonstrations:

- the loss is on what the assistant says, its end token included, and on nothing else
- what a conversation is batched with, and its padding, change nothing
- the decay of the learning rate starts when copying passes the gate or the loss is flat, and at the latest at its cap
- conversations without numbers have no copying to wait for
- progress rises to 1
- it learns: the loss falls
"""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from areal_agent.models.recipe import Conversation, Recipe
from areal_agent.models.tiny import ConversationEncoder, WarmStart, WarmStartProgress, make_model

SPOKEN = '<tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call><|im_end|>'
CONVERSATION: Conversation = [
    {"role": "user", "content": "assistant\nWhat is 12?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "python", "arguments": '{"code": "print(1)"}'}}]},
    {"role": "tool", "content": "345"},
    {"role": "assistant", "content": "The answer is 345."},
]


def train(
    tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation], recipe: Recipe
) -> tuple[WarmStartProgress, list[WarmStartProgress]]:
    torch.manual_seed(0)
    model = make_model(tokenizer, recipe)
    reports = [*WarmStart(model, tokenizer, cycle(conversations), recipe).run()]
    return reports[-1], reports


def test_the_loss_is_on_what_the_assistant_says(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = ConversationEncoder(tokenizer).batch([CONVERSATION])
    spoken = batch.targets[0][batch.targets[0] != -100]
    assert tokenizer.decode(spoken, skip_special_tokens=False) == SPOKEN + "The answer is 345.<|im_end|>"


def test_the_digits_among_it(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = ConversationEncoder(tokenizer).batch([CONVERSATION])
    assert tokenizer.decode(batch.targets[batch.is_digit]) == "1345"


def test_company_changes_nothing(tokenizer: PreTrainedTokenizerFast, small_recipe: Recipe) -> None:
    model = make_model(tokenizer, small_recipe)
    encoder = ConversationEncoder(tokenizer)
    short: Conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I cannot do that."}]
    alone, together = encoder.batch([short]), encoder.batch([CONVERSATION, short])
    length = alone.inputs.shape[1]
    with torch.no_grad():
        logits_alone = model(input_ids=alone.inputs, use_cache=False).logits[0]
        logits_together = model(input_ids=together.inputs, use_cache=False).logits[1, :length]
    assert (together.targets[1, length:] == -100).all()
    assert torch.equal(together.targets[1, :length], alone.targets[0])
    torch.testing.assert_close(logits_together, logits_alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("gate", "steps"), [(0.0, 2 + 6), (2.0, 10 + 6)], ids=["opens at once", "never opens"])
def test_the_gate_starts_the_decay(
    tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation], small_recipe: Recipe, gate: float, steps: int
) -> None:
    recipe = replace(small_recipe, copy_gate=gate, check_every=2, max_gate_steps=10, num_decay_steps=6)
    result, _ = train(tokenizer, conversations, recipe)
    assert result.step == steps


def test_a_flat_loss_starts_the_decay(tokenizer: PreTrainedTokenizerFast, small_recipe: Recipe) -> None:
    """A model that learns nothing: its loss is flat from the first check on."""
    recipe = replace(
        small_recipe, learning_rate=0.0, copy_gate=2.0, num_flat_checks=3, max_gate_steps=100, num_decay_steps=6
    )
    result, _ = train(tokenizer, [CONVERSATION], recipe)
    assert result.step == 2 + 3 * 2 + 6


def test_without_numbers_there_is_no_copying(tokenizer: PreTrainedTokenizerFast, small_recipe: Recipe) -> None:
    silent: Conversation = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "I cannot do that."}]
    result, _ = train(tokenizer, [silent], replace(small_recipe, copy_gate=0.0))
    assert (result.step, str(result)) == (4 + 2, f"step 6, loss {result.loss:.2f}")


@pytest.mark.parametrize("gate", [0.0, 2.0])
def test_progress_rises_to_one(
    tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation], small_recipe: Recipe, gate: float
) -> None:
    _, reports = train(tokenizer, conversations, replace(small_recipe, copy_gate=gate))
    fractions = [report.fraction for report in reports]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_it_learns(tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation], small_recipe: Recipe) -> None:
    recipe = replace(small_recipe, check_every=60, max_gate_steps=60, num_decay_steps=60, batch_size=8)
    result, _ = train(tokenizer, conversations, recipe)
    assert result.loss < 3  # from log(vocabulary) = 6
