"""Builds the quickstart's model: tokenizer, model and warm start, put into a Hugging Face folder in one move.

On one machine, the same seed gives the same model.

    python -m areal_agent.models.tiny --out DIR [--seed S] [--threads N] [--demonstrations MODULE:FUNCTION]
"""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import orjson
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from areal_agent.command import Parser, run_command
from areal_agent.errors import ConfigError
from areal_agent.models.recipe import DEMONSTRATIONS, RECIPE, Recipe, load_demonstrations, model_folder
from areal_agent.models.tokenizer import END, PAD, render, token_id, train_tokenizer
from areal_agent.models.warm_start import WarmStart, WarmStartProgress
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
    copy_accuracy: float  # probability that all numbers of a conversation are copied
    wall_s: float


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
    _check_free(out)
    conversations = load_demonstrations(demonstrations)(seed)
    with _torch_settings(seed, threads):
        texts = map(render, islice(conversations, recipe.num_tokenizer_conversations))
        tokenizer = train_tokenizer(texts, vocab_size=recipe.vocab_size)
        model = make_model(tokenizer, recipe)
        result = WarmStart(model, tokenizer, conversations, recipe, on_progress).run()
    report = TinyReport(
        seed=seed,
        num_parameters=model.num_parameters(),
        vocab_size=len(tokenizer),
        steps=result.steps,
        num_tokens=result.num_tokens,
        loss=result.loss,
        copy_accuracy=result.copy_accuracy,
        wall_s=time.monotonic() - started_s,
    )
    _publish(out, model, tokenizer, report)
    return report


def cached(
    *,
    seed: int,
    demonstrations: str = DEMONSTRATIONS,
    recipe: Recipe = RECIPE,
    threads: int = 2,
    on_progress: Callable[[WarmStartProgress], None] | None = None,
) -> Path:
    """Return the folder of this model in the cache, and build the model if it is missing."""
    folder = model_folder(recipe, seed, demonstrations)
    if not (folder / "config.json").is_file():
        build(folder, seed=seed, demonstrations=demonstrations, recipe=recipe, threads=threads, on_progress=on_progress)
    return folder


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


def _check_free(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        raise ConfigError(f"out: {str(out)!r} exists already; remove it, or name another folder")


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
    print(
        f"{options.out}: {report.num_parameters:,} parameters, {report.steps} steps on {report.num_tokens:,} tokens, "
        f"copies {report.copy_accuracy:.1%} of numbers, {report.wall_s:.0f} s"
    )
    return 0


def _print_progress(progress: WarmStartProgress) -> None:
    print(
        f"{progress.fraction:.0%} warm start, step {progress.step}: copies {progress.copy_accuracy:.0%} of numbers",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    run_command(main)
