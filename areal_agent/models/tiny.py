"""Builds the quickstart's model: tokenizer, model and warm start, put into a Hugging Face folder in one move.

The warm start is a supervised fine-tuning (areal_agent/sft) on demonstrations until the model copies numbers, where
they do. Reinforcement learning cannot teach that later: it strengthens habits, and a model that garbles every long
number has no right answer to strengthen. So the learning rate stays up until digits are copied well, or where there is
nothing to copy until the loss is flat, and only then decays. On one machine, the same seed gives the same model, also
when its build was interrupted: a build goes on from its last check, which is in `.NAME.unfinished` beside the folder
until that is there. `--untrained` leaves the warm start out.

    python -m areal_agent.models.tiny --out DIR [--seed S] [--threads N] [--demonstrations MODULE:FUNCTION]
"""

import contextlib
import fcntl
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import orjson
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from areal_agent.command import Parser, run_command
from areal_agent.errors import ConfigError
from areal_agent.gateway.conversation import read_message
from areal_agent.models.recipe import (
    DEMONSTRATIONS,
    END,
    PAD,
    RECIPE,
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
from areal_agent.sft.config import FlatConfig
from areal_agent.sft.data import Chat, row_of
from areal_agent.sft.fitting import Check, Fitting, loaded
from areal_agent.sft.sequences import ChatRenderer
from areal_agent.tokens.renderer import Renderer
from areal_agent.trainer.checkpoint import FOR_RESUMES, latest_checkpoint
from areal_agent.trainer.config import TrainerConfig, TrainerSetup
from areal_agent.types import TokenRecord

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


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStartProgress:
    """How far a warm start is, with what its last check found."""

    step: int = 0
    fraction: float = 0.0  # at least
    num_tokens: int = 0
    loss: float = math.nan  # per spoken token, of the check's conversations
    copy_accuracy: float = math.nan  # NaN where most numbers of the demonstrations are no copies

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
    is_untrained: bool = False,
    on_progress: Callable[[WarmStartProgress], None] | None = None,
) -> TinyReport:
    """Build a model into the folder `out`, which appears complete or not at all. Without a warm start it is random.

    Raises ConfigError when `out` exists and is not an empty folder, or when `demonstrations` cannot be loaded.
    """
    started_s = time.monotonic()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"out: {str(out)!r} exists already; remove it, or name another folder")
    name = model_name(recipe, seed, demonstrations)
    conversations = load_demonstrations(demonstrations)(seed)
    try:
        with _torch_settings(seed, threads), _unfinished(out, name) as folder:
            texts = map(render, islice(conversations, recipe.num_tokenizer_conversations))
            tokenizer = train_tokenizer(texts, vocab_size=recipe.vocab_size)
            model = make_model(tokenizer, recipe)
            begun = _save(folder / "begun", model, tokenizer)
            end = WarmStartProgress()
            if not is_untrained:
                warm_start = WarmStart(tokenizer, conversations, recipe)
                for end in warm_start.run(begun, folder, seed, threads):
                    if on_progress:
                        on_progress(end)
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
            saved = latest_checkpoint(folder)
            _publish(out, saved.path if saved else begun, report)
    except OSError as error:
        raise ConfigError(f"out: cannot write {str(out)!r}: {error.strerror}") from error
    return report


