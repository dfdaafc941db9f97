"""Log-probability and entropy of chosen tokens.

- They are those of a plain log-softmax of all logits over the temperature.
- Chunks change neither values nor gradients.
- A uniform distribution over V tokens has log-probability -log V and entropy log V.
"""

import math

import pytest
import torch

from areal_agent.algorithms.batching import logprobs_and_entropy

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


def gradients(chunk_size: int | None) -> tuple[torch.Tensor, ...]:
    """Values, and the gradients of a mixed function of them with regard to hidden states and head."""
    hidden, targets, temperatures, head = problem()
    logprobs, entropy = logprobs_and_entropy(
        hidden, targets, temperatures, head, vocab_size=VOCAB, chunk_size=chunk_size
    )
    weights = torch.arange(NUM_TOKENS) - 3.0
    ((logprobs * weights).sum() + 0.1 * (entropy * weights.flip(0)).sum()).backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, head.weight.grad


def test_values_are_those_of_a_plain_log_softmax():
    hidden, targets, temperatures, head = problem()
    logits = head(hidden) / temperatures[:, None]
    expected = torch.distributions.Categorical(logits=logits)
    logprobs, entropy = logprobs_and_entropy(hidden, targets, temperatures, head, vocab_size=VOCAB)
    torch.testing.assert_close(logprobs, expected.log_prob(targets), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected.entropy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk_size", [1, 4, 12])
def test_chunks_change_neither_values_nor_gradients(chunk_size):
    for chunked, full in zip(gradients(chunk_size), gradients(None), strict=True):
        torch.testing.assert_close(chunked, full, atol=1e-5, rtol=1e-5)


def test_chunks_work_without_gradient():
    hidden, targets, temperatures, head = problem()
    with torch.no_grad():
        chunked, _ = logprobs_and_entropy(hidden, targets, temperatures, head, vocab_size=VOCAB, chunk_size=5)
        full, _ = logprobs_and_entropy(hidden, targets, temperatures, head, vocab_size=VOCAB)
    torch.testing.assert_close(chunked, full)


def test_a_uniform_distribution():
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    torch.nn.init.zeros_(head.weight)
    logprobs, entropy = logprobs_and_entropy(
        torch.ones(1, HIDDEN), torch.tensor([5]), torch.ones(1), head, vocab_size=VOCAB
    )
    assert logprobs.item() == pytest.approx(-math.log(VOCAB))
    assert entropy.item() == pytest.approx(math.log(VOCAB))
