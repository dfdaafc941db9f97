"""Supervised training of a small model on demonstrations, until it copies numbers.

Reinforcement learning cannot teach copying later: it strengthens habits, and a model that garbles every long number has
no right answer to strengthen. So the learning rate stays up until digits are copied well, and only then decays. All but
the wall clock is a function of the seed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from areal_agent.models.recipe import Recipe
from areal_agent.models.tokenizer import ASSISTANT, END, PAD, START, Conversation, render, token_id


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStartProgress:
    """The progress of the warm start. `fraction` is an estimate until the decay starts."""

    fraction: float
    step: int
    loss: float
    copy_accuracy: float
    wall_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStartResult:
    """The result of the warm start."""

    steps: int
    num_tokens: int
    loss: float
    copy_accuracy: float
    wall_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """Conversations, padded on the right: with a causal mask no real token sees the padding."""

    inputs: Tensor  # [B, T] token ids
    targets: Tensor  # [B, T] the next token where the model speaks, else -100
    is_digit: Tensor  # [B, T] where the target is a digit
    num_tokens: int


class ConversationEncoder:
    """Turns conversations into batches with the loss on what the assistant says."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._pad, self._start, self._end, self._assistant = (
            token_id(tokenizer, token) for token in (PAD, START, END, ASSISTANT)
        )
        self._digits = torch.tensor([token_id(tokenizer, digit) for digit in "0123456789"])

    def batch(self, conversations: Sequence[Conversation]) -> _Batch:
        texts = [render(conversation) for conversation in conversations]
        encodings = self._tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        rows = [encoding.ids for encoding in encodings]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [self._pad] * (longest - len(row)) for row in rows])
        spoken = torch.tensor([self.spoken(row) + [False] * (longest - len(row)) for row in rows])
        targets = ids[:, 1:].masked_fill(~spoken[:, 1:], -100)
        return _Batch(
            inputs=ids[:, :-1],
            targets=targets,
            is_digit=torch.isin(targets, self._digits),
            num_tokens=sum(map(len, rows)),
        )

    def spoken(self, ids: Sequence[int]) -> list[bool]:
        """Mark the tokens that the model says: from after the opening of an assistant message to its end token."""
        marks: list[bool] = []
        speaks = False
        for index, token in enumerate(ids):
            marks.append(speaks)
            if token == self._end:
                speaks = False
            elif index and token == self._assistant and ids[index - 1] == self._start:
                speaks = True
        return marks


class WarmStart:
    """One warm start of one model."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        demonstrations: Iterator[Conversation],
        recipe: Recipe,
        on_progress: Callable[[WarmStartProgress], None] | None = None,
    ) -> None:
        self._model = model
        self._encoder = ConversationEncoder(tokenizer)
        self._demonstrations = demonstrations
        self._recipe = recipe
        self._on_progress = on_progress
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
        )
        self._check = self._draw(recipe.num_check_conversations)
        self._decay_starts = recipe.max_gate_steps  # earlier when the gate opens
        self._num_tokens = 0
        self._started_s = time.monotonic()

    def run(self) -> WarmStartResult:
        """Train at full learning rate until the gate opens, then through the decay."""
        recipe = self._recipe
        step, loss, copying = 0, float("nan"), 0.0
        while step < self._decay_starts + recipe.num_decay_steps:
            loss = self._train(self._rate(step))
            step += 1
            if step % recipe.check_every == 0:
                copying = self.copy_accuracy()
                self._watch_gate(step, copying)
                self._report(step, loss, copying)
        return WarmStartResult(
            steps=step,
            num_tokens=self._num_tokens,
            loss=loss,
            copy_accuracy=self.copy_accuracy(),
            wall_s=time.monotonic() - self._started_s,
        )

    @torch.no_grad()
    def copy_accuracy(self) -> float:
        """Return the probability that all digits of a conversation are copied, averaged over conversations."""
        logprobs = -self._losses(self._check)  # [B, T]
        by_conversation = torch.where(self._check.is_digit, logprobs, 0.0).sum(dim=1).exp()
        return by_conversation[self._check.is_digit.any(dim=1)].mean().item()

    def _train(self, rate: float) -> float:
        batch = self._draw(self._recipe.batch_size)
        loss = self._losses(batch).sum() / (batch.targets != -100).sum()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._recipe.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._num_tokens += batch.num_tokens
        return loss.item()

    def _losses(self, batch: _Batch) -> Tensor:
        """Return the negative log-likelihood of each spoken token, 0 elsewhere, [B, T]."""
        logits = self._model(input_ids=batch.inputs, use_cache=False).logits  # [B, T, V]
        losses = functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        return losses.view_as(batch.targets)

    def _watch_gate(self, step: int, copying: float) -> None:
        if copying >= self._recipe.copy_gate:
            self._decay_starts = min(self._decay_starts, step)

    def _rate(self, step: int) -> float:
        """Return the learning rate: linear warm-up, constant, linear decay to a fiftieth."""
        recipe = self._recipe
        warmup = min(1.0, (step + 1) / recipe.num_warmup_steps)
        decay = max(0.02, 1.0 - max(0, step - self._decay_starts) / recipe.num_decay_steps)
        return recipe.learning_rate * warmup * decay

    def _draw(self, num: int) -> _Batch:
        return self._encoder.batch([next(self._demonstrations) for _ in range(num)])

    def _report(self, step: int, loss: float, copying: float) -> None:
        if not self._on_progress:
            return
        is_decaying = step >= self._decay_starts
        full_rate_steps = self._decay_starts if is_decaying else max(step, self._recipe.typical_gate_steps)
        self._on_progress(
            WarmStartProgress(
                fraction=min(1.0, step / (full_rate_steps + self._recipe.num_decay_steps)),
                step=step,
                loss=loss,
                copy_accuracy=copying,
                wall_s=time.monotonic() - self._started_s,
            )
        )
