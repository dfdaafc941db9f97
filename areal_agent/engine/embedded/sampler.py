"""From logits to tokens and their log-probabilities. Pure functions; knows nothing of requests or models.

A token is drawn by inverse CDF: one uniform number a row, and the first token whose cumulative probability exceeds it.
The number is a hash of (seed of the request, position of the token in prompt and answer), so a sample depends neither
on what else is in the batch nor on how much of an answer is given as prompt: one that moves to another engine goes on
as it would have.

Recorded is log softmax(logits / temperature) of the token: not renormalised for top-p, top-k and min-p, and at
temperature 0 (greedy) as at 1, as SGLang does. The likeliest tokens are told by the same distribution. Logits that are
not finite give some token with the log-probability NaN, and leave the other rows alone.

Shapes: n rows, V vocabulary.

What requests add to their logits before anything is sampled: penalties for repetition, and a bias.

In this order, as SGLang: frequency and presence penalty, over the tokens generated so far (as OpenAI defines them);
repetition penalty, over prompt and generated tokens (CTRL, Keskar et al. 2019, section 4.1); bias:

    l_t <- l_t - frequency * count_t - presence * [count_t > 0]
    l_t <- l_t / repetition if l_t > 0 else l_t * repetition        for t in prompt or generated
    l_t <- l_t + bias_t

Only rows that ask for it are touched. Shapes: n rows of the batch, m of them penalised, V vocabulary.
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
_UNIFORM_BITS = 24  # what float32 represents exactly: a uniform is never rounded up to 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """How each of n rows samples. None where no row asks for it, so the common case pays nothing."""

    seeds: NDArray[np.uint64]  # [n]
    temperatures: Tensor | None  # [n, 1], 1 where greedy; None where all are 1
    is_greedy: Tensor | None  # [n]
    top_k: Tensor | None  # [n, 1], V where off
    top_p: Tensor | None  # [n, 1]
    min_p: Tensor | None  # [n, 1], 0 where off
    num_top: Sequence[int]  # [n], how many of the likeliest tokens to tell; empty where no row asks

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
    """What a batch has drawn, one entry a row."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]  # an empty tuple where a row asks for none


@torch.inference_mode()
def sample(logits: Tensor, rows: SamplingRows, positions: Sequence[int]) -> Draws:
    """One token a row; logits `[n, V]` float32, `positions` `[n]` are those of the new tokens."""
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
    """The first token whose cumulative weight exceeds `uniform * total`: never one of weight 0. `[n]`

    First the block of tokens that it falls into, then the token: sums cost a tenth of a running sum over all. Running
    sums are float64: a GPU adds in trees, by which they differ over a token of weight 0 in their last digit, and no
    uniform number falls into a gap of that size.
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
    """Where a running sum exceeds its target first, `[n, 1]`; rounding aside, which may put the target on the total
    itself: the last entry with any weight is meant then. NaN exceeds nothing and nothing exceeds it: any entry."""
    found = torch.searchsorted(running, targets, right=True)
    last = torch.searchsorted(running, running[:, -1:].contiguous())
    return torch.minimum(found, last).clamp_(max=running.shape[-1] - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What one row has so far. The sequences are read when adjustments are made, and not kept."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]


class Adjustments:
    """The adjustments of one batch. They follow what is sampled, so they belong to the batch until its rows change."""

    def __init__(self, penalties: "_Penalties | None", bias: "_Bias | None") -> None:
        self._penalties = penalties
        self._bias = bias

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], histories: Sequence[History], *, vocab_size: int, device: torch.device
    ) -> "Adjustments | None":
        """Gather what the rows ask for; None when none does, so that the common case pays nothing."""
        penalties = _Penalties.of(params, histories, vocab_size=vocab_size, device=device)
        bias = _Bias.of(params, device=device)
        return None if penalties is None and bias is None else cls(penalties, bias)

    def apply(self, logits: Tensor) -> Tensor:
        """The adjusted logits `[n, V]`; those given stay as they are."""
        adjusted = logits.clone()
        if self._penalties is not None:
            self._penalties.apply(adjusted)
        if self._bias is not None:
            self._bias.apply(adjusted)
        return adjusted

    def follow(self, tokens: Sequence[int]) -> None:
        """Take note of the token that each row has sampled, `[n]`."""
        if self._penalties is not None:
            self._penalties.follow(tokens)


def _is_penalised(params: SamplingParams) -> bool:
    has_additive = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    return has_additive or params.repetition_penalty != 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Penalties:
    rows: Tensor  # [m], which rows of the batch
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
    """How often each token is in each sequence, `[m, V]`. By way of arrays: torch reads a list eight times slower."""
    rows = [np.bincount(np.array(array("I", ids)), minlength=vocab_size) for ids in sequences]
    return torch.from_numpy(np.stack(rows).astype(np.float32))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bias:
    """One entry for each token of each row that is biased."""

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
