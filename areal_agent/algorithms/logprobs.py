"""Log-probability and entropy of chosen tokens from hidden states, without ever holding all logits. Pure functions."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_PER_CHUNK = 2**24
"""Logits that exist at once: 64 MiB in float32, however long the batch and however large the vocabulary."""

Head = Callable[[Tensor], Tensor]
"""The output layer of a model: hidden states [M, H] -> logits [M, V]."""


def logprobs_and_entropy(
    hidden: Tensor, targets: Tensor, temperatures: Tensor, head: Head, *, vocab_size: int, chunk_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, both in nats and differentiable.

    logp_i = log softmax(head(h_i) / temperature_i)[target_i];  H_i = -sum_v p_iv log p_iv.
    `hidden` holds the states at the *predicting* positions (one before each target): nothing is computed for tokens
    that are not in the loss. More than one chunk of `chunk_size` positions recomputes its logits in the backward pass,
    which changes memory, not values. Always computed in float32.
    Shapes: hidden [M, H], targets [M], temperatures [M] -> [M], [M].
    """
    num_tokens = len(targets)
    assert hidden.ndim == 2 and len(hidden) == num_tokens, (hidden.shape, targets.shape)
    assert targets.shape == temperatures.shape == (num_tokens,), (targets.shape, temperatures.shape)
    size = chunk_size or max(1, LOGITS_PER_CHUNK // vocab_size)
    measure = _one_chunk if num_tokens <= size else _recomputed
    chunks = [
        measure(hidden[i : i + size], targets[i : i + size], temperatures[i : i + size], head)
        for i in range(0, max(num_tokens, 1), size)
    ]
    return torch.cat([logprobs for logprobs, _ in chunks]), torch.cat([entropy for _, entropy in chunks])


def _recomputed(hidden: Tensor, targets: Tensor, temperatures: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    if not torch.is_grad_enabled():
        return _one_chunk(hidden, targets, temperatures, head)
    logprobs, entropy = checkpoint(_one_chunk, hidden, targets, temperatures, head, use_reentrant=False)  # pyright: ignore[reportGeneralTypeIssues]
    return logprobs, entropy


def _one_chunk(hidden: Tensor, targets: Tensor, temperatures: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float() / temperatures[:, None]  # [M, V]
    log_p = torch.log_softmax(logits, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy
