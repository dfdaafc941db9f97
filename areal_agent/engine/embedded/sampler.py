"""Turns logits into tokens and their log-probabilities: penalties, biases and grammars first, then a draw.

Adjustments follow SGLang's order: frequency and presence penalty over generated tokens (as OpenAI defines them),
repetition penalty over prompt and generated tokens (CTRL, Keskar et al. 2019, section 4.1), then bias:

    l_t <- l_t - frequency * count_t - presence * [count_t > 0]
    l_t <- l_t / repetition if l_t > 0 else l_t * repetition        for t in prompt or generated
    l_t <- l_t + bias_t
    l_t <- -infinity                                                for end tokens t, before `min_tokens`

A token is drawn by inverse CDF: one uniform number per row selects the first token whose cumulative probability exceeds
it. The number is a hash of the request's seed and the token's position in prompt and answer, so a sample depends
neither on the rest of the batch nor on how much of an answer is given as prompt: a request that moves to another engine
goes on as it would have.

The recorded log-probability is log softmax(logits / temperature): not renormalised for top-p, top-k and min-p, and at
temperature 0 (greedy) as at 1, as in SGLang. The likeliest tokens come from the same distribution. A row whose logits
are not finite gets some token with log-probability NaN, and other rows are unaffected.

llguidance (the extra `grammar`) says which tokens may come next in a grammar; a matcher follows one answer token by
token. Without it, or when it cannot read the model's fast tokenizer, requests with a grammar are refused.

Shapes: n rows of the batch, m of them penalised, V vocabulary.
"""

import importlib
import importlib.util
import logging
from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from areal_agent.errors import EngineRejected
from areal_agent.types import GenerateRequest, SamplingParams, TopLogprobs

logger = logging.getLogger(__name__)

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
        column = partial(_column, device=device)
        return cls(
            seeds=np.array(seeds, dtype=np.uint64),
            temperatures=column(temperatures) if any(t != 1 for t in temperatures) else None,
            is_greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            top_k=column(top_k) if is_filtered else None,
            top_p=column(top_p) if is_filtered else None,
            min_p=column(min_p) if any(min_p) else None,
            num_top=num_top if any(num_top) else (),
        )


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)[:, None]


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
    drawn = torch.from_numpy(uniform(rows.seeds, np.array(positions, dtype=np.uint64)))
    uniforms = drawn.to(logits.device, non_blocking=True)  # a wait here would be one for the logits
    tokens = _draw(_filter(probabilities, rows), uniforms)
    if rows.is_greedy is not None:
        tokens = torch.where(rows.is_greedy, logits.argmax(dim=-1), tokens)
    logprobs = probabilities.gather(1, tokens[:, None])[:, 0].log()
    numbers: list[list[float]] = torch.stack([tokens, logprobs]).tolist()  # one wait for a GPU; float32 holds all ids
    return Draws(
        token_ids=[int(token) for token in numbers[0]],
        logprobs=numbers[1],
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
    """Zero what top-k, then top-p and then min-p cut; the most probable token always stays. `[n, V]`"""
    kept = probabilities
    if rows.top_k is not None and rows.top_p is not None:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        ordered = ordered.masked_fill(rank >= rows.top_k, 0.0)
        mass_before = ordered.cumsum(dim=-1) - ordered
        is_cut = (mass_before >= rows.top_p * ordered.sum(dim=-1, keepdim=True)) & (rows.top_p < 1) & (rank > 0)
        kept = torch.zeros_like(probabilities).scatter_(1, order, ordered.masked_fill(is_cut, 0.0))
    if rows.min_p is not None:
        kept = kept.masked_fill(kept < rows.min_p * kept.amax(dim=-1, keepdim=True), 0.0)
    return kept


def _likeliest(scaled: Tensor, num_top: Sequence[int]) -> list[TopLogprobs]:
    """The `num_top` likeliest tokens of each row, likeliest first; logits over temperature `[n, V]`."""
    found: list[TopLogprobs] = [()] * len(scaled)
    asking = [row for row, number in enumerate(num_top) if number]
    if asking:
        rows = scaled[torch.tensor(asking, device=scaled.device)]
        values, ids = torch.log_softmax(rows, dim=-1).topk(max(num_top), dim=-1)
        for row, row_values, row_ids in zip(asking, values.tolist(), ids.tolist(), strict=True):
            found[row] = tuple(zip(row_ids, row_values, strict=True))[: num_top[row]]
    return found


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds `uniform * total`, never one of weight 0. `[n]`

    It finds the block of tokens first and the token second, since sums cost a tenth of a running sum over all. Running
    sums are float64: a GPU adds in trees, so over a token of weight 0 they may differ in the last digit, and no uniform
    number falls into a gap of that size. With NaN it is any token.
    """
    num_beyond = -weights.shape[-1] % _BLOCK_TOKENS
    padded = pad(weights, (0, num_beyond)) if num_beyond else weights
    blocks = padded.view(len(weights), -1, _BLOCK_TOKENS)  # [n, V / K, K]
    before = pad(blocks.sum(dim=-1), (1, 0)).cumsum(dim=-1, dtype=torch.float64)  # each block, [n, V / K + 1]
    targets = uniforms[:, None] * before[:, -1:]  # below it, as no uniform is 1
    block = torch.searchsorted(before, targets, right=True).clamp_(1, blocks.shape[1]).sub_(1)  # [n, 1]
    inside = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK_TOKENS))[:, 0]  # [n, K]
    running = inside.cumsum(dim=-1, dtype=torch.float64)
    token = torch.searchsorted(running, targets - before.gather(1, block), right=True)
    # the sum of a block is rounded otherwise, so a target may be beyond its last token of any weight
    last = torch.searchsorted(running, running[:, -1:].contiguous())
    token = torch.minimum(token, last).add_(block, alpha=_BLOCK_TOKENS)
    return token[:, 0].clamp_(max=weights.shape[-1] - 1)


# --------------------------------------------------------------------------------------------- adjustments


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalties:
    """The penalties of a batch. They count what it samples, so make new ones when its rows change."""

    rows: Tensor  # [m], indices of rows in the batch
    frequency: Tensor  # [m, 1]
    presence: Tensor  # [m, 1]
    repetition: Tensor  # [m, 1]
    counts: Tensor  # [m, V], how often each token was generated
    is_seen: Tensor  # [m, V], in the prompt or generated

    @classmethod
    def of(
        cls,
        requests: Sequence[GenerateRequest],
        generated: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        device: torch.device,
    ) -> Self | None:
        """Gather what n requests ask for, whose answers so far are `generated`; None when none asks for any."""
        params = [request.sampling for request in requests]
        rows = [
            row
            for row, p in enumerate(params)
            if (p.frequency_penalty, p.presence_penalty, p.repetition_penalty) != (0.0, 0.0, 1.0)
        ]
        if not rows:
            return None
        column = partial(_column, device=device)
        counts = _counts([generated[row] for row in rows], vocab_size).to(device)
        prompts = _counts([requests[row].input_ids for row in rows], vocab_size).to(device)
        return cls(
            rows=torch.tensor(rows, device=device),
            frequency=column([params[row].frequency_penalty for row in rows]),
            presence=column([params[row].presence_penalty for row in rows]),
            repetition=column([params[row].repetition_penalty for row in rows]),
            counts=counts,
            is_seen=(counts + prompts) > 0,
        )

    def apply(self, logits: Tensor) -> None:
        """Change the logits `[n, V]`."""
        penalised = logits[self.rows] - self.frequency * self.counts - self.presence * (self.counts > 0)
        repeated = torch.where(penalised > 0, penalised / self.repetition, penalised * self.repetition)
        logits[self.rows] = torch.where(self.is_seen, repeated, penalised)

    def follow(self, tokens: Sequence[int]) -> None:
        """Count the token that each row has sampled, `[n]`."""
        sampled = torch.tensor(tokens, device=self.rows.device)[self.rows]
        each = torch.arange(len(sampled), device=self.rows.device)
        self.counts[each, sampled] += 1
        self.is_seen[each, sampled] = True


def _counts(sequences: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """The counts of each token in each sequence, `[m, V]`. Uses arrays, since torch reads a list eight times slower."""
    rows = [np.bincount(np.array(array("I", ids)), minlength=vocab_size) for ids in sequences]
    return torch.from_numpy(np.stack(rows).astype(np.float32))


def biases_of(requests: Sequence[GenerateRequest], device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
    """Rows, tokens and values of all biases that the requests ask for; None when none asks for any."""
    entries = [(row, *bias) for row, request in enumerate(requests) for bias in request.sampling.logit_bias]
    if not entries:
        return None
    rows, tokens, values = (torch.tensor(column, device=device) for column in zip(*entries, strict=True))
    return rows, tokens, values.float()


def end_tokens(request: GenerateRequest, eos_token_ids: Set[int], device: torch.device) -> Tensor:
    """The end tokens of a request and of the model."""
    return torch.tensor([*request.sampling.stop_token_ids, *eos_token_ids], dtype=torch.long, device=device)


# ------------------------------------------------------------------------------------------------ grammars


class Matcher:
    """The state of one answer in its grammar."""

    def __init__(self, matcher: Any, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)

    def allowed(self) -> NDArray[np.bool_]:
        """The tokens that may come next, `[V]`. Never none: where nothing can follow, the answer ends."""
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        if not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            told = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
            allowed[: len(told)] = told
        if not allowed.any():
            allowed[self._eos_token_ids] = True
        return allowed

    def follow(self, token_id: int) -> None:
        """Advance by a sampled token."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)

    def failure(self) -> EngineRejected | None:
        """The reason why the grammar cannot be followed any further (it has become too much work), or None."""
        return _refused("the grammar", self._matcher.get_error()) if self._matcher.is_error() else None


class Grammars:
    """Makes matchers for the tokenizer of one model."""

    def __init__(self, guidance: Any, tokenizer: Any, *, vocab_size: int) -> None:
        self._guidance = guidance
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    @classmethod
    def of(cls, folder: Path, *, vocab_size: int, eos_token_ids: Set[int]) -> Self | None:
        """The grammars of a model folder; None, with the reason in the log, where there can be none."""
        tokenizer = folder / "tokenizer.json"
        if importlib.util.find_spec("llguidance") is None:
            logger.info("no grammars: install the extra, areal-agent[grammar]")
        elif not tokenizer.exists() or not eos_token_ids:
            logger.info("no grammars: %s has no tokenizer.json, or the model no end token", folder)
        else:
            guidance = importlib.import_module("llguidance")
            try:
                built = guidance.LLTokenizer(str(tokenizer), n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
            except Exception as error:  # a boundary: its errors share no type
                logger.warning("no grammars: llguidance does not read %s: %s", tokenizer, error)
                return None
            return cls(guidance, built, vocab_size=vocab_size)
        return None

    def matcher(self, kind: str, text: str) -> Matcher:
        """A matcher for answers that follow a `json_schema`, `regex` or `ebnf`. Raises EngineRejected for a bad one."""
        try:
            matcher = self._guidance.LLMatcher(self._tokenizer, self._guidance.grammar_from(kind, text), log_level=0)
        except ValueError as error:
            raise _refused(kind, str(error)) from None
        if matcher.is_error():
            raise _refused(kind, matcher.get_error())
        return Matcher(matcher, vocab_size=self._vocab_size, eos_token_ids=self._tokenizer.eos_tokens)


def _refused(kind: str, reason: str) -> EngineRejected:
    cause = reason.partition("\n")[0]  # the rest is the state of a parser
    return EngineRejected(f"{kind} cannot be followed: {cause[:300]}; correct or simplify it")