@contextlib.contextmanager
def _unfinished(out: Path, name: str) -> Generator[Path]:
    """Yield the folder in which a model is built, with what an interrupted build of it has left there.

    It is removed when all went well. If another process is building there, this one gets a folder of its own.
    """
    unfinished = out.with_name(f".{out.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    fd = os.open(unfinished, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as own:
            yield Path(own)
        return
    try:
        yield unfinished / name
        shutil.rmtree(unfinished)
    finally:
        os.close(fd)


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


def _save(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _publish(out: Path, weights: Path, report: TinyReport) -> None:
    """Copy the folder `weights` beside `out`, then rename it, so that nobody ever sees half a model.

    Another process may have built the same model meanwhile; the first one wins, and the other copy is dropped.
    """
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
        folder = Path(temporary) / "model"
        shutil.copytree(weights, folder, ignore=shutil.ignore_patterns(*FOR_RESUMES))
        (folder / REPORT_NAME).write_bytes(orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2))
        with contextlib.suppress(OSError) if (out / "config.json").is_file() else contextlib.nullcontext():
            os.rename(folder, out)


class WarmStart:
    """One warm start: a supervised fine-tuning on demonstrations, whose learning rate decays once they are learnt."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, demonstrations: Iterator[Conversation], recipe: Recipe
    ) -> None:
        self._recipe = recipe
        self._demonstrations = demonstrations
        self._chats = ChatRenderer(Renderer(tokenizer))
        check = [next(demonstrations) for _ in range(recipe.num_check_conversations)]
        self.check = [record for one in check for record in self._records(one)]
        digits = [token_id(tokenizer, digit) for digit in "0123456789"]
        self._is_digit = [np.isin(one.token_ids[one.loss_mask], digits) for one in self.check]
        self._copies = copies_numbers(check)

    def run(self, begun: Path, folder: Path, seed: int, threads: int) -> Iterator[WarmStartProgress]:
        """Train the model in `begun` to the end, from the newest checkpoint in `folder` if there is one.

        Yields the progress at each check, once its checkpoint is in `folder`: a warm start may be interrupted there.
        """
        recipe, saved = self._recipe, latest_checkpoint(folder)
        state = saved.run_state() if saved else {}
        num_tokens: int = state.get("num_tokens", 0)
        with loaded(self._setup(saved.path if saved else begun, folder, seed, threads), folder) as trainer:
            fitting = Fitting(
                trainer,
                self.batches(num_done=saved.step if saved else 0),
                self.check,
                num_steps=recipe.max_gate_steps + recipe.num_decay_steps,
                every=recipe.check_every,
                flat=FlatConfig(
                    checks=recipe.max_gate_steps if self._copies else recipe.num_flat_checks,
                    min_fall=recipe.flat_share,
                    decay_steps=recipe.num_decay_steps,
                ),
                step=saved.step if saved else 0,
                state=state.get("fitting"),
            )
            for fitted in fitting.steps():
                num_tokens += int(fitted.metrics["num_input_tokens"])
                if fitted.check is None:
                    continue
                if self.copy_accuracy(fitted.check) >= recipe.copy_gate:
                    fitting.wind_down()
                place = {"directory": str(folder), "step": fitted.step, "incarnation": 0}
                trainer.call("save", {**place, "run_state": {"fitting": fitting.state, "num_tokens": num_tokens}})
                yield self._progress(fitting, fitted.check, num_tokens)
            if saved and fitting.step == saved.step:  # it was interrupted at its end
                yield self._progress(fitting, fitting.check(), num_tokens)

    def _progress(self, fitting: Fitting, check: Check, num_tokens: int) -> WarmStartProgress:
        return WarmStartProgress(
            step=fitting.step,
            fraction=fitting.step / fitting.num_steps,
            num_tokens=num_tokens,
            loss=check.loss,
            copy_accuracy=self.copy_accuracy(check),
        )

    def copy_accuracy(self, check: Check) -> float:
        """Return the probability that all digits of a conversation are copied, averaged over those with digits.

        NaN where most numbers of the demonstrations are no copies: there a flat loss is the end.
        """
        if not self._copies:
            return math.nan
        by_conversation = [
            math.exp(np.asarray(logprobs)[is_digit].sum())
            for logprobs, is_digit in zip(check.logprobs, self._is_digit, strict=True)
            if is_digit.any()
        ]
        return math.fsum(by_conversation) / len(by_conversation)

    def _setup(self, model: Path, folder: Path, seed: int, threads: int) -> TrainerSetup:
        recipe = self._recipe
        num_steps = recipe.max_gate_steps + recipe.num_decay_steps
        config = TrainerConfig(
            learning_rate=recipe.learning_rate,
            warmup_fraction=recipe.num_warmup_steps / num_steps,
            betas=recipe.betas,
            epsilon=recipe.epsilon,
            weight_decay=recipe.weight_decay,
            gradient_clip=recipe.max_grad_norm,
            keep_last=1,
            threads=threads,
            device="cpu",
        )
        return TrainerSetup(
            model=model, trainer=config, seed=seed, shared_memory=folder, publishes=False, num_steps=num_steps
        )

    def batches(self, num_done: int = 0) -> Iterator[list[TokenRecord]]:
        """Yield batches without end, without the first `num_done`."""
        num_seen = num_done * self._recipe.batch_size
        next(islice(self._demonstrations, num_seen, num_seen), None)
        while True:
            batch = islice(self._demonstrations, self._recipe.batch_size)
            yield [record for one in batch for record in self._records(one)]

    def _records(self, conversation: Conversation) -> list[TokenRecord]:
        messages = [read_message(message, index) for index, message in enumerate(conversation)]
        return row_of(Chat(origin="demonstrations", messages=messages), self._chats).records()


def main() -> int:
    exit_with_parent()
    parser = Parser(
        prog="python -m areal_agent.models.tiny",
        description="Build the quickstart's model: about a million parameters, warm-started on demonstrations.",
    )
    parser.add_argument("--untrained", action="store_true", help="without the warm start: random weights")
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
        is_untrained=options.untrained,
        on_progress=_print_progress,
    )
    print(f"{options.out}: {report.num_parameters:,} parameters, {report.wall_s:.0f} s")
    return 0


def _print_progress(progress: WarmStartProgress) -> None:
    print(f"{progress.fraction:.0%} warm start, {progress}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_command(main)
