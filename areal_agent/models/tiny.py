"""Builds the quickstart's model: tokenizer, model and warm start, put into a Hugging Face folder in one move.

The warm start is supervised training on demonstrations until the model copies numbers, where they do. Reinforcement
learning cannot teach that later: it strengthens habits, and a model that garbles every long number has no right answer
to strengthen. So the learning rate stays up until digits are copied well, or where there is nothing to copy until the
loss is flat, and only then decays. On one machine, the same seed gives the same model, also when its build was
interrupted: a build goes on from its last check, which is in `.NAME.unfinished` beside the folder until that is there.

    python -m areal_agent.models.tiny --out DIR [--seed S] [--threads N] [--demonstrations MODULE:FUNCTION]
"""

import contextlib
import math
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from areal_agent.command import Parser, run_command
from areal_agent.errors import ConfigError
from areal_agent.models.recipe import (
    ASSISTANT,
    DEMONSTRATIONS,
    END,
    PAD,
    RECIPE,
    START,
    Conversation,
    Recipe,
    copies_numbers,
    load_demonstrations,
    model_name,
    render,
    token_id,
    train_tokenizer,
)
from areal_agent.process import exit_with_parent

REPORT_NAME = "warm_start.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyReport:
    """The result of building a model, stored in its folder."""

    seed: int
    num_parameters: int
    vocab_size: int
    steps: int
    num_tokens: int
    loss: float
    copy_accuracy: float  # probability that all numbers of a conversation are copied; NaN without numbers
    wall_s: float


@dataclass(kw_only=True, slots=True)
class WarmStartProgress:
    """How far a warm start is, with what its last check found."""

    decay_starts: int  # at most; earlier when the gate opens
    fraction: float = 0.0  # at least
    step: int = 0
    num_tokens: int = 0
    loss: float = math.nan  # per spoken token, of the check's conversations
    copy_accuracy: float = math.nan
    best_loss: float = math.inf
    num_flat_checks: int = 0  # in which the loss has not fallen

    def __str__(self) -> str:
        copying = "" if math.isnan(self.copy_accuracy) else f", copies {self.copy_accuracy:.0%} of numbers"
        return f"step {self.step}, loss {self.loss:.2f}{copying}"


def build(
    out: Path,
    *,
    seed: int,
    demonstrations: str = DEMONSTRATIONS,
    recipe: Recipe = RECIPE,
    threads: int = 2,
    on_progress: Callable[[WarmStartProgress], None] | None = None,
) -> TinyReport:
    """Build a model into the folder `out`, which appears complete or not at all.

    Raises ConfigError when `out` exists and is not an empty folder, or when `demonstrations` cannot be loaded.
    """
    started_s = time.monotonic()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"out: {str(out)!r} exists already; remove it, or name another folder")
    unfinished = Unfinished(path=out.with_name(f".{out.name}.unfinished"), of=model_name(recipe, seed, demonstrations))
    conversations = load_demonstrations(demonstrations)(seed)
    with _torch_settings(seed, threads):
        texts = map(render, islice(conversations, recipe.num_tokenizer_conversations))
        tokenizer = train_tokenizer(texts, vocab_size=recipe.vocab_size)
        model = make_model(tokenizer, recipe)
        warm_start = WarmStart(model, tokenizer, conversations, recipe)
        if (state := unfinished.load()) is not None:
            warm_start.load_state(state)
        for progress in warm_start.run():
            unfinished.save(warm_start.state())
            if on_progress:
                on_progress(progress)
        end = warm_start.progress
    report = TinyReport(
        seed=seed,
        num_parameters=model.num_parameters(),
        vocab_size=len(tokenizer),
        steps=end.step,
        num_tokens=end.num_tokens,
        loss=end.loss,
        copy_accuracy=end.copy_accuracy,
        wall_s=time.monotonic() - started_s,
    )
    _publish(out, model, tokenizer, report)
    unfinished.path.unlink(missing_ok=True)
    return report


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """The file from which an interrupted build goes on. A file of another model, or a damaged one, counts as none."""

    path: Path
    of: str  # the model's name

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the file in one move. Raises ConfigError when it cannot be written."""
        new = self.path.with_name(f"{self.path.name}-{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"of": self.of, "state": dict(state)}, new)
            os.replace(new, self.path)
        except OSError as error:
            raise ConfigError(f"out: cannot write {str(self.path)!r}: {error.strerror}") from error
        finally:
            new.unlink(missing_ok=True)

    def load(self) -> Mapping[str, Any] | None:
        try:
            saved = torch.load(self.path, weights_only=True)
            return saved["state"] if saved["of"] == self.of else None
        except (OSError, EOFError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError):
            return None


def make_model(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Qwen3ForCausalLM:
    """Create a model with random weights and the architecture of Qwen3."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_context_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        pad_token_id=token_id(tokenizer, PAD),
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END),
    )
    return Qwen3ForCausalLM(config)


