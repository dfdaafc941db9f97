"""The tiny model's warm start, a supervised fine-tuning on demonstrations:

- the loss is on what the assistant says, its end token included, and on nothing else
- copying is the probability that all digits of a conversation are copied
- the decay of the learning rate starts when copying passes the gate or the loss is flat, and at the latest at its cap
- conversations without numbers have no copying to wait for
- progress rises to 1; that the loss falls is shown by sft/test_run.py, that copying is learnt by test_tiny.py
"""

import math
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast as Tokenizer

from areal_agent.models.recipe import Conversation, Recipe
from areal_agent.models.tiny import WarmStart, WarmStartProgress, make_model
from areal_agent.sft.fitting import Check

SPOKEN = '<tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call><|im_end|>'
CONVERSATION: Conversation = [
    {"role": "user", "content": "assistant\nWhat is 12?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "python", "arguments": '{"code": "print(1)"}'}}]},
    {"role": "tool", "content": "345"},
    {"role": "assistant", "content": "The answer is 345."},
]


def train(
    tokenizer: Tokenizer, conversations: list[Conversation], recipe: Recipe, folder: Path
) -> tuple[WarmStartProgress, list[WarmStartProgress]]:
    torch.manual_seed(0)
    begun = folder / "begun"
    make_model(tokenizer, recipe).save_pretrained(begun)
    tokenizer.save_pretrained(begun)
    reports = [*WarmStart(tokenizer, cycle(conversations), recipe).run(begun, folder, seed=0, threads=1)]
    return reports[-1], reports


def test_the_loss_is_on_what_the_assistant_says(tokenizer: Tokenizer, small_recipe: Recipe) -> None:
    (record,) = next(WarmStart(tokenizer, cycle([CONVERSATION]), replace(small_recipe, batch_size=1)).batches())
    assert tokenizer.decode(record.token_ids[record.loss_mask]) == SPOKEN + "The answer is 345.<|im_end|>"


def test_a_build_that_goes_on_skips_what_it_has_seen(
    tokenizer: Tokenizer, conversations: list[Conversation], small_recipe: Recipe
) -> None:
    whole = islice(WarmStart(tokenizer, iter(conversations), small_recipe).batches(), 4)
    rest = islice(WarmStart(tokenizer, iter(conversations), small_recipe).batches(num_done=2), 2)
    ids = [[[record.token_ids.tolist() for record in batch] for batch in batches] for batches in (whole, rest)]
    assert ids[0][2:] == ids[1]


def test_copying_is_the_probability_of_all_digits(tokenizer: Tokenizer, small_recipe: Recipe) -> None:
    """Of the two conversations one has four digits, each with probability 1/2; its other tokens do not count."""
    silent: Conversation = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "I cannot do that."}]
    copied: Conversation = [{"role": "user", "content": "1345?"}, {"role": "assistant", "content": "It is 1345."}]
    warm_start = WarmStart(tokenizer, cycle([copied, silent]), replace(small_recipe, num_check_conversations=2))
    texts = [[str(tokenizer.decode([token])) for token in one.token_ids[one.loss_mask]] for one in warm_start.check]
    logprobs = [[math.log(0.5) if text.isdigit() else -9.0 for text in tokens] for tokens in texts]
    assert warm_start.copy_accuracy(Check(step=1, logprobs=logprobs)) == pytest.approx(1 / 16)


@pytest.mark.parametrize(("gate", "steps"), [(0.0, 2 + 6), (2.0, 10 + 6)], ids=["opens at once", "never opens"])
def test_the_gate_starts_the_decay(
    tokenizer: Tokenizer,
    conversations: list[Conversation],
    small_recipe: Recipe,
    tmp_path: Path,
    gate: float,
    steps: int,
) -> None:
    recipe = replace(small_recipe, copy_gate=gate, check_every=2, max_gate_steps=10, num_decay_steps=6)
    result, reports = train(tokenizer, conversations, recipe, tmp_path)
    assert result.step == steps
    fractions = [report.fraction for report in reports]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0


def test_a_flat_loss_starts_the_decay(tokenizer: Tokenizer, small_recipe: Recipe, tmp_path: Path) -> None:
    """A model that learns nothing: its loss is flat from the first check on."""
    recipe = replace(
        small_recipe, learning_rate=1e-12, copy_gate=2.0, num_flat_checks=3, max_gate_steps=100, num_decay_steps=6
    )
    result, _ = train(tokenizer, [CONVERSATION], recipe, tmp_path)
    assert result.step == 2 + 3 * 2 + 6


def test_without_numbers_there_is_no_copying(tokenizer: Tokenizer, small_recipe: Recipe, tmp_path: Path) -> None:
    silent: Conversation = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "I cannot do that."}]
    result, _ = train(tokenizer, [silent], replace(small_recipe, copy_gate=0.0), tmp_path)
    assert (result.step, str(result)) == (4 + 2, f"step 6, loss {result.loss:.2f}")
