"""Turns logits into tokens and their log-probabilities: penalties and biases first, then a draw.

Adjustments follow SGLang's order: frequency and presence penalty over generated tokens (as OpenAI defines them),
repetition penalty over prompt and generated tokens (CTRL, Keskar et al. 2019, section 4.1), then bias:

    l_t <- l_t - frequency * count_t - presence * [count_t > 0]
    l_t <- l_t / repetition if l_t > 0 else l_t * repetition        for t in prompt or generated
    l_t <- l_t + bias_t

A token is drawn by inverse CDF: one uniform number per row selects the first token whose cumulative probability exceeds
it. The number is a hash of the request's seed and the token's position in prompt and answer, so a sample depends
neither on the rest of the batch nor on how much of an answer is given as prompt: a request that moves to another engine
goes on as it would have.

The recorded log-probability is log softmax(logits / temperature): not renormalised for top-p, top-k and min-p, and at
temperature 0 (greedy) as at 1, as in SGLang. The likeliest tokens come from the same distribution. A row whose logits
are not finite gets some token with log-probability NaN, and other rows are unaffected.

Shapes: n rows of the batch, m of them penalised, V vocabulary.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_agent.types import SamplingParams, TopLogprobs

_BLOCK_TOKENS = 64
_UNIFORM_BITS = 24  # float32 represents them exactly, so that a uniform is never rounded up to 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """The sampling parameters of n rows. None where no row needs one, so that the common case pays nothing."""

    seeds: NDArray[np.uint64]  # [n]
    temperatures: Tensor | None  # [n, 1], 1 where greedy; None where all are 1
    is_greedy: Tensor | None  # [n]
    top_k: Tensor | None  # [n, 1], V where off
    top_p: Tensor | None  # [n, 1]
    min_p: Tensor | None  # [n, 1], 0 where off
    num_top: Sequence[int]  # [n], the number of likeliest tokens to return; empty where no row asks

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        num_top: Sequence[int] = (),
        *,
        vocab_size: int,
        device: torch.device,
    ) -> "SamplingRows":
        """Gather the parameters of the rows."""
        greedy = [p.temperature == 0 for p in params]
        temperatures = [p.temperature or 1.0 for p in params]
        top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        top_p = [p.top_p for p in params]
        min_p = [p.min_p for p in params]
        is_filtered = any(k < vocab_size for k in top_k) or any(p < 1 for p in top_p)

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        return cls(
            seeds=np.array(seeds, dtype=np.uint64),
            temperatures=column(temperatures) if any(t != 1 for t in temperatures) else None,
            is_greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            top_k=column(top_k) if is_filtered else None,
            top_p=column(top_p) if is_filtered else None,
            min_p=column(min_p) if any(min_p) else None,
            num_top=num_top if any(num_top) else (),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """The draws of a batch, one entry per row."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]  # () where a row asks for none


@torch.inference_mode()
def sample(logits: Tensor, rows: SamplingRows, positions: Sequence[int]) -> Draws:
    """Draw one token per row from logits `[n, V]` float32; `positions` `[n]` are those of the new tokens."""
    scaled = logits if rows.temperatures is None else logits / rows.temperatures
    probabilities = torch.softmax(scaled, dim=-1)
    uniforms = torch.from_numpy(uniform(rows.seeds, np.array(positions, dtype=np.uint64))).to(logits.device)
    tokens = _draw(_filter_min_p(_filter(probabilities, rows), rows), uniforms)
    if rows.is_greedy is not None:
        tokens = torch.where(rows.is_greedy, logits.argmax(dim=-1), tokens)
    return Draws(
        token_ids=tokens.tolist(),
        logprobs=probabilities.gather(1, tokens[:, None])[:, 0].log().tolist(),
        top_logprobs=_likeliest(scaled, rows.num_top),
    )