@contextlib.contextmanager
def _torch_settings(seed: int, threads: int) -> Generator[None]:
    """Seed torch and limit it to `threads` threads; restore its state afterwards."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads_before)


def _publish(out: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, report: TinyReport) -> None:
    """Write beside `out`, then rename, so that nobody ever sees half a model.

    Another process may have built the same model meanwhile; the first one wins, and the other copy is dropped.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
            folder = Path(temporary) / "model"
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            (folder / REPORT_NAME).write_bytes(orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2))
            with contextlib.suppress(OSError) if (out / "config.json").is_file() else contextlib.nullcontext():
                os.rename(folder, out)
    except OSError as error:
        raise ConfigError(f"out: cannot write {str(out)!r}: {error.strerror}") from error


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
    ) -> None:
        self._model = model
        self._encoder = ConversationEncoder(tokenizer)
        self._demonstrations = demonstrations
        self._recipe = recipe
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
        )
        check = [next(demonstrations) for _ in range(recipe.num_check_conversations)]
        self._check, self._copies = self._encoder.batch(check), copies_numbers(check)
        self.progress = WarmStartProgress(decay_starts=recipe.max_gate_steps)

    def run(self) -> Iterator[WarmStartProgress]:
        """Train at full learning rate until the gate opens, then through the decay; yield the progress at checks."""
        recipe, progress = self._recipe, self.progress
        while progress.step < progress.decay_starts + recipe.num_decay_steps:
            self._train(self._rate(progress.step))
            progress.step += 1
            if progress.step % recipe.check_every == 0:
                self._look()
                yield replace(progress)

    def state(self) -> Mapping[str, Any]:
        """Return what `load_state` needs to go on from here, with demonstrations that begin anew."""
        parts = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        return {**parts, "progress": asdict(self.progress)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: the demonstrations that it has seen are skipped."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.progress = WarmStartProgress(**state["progress"])
        num_seen = self.progress.step * self._recipe.batch_size
        next(islice(self._demonstrations, num_seen, num_seen), None)

    @torch.no_grad()
    def _look(self) -> None:
        """Measure on conversations that are not trained on; the decay starts when it copies well or learns no more.

        Copying: the probability that all digits of a conversation are copied, averaged over those with digits. NaN
        where most numbers of the demonstrations are no copies: there a flat loss is the end.
        """
        check, progress, recipe = self._check, self.progress, self._recipe
        losses = self._losses(check)  # [B, T]
        progress.loss = (losses.sum() / (check.targets != -100).sum()).item()
        if self._copies:
            by_conversation = torch.where(check.is_digit, -losses, 0.0).sum(dim=1).exp()
            progress.copy_accuracy = by_conversation[check.is_digit.any(dim=1)].mean().item()
        progress.num_flat_checks += 1
        if progress.loss < (1 - recipe.flat_share) * progress.best_loss:
            progress.best_loss, progress.num_flat_checks = progress.loss, 0
        is_flat = not self._copies and progress.num_flat_checks >= recipe.num_flat_checks
        if progress.copy_accuracy >= recipe.copy_gate or is_flat:
            progress.decay_starts = min(progress.decay_starts, progress.step)
        progress.fraction = progress.step / (progress.decay_starts + recipe.num_decay_steps)

    def _train(self, rate: float) -> None:
        batch = self._draw(self._recipe.batch_size)
        loss = self._losses(batch).sum() / (batch.targets != -100).sum()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._recipe.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.progress.num_tokens += batch.num_tokens

    def _losses(self, batch: _Batch) -> Tensor:
        """Return the negative log-likelihood of each spoken token, 0 elsewhere, [B, T]."""
        logits = self._model(input_ids=batch.inputs, use_cache=False).logits  # [B, T, V]
        losses = functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        return losses.view_as(batch.targets)

    def _rate(self, step: int) -> float:
        """Return the learning rate: linear warm-up, constant, linear decay to a fiftieth."""
        recipe = self._recipe
        warmup = min(1.0, (step + 1) / recipe.num_warmup_steps)
        decay = max(0.02, 1.0 - max(0, step - self.progress.decay_starts) / recipe.num_decay_steps)
        return recipe.learning_rate * warmup * decay

    def _draw(self, num: int) -> _Batch:
        return self._encoder.batch([next(self._demonstrations) for _ in range(num)])


def main() -> int:
    exit_with_parent()
    parser = Parser(
        prog="python -m areal_agent.models.tiny",
        description="Build the quickstart's model: about a million parameters, warm-started on demonstrations.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to build it into; must not exist")
    parser.add_argument("--seed", type=int, default=0, help="seeds the weights and the demonstrations (0)")
    parser.add_argument("--threads", type=int, default=2, help="threads to compute with (2)")
    parser.add_argument("--demonstrations", default=DEMONSTRATIONS, help=f"package.module:function ({DEMONSTRATIONS})")
    options = parser.parse_args()
    if options.threads < 1:
        raise ConfigError(f"--threads is {options.threads}; give at least 1")
    transformers_logging.disable_progress_bar()
    report = build(
        options.out,
        seed=options.seed,
        demonstrations=options.demonstrations,
        threads=options.threads,
        on_progress=_print_progress,
    )
    print(f"{options.out}: {report.num_parameters:,} parameters, {report.wall_s:.0f} s")
    return 0


def _print_progress(progress: WarmStartProgress) -> None:
    print(f"{progress.fraction:.0%} warm start, {progress}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_command(main)
