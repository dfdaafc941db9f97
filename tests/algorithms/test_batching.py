"""Samples, micro-batches, and log-probabilities of their tokens.

- A sample has the inputs before its last loss token and predicts each loss token one position earlier.
- A record that cannot be trained is refused: first token in the loss, no finite log-probability, no temperature.
- An emptied sample has one input, no loss token, and the same fields filled in.
- Packed sequences stand behind one another and positions begin anew; padded ones have a row each, filled on the right.
- Either way the loss tokens are the same in the same order.
- Log-probability and entropy are those of a plain log-softmax over the temperature, in chunks or not, and so are their
  gradients; those of logits in bfloat16 are right to its rounding.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_agent.algorithms.batching import Sample, collate, logprobs_and_entropy, sample_of

TWO_TURNS = [[(False, [10, 11]), (True, [12, 13])], [(False, [14]), (True, [15]), (False, [16, 17])]]


def test_a_sample_by_hand(make_record):
    record = make_record("s", "g", TWO_TURNS, [0.0, 1.0], temperature=0.7, logprob=-0.5, version=4)
    sample = sample_of(record)
    assert sample.inputs.tolist() == [10, 11, 12, 13, 14]
    assert sample.predicting.tolist() == [1, 2, 4]
    assert sample.targets.tolist() == [12, 13, 15]
    assert sample.temperatures.tolist() == pytest.approx([0.7] * 3)
    assert sample.behavior.tolist() == [-0.5] * 3
    assert sample.versions.tolist() == [4] * 3
    without_loss = sample_of(make_record("s", "g", [[(False, [1, 2, 3])]], [1.0]))
    assert (without_loss.num_tokens, without_loss.num_loss_tokens) == (0, 0)


def test_a_first_token_in_the_loss_is_refused(make_record):
    with pytest.raises(ValueError, match="branch 0 of session 's': its first token is in the loss"):
        sample_of(make_record("s", "g", [[(True, [1, 2])]], [1.0]))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("behavior_logprobs", np.nan, "no finite behaviour log-probability"),
        ("behavior_logprobs", -np.inf, "no finite behaviour log-probability"),
        ("temperatures", 0.0, "temperature 0.0"),
    ],
)
def test_an_unusable_loss_token_is_refused(make_record, field, value, message):
    record = make_record("s", "g", [[(False, [1]), (True, [2])]], [1.0])
    broken = replace(record, **{field: np.array([1.0, value], dtype=np.float32)})
    with pytest.raises(ValueError, match=message):
        sample_of(broken)


def test_an_emptied_sample_has_no_loss_token_and_the_same_fields(make_record):
    sample = replace(sample_of(make_record("s", "g", TWO_TURNS, [0.0, 1.0])), advantages=torch.ones(3), weight=0.5)
    emptied = sample.emptied()
    assert (emptied.num_tokens, emptied.num_loss_tokens, emptied.behavior.tolist()) == (1, 0, [])
    assert emptied.advantages is not None and emptied.advantages.tolist() == []
    assert (emptied.proximal, emptied.values) == (None, None)
    batch = collate([emptied], CPU)
    assert (batch.inputs.numel(), batch.num_input_tokens, batch.num_loss_tokens) == (1, 0, 0), "it counts as padding"


CPU = torch.device("cpu")


@pytest.fixture
def samples(make_record) -> list[Sample]:
    long = make_record("s0", "g", TWO_TURNS, [0.0, 1.0])
    short = make_record("s1", "g", [[(False, [20, 21]), (True, [22])]], [1.0])
    return [sample_of(long), sample_of(short)]


def test_packed_positions_begin_anew_with_each_sequence(samples):
    batch = collate(samples, CPU)
    assert batch.inputs.tolist() == [[10, 11, 12, 13, 14, 20, 21]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert batch.segments == (5, 2)


def test_padded_rows_are_filled_up_on_the_right(samples):
    batch = collate(samples, CPU, is_padded=True)
    assert batch.inputs.tolist() == [[10, 11, 12, 13, 14], [20, 21, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]
    assert batch.segments is None


@pytest.mark.parametrize("is_padded", [False, True])
def test_loss_tokens_are_the_same_either_way(samples, is_padded):
    batch = collate(samples, CPU, is_padded=is_padded)
    assert batch.inputs.flatten()[batch.predicting].tolist() == [11, 12, 14, 21]
    assert batch.targets.tolist() == [12, 13, 15, 22]
    assert batch.sequences.tolist() == [0, 0, 0, 1]
    assert batch.num_input_tokens == 7


NUM_TOKENS, HIDDEN, VOCAB = 13, 8, 31


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.nn.Linear]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator, dtype=torch.float32).requires_grad_()
    targets = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=generator)
    temperatures = torch.rand(NUM_TOKENS, generator=generator) + 0.5
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(VOCAB, HIDDEN, generator=generator))
    return hidden, targets, temperatures, head


def test_values_are_those_of_a_plain_log_softmax():
    hidden, targets, temperatures, head = problem()
    logits = head(hidden) / temperatures[:, None]
    expected = torch.distributions.Categorical(logits=logits)
    logprobs, entropy = logprobs_and_entropy(hidden, targets, temperatures, head, vocab_size=VOCAB)
    torch.testing.assert_close(logprobs, expected.log_prob(targets), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected.entropy(), atol=1e-5, rtol=0)
    with torch.no_grad():
        chunked, _ = logprobs_and_entropy(hidden, targets, temperatures, head, vocab_size=VOCAB, chunk_size=5)
    torch.testing.assert_close(chunked, logprobs.detach())


@pytest.mark.parametrize("chunk_size", [None, 5])
@pytest.mark.parametrize("kept", [(0, 1), (0,), (1,)], ids=["both", "log-probability", "entropy"])
def test_gradients_are_those_of_finite_differences(chunk_size, kept):
    hidden, targets, temperatures, head = problem()
    head.double()

    def measure(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = {"vocab_size": VOCAB, "chunk_size": chunk_size}
        found = logprobs_and_entropy(hidden, targets, temperatures, lambda states: states @ weight.T, **given)
        return tuple(found[one] for one in kept)

    assert torch.autograd.gradcheck(measure, (hidden.detach().double().requires_grad_(), head.weight))


def test_gradients_of_half_precise_logits_are_rounded_once():
    wide = 2**17  # so that there are blocks of two rows
    targets, temperatures = torch.tensor([3, wide - 1, 0]), torch.tensor([1.0, 0.5, 2.0])
    logits = torch.randn(3, wide, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact, half = (logits.to(dtype).requires_grad_() for dtype in (torch.float64, torch.bfloat16))
    for given in (exact, half):
        logprobs, entropy = logprobs_and_entropy(given, targets, temperatures, lambda one: one, vocab_size=wide)
        assert logprobs.dtype == torch.promote_types(given.dtype, torch.float32)
        (logprobs.sum() + 0.3 * entropy.sum()).backward()
    torch.testing.assert_close(half.grad.double(), exact.grad, atol=1e-9, rtol=2**-8)