def uniform(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Numbers in [0, 1), a pure function of (seed, index) `[n]`: two rounds of the splitmix64 finaliser."""
    bits = _mix(_mix(seeds) + indices)
    return (bits >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float32) / np.float32(2**_UNIFORM_BITS)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _filter(probabilities: Tensor, rows: SamplingRows) -> Tensor:
    """Zero what top-k and then top-p cut; the most probable token always stays. `[n, V]`"""
    if rows.top_k is None or rows.top_p is None:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = ordered.masked_fill(rank >= rows.top_k, 0.0)
    mass_before = ordered.cumsum(dim=-1) - ordered
    is_cut = (mass_before >= rows.top_p * ordered.sum(dim=-1, keepdim=True)) & (rows.top_p < 1) & (rank > 0)
    return torch.zeros_like(probabilities).scatter_(1, order, ordered.masked_fill(is_cut, 0.0))


def _filter_min_p(probabilities: Tensor, rows: SamplingRows) -> Tensor:
    """Zero what is less likely than min-p times the most probable token. `[n, V]`"""
    if rows.min_p is None:
        return probabilities
    best = probabilities.amax(dim=-1, keepdim=True)
    return probabilities.masked_fill(probabilities < rows.min_p * best, 0.0)


def _likeliest(scaled: Tensor, num_top: Sequence[int]) -> list[TopLogprobs]:
    """The `num_top` likeliest tokens of each row, likeliest first; logits over temperature `[n, V]`."""
    found: list[TopLogprobs] = [()] * len(scaled)
    asking = [row for row, number in enumerate(num_top) if number]
    if asking:
        values, ids = torch.log_softmax(scaled[asking], dim=-1).topk(max(num_top), dim=-1)
        for row, row_values, row_ids in zip(asking, values.tolist(), ids.tolist(), strict=True):
            found[row] = tuple(zip(row_ids, row_values, strict=True))[: num_top[row]]
    return found


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds `uniform * total`, never one of weight 0. `[n]`

    It finds the block of tokens first and the token second, since sums cost a tenth of a running sum over all. Running
    sums are float64: a GPU adds in trees, so over a token of weight 0 they may differ in the last digit, and no uniform
    number falls into a gap of that size.
    """
    blocks = _in_blocks(weights)  # [n, V / K, K]
    running = blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    targets = uniforms[:, None] * running[:, -1:]
    block = _first_beyond(running, targets)
    before = torch.where(block > 0, running.gather(1, (block - 1).clamp_(min=0)), 0.0)
    rows = torch.arange(len(weights), device=weights.device)
    token = _first_beyond(blocks[rows, block[:, 0]].cumsum(dim=-1, dtype=torch.float64), targets - before)
    return (block * _BLOCK_TOKENS + token)[:, 0].clamp_(max=weights.shape[-1] - 1)


def _in_blocks(weights: Tensor) -> Tensor:
    num_beyond = -weights.shape[-1] % _BLOCK_TOKENS
    padded = torch.nn.functional.pad(weights, (0, num_beyond)) if num_beyond else weights
    return padded.view(len(weights), -1, _BLOCK_TOKENS)


def _first_beyond(running: Tensor, targets: Tensor) -> Tensor:
    """The index at which a running sum first exceeds its target, `[n, 1]`.

    If rounding puts the target on the total, it is the last entry with any weight. With NaN it is any entry.
    """
    found = torch.searchsorted(running, targets, right=True)
    last = torch.searchsorted(running, running[:, -1:].contiguous())
    return torch.minimum(found, last).clamp_(max=running.shape[-1] - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The tokens of one row. They are read when adjustments are made, and not kept."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]


class Adjustments:
    """The adjustments of one batch. They count what it samples, so make new ones when its rows change."""

    def __init__(self, penalties: "_Penalties | None", bias: "_Bias | None") -> None:
        self._penalties = penalties
        self._bias = bias

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], histories: Sequence[History], *, vocab_size: int, device: torch.device
    ) -> "Adjustments | None":
        """Gather what the rows ask for; None when no row asks, so that the common case pays nothing."""
        penalties = _Penalties.of(params, histories, vocab_size=vocab_size, device=device)
        bias = _Bias.of(params, device=device)
        return None if penalties is None and bias is None else cls(penalties, bias)

    def apply(self, logits: Tensor) -> Tensor:
        """The adjusted logits `[n, V]`, as a new tensor."""
        adjusted = logits.clone()
        if self._penalties is not None:
            self._penalties.apply(adjusted)
        if self._bias is not None:
            self._bias.apply(adjusted)
        return adjusted

    def follow(self, tokens: Sequence[int]) -> None:
        """Count the token that each row has sampled, `[n]`."""
        if self._penalties is not None:
            self._penalties.follow(tokens)


def _is_penalised(params: SamplingParams) -> bool:
    has_additive = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    return has_additive or params.repetition_penalty != 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Penalties:
    rows: Tensor  # [m], indices of rows in the batch
    frequency: Tensor  # [m, 1]
    presence: Tensor  # [m, 1]
    repetition: Tensor  # [m, 1]
    counts: Tensor  # [m, V], how often each token was generated
    is_seen: Tensor  # [m, V], in the prompt or generated

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], histories: Sequence[History], *, vocab_size: int, device: torch.device
    ) -> Self | None:
        rows = [row for row, p in enumerate(params) if _is_penalised(p)]
        if not rows:
            return None

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, device=device, dtype=torch.float32)[:, None]

        counts = _counts([histories[row].token_ids for row in rows], vocab_size).to(device)
        prompts = _counts([histories[row].prompt_ids for row in rows], vocab_size).to(device)
        return cls(
            rows=torch.tensor(rows, device=device),
            frequency=column([params[row].frequency_penalty for row in rows]),
            presence=column([params[row].presence_penalty for row in rows]),
            repetition=column([params[row].repetition_penalty for row in rows]),
            counts=counts,
            is_seen=(counts + prompts) > 0,
        )

    def apply(self, logits: Tensor) -> None:
        penalised = logits[self.rows] - self.frequency * self.counts - self.presence * (self.counts > 0)
        repeated = torch.where(penalised > 0, penalised / self.repetition, penalised * self.repetition)
        logits[self.rows] = torch.where(self.is_seen, repeated, penalised)

    def follow(self, tokens: Sequence[int]) -> None:
        sampled = torch.tensor(tokens, device=self.rows.device)[self.rows]
        each = torch.arange(len(sampled), device=self.rows.device)
        self.counts[each, sampled] += 1
        self.is_seen[each, sampled] = True


def _counts(sequences: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """The counts of each token in each sequence, `[m, V]`. Uses arrays, since torch reads a list eight times slower."""
    rows = [np.bincount(np.array(array("I", ids)), minlength=vocab_size) for ids in sequences]
    return torch.from_numpy(np.stack(rows).astype(np.float32))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bias:
    """One entry for each biased token of each row."""

    rows: Tensor
    tokens: Tensor
    values: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], *, device: torch.device) -> Self | None:
        entries = [(row, token, value) for row, p in enumerate(params) for token, value in p.logit_bias]
        if not entries:
            return None
        return cls(
            rows=torch.tensor([row for row, _, _ in entries], device=device),
            tokens=torch.tensor([token for _, token, _ in entries], device=device),
            values=torch.tensor([value for _, _, value in entries], device=device, dtype=torch.float32),
        )

    def apply(self, logits: Tensor) -> None:
        logits.index_put_((self.rows, self.tokens), self.values, accumulate=True)
