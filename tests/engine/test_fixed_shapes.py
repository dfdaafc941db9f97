"""Decode steps in fixed shapes, which a GPU replays as graphs; here they are computed.

- logits are those of steps in the rows' own shapes, for any number of rows of any lengths up to the longest context;
  slots beyond the rows keep what they hold, as that of a row whose prefill is under way
- rows of very different lengths are read in buckets instead; a step that nobody needs is given up

That whole answers are the same is tested by the files that say `fixed_shapes = both_ways`.
"""

import numpy as np
import pytest
import torch

from areal_agent.engine.embedded.decoder import Piece, StepGivenUp
from areal_agent.engine.embedded.fixed_shapes import FixedShapes
from areal_agent.engine.embedded.model import ModelRunner

LONGEST = 300
LENGTHS = {
    "one row": [5],
    "a number between two sizes": [3, 17, 2],
    "all slots": [9] * 6,
    "widths up to the longest context": [LONGEST, 129, 1, 250],
}


@pytest.fixture(scope="module")
def runners(make_model):
    folder = make_model(seed=3, max_position_embeddings=512)
    return [
        ModelRunner(str(folder), device="cpu", num_slots=6, max_context_tokens=LONGEST, fixed_shapes=is_fixed)
        for is_fixed in (True, False)
    ]


def prefill(runner: ModelRunner, lengths: list[int]) -> None:
    for slot, length in enumerate(lengths):
        if length:
            runner.prefill([Piece(slot=slot, begin=0, ids=np.arange(length, dtype=np.int32) % 97)])


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_logits_are_those_of_the_rows_alone(runners, lengths):
    found: list[torch.Tensor] = []
    for runner in runners:
        runner.kv.cache.wipe()
        prefill(runner, [*(length - 1 for length in lengths), *[40] * (6 - len(lengths))])
        beyond = [runner.kv.cache.copy_out(slot, 0, LONGEST) for slot in range(len(lengths), 6)]
        found.append(runner.decode([7] * len(lengths), lengths).clone())
        for slot, held in enumerate(beyond, start=len(lengths)):
            assert torch.equal(runner.kv.cache.copy_out(slot, 0, LONGEST), held)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_rows_of_very_different_lengths_are_read_in_buckets(runners):
    cache, decoder = runners[0].kv.cache, runners[0].fixed._decoder
    fixed = FixedShapes(decoder, cache, max_context_tokens=LONGEST, vocab_size=97, excess_bytes=100 * cache.token_bytes)
    assert runners[0].fixed.takes([LONGEST, 1, 1])
    assert not fixed.takes([LONGEST, 1, 1])
    assert fixed.takes([LONGEST] * 4)


def test_a_step_that_nobody_needs_is_given_up(runners):
    runner = runners[0]
    runner.unneeded.set()
    with pytest.raises(StepGivenUp):
        runner.decode([7], [3])
    runner.unneeded.clear()
