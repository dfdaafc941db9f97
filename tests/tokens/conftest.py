"""Byte-level tokenizers, trained here: with ChatML and Hermes tools, with templates that change the history, and one
for each model family that agents are trained with.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from areal_agent.tokens.forest import Prompt
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import JsonObject

CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Keeps the thinking of the last answer only, as Qwen3 does.
STRIPS_THINKING = CHATML.replace(
    "'\\n' + message.content",
    "'\\n' + (message.content if loop.last or message.role != 'assistant' "
    "else message.content.split('</think>')[-1].lstrip('\\n'))",
)

# Counts the messages at the top, so each later message changes how the conversation begins.
REWRITES_HISTORY = "{{- '<|im_start|>system\\n' ~ (messages | length) ~ '<|im_end|>\\n' }}" + CHATML

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")

CORPUS = (
    "the quick brown fox jumps over the lazy dog, again and again",
    "system user assistant tool name arguments code python print result answer",
    '{"name": "python", "arguments": {"code": "print(1 + 2)"}}',
)


TEMPLATES = Path(__file__).parent / "templates"

CHATML_MARKUP = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True, kw_only=True)
class Family:
    """The special tokens of a model family; `markup` has added tokens that are not special."""

    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    markup: tuple[str, ...] = ()


CHATML_FAMILY = Family(special=SPECIAL_TOKENS[:3], eos="<|im_end|>", markup=CHATML_MARKUP)
DEEPSEEK_FAMILY = Family(
    bos="<｜begin▁of▁sentence｜>",
    eos="<｜end▁of▁sentence｜>",
    special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    markup=(
        *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<think>", "</think>"),
    ),
)
FAMILIES = {
    "qwen25": CHATML_FAMILY,
    "qwen3": CHATML_FAMILY,
    "llama3": Family(
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    "mistral": Family(
        special=(
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        bos="<s>",
        eos="</s>",
    ),
    "deepseek": DEEPSEEK_FAMILY,
    "deepseek_r1": DEEPSEEK_FAMILY,
}


def byte_level(corpus: Iterable[str], *, vocab_size: int, special: Sequence[str]) -> Tokenizer:
    """Train a byte-level tokenizer on a small corpus, whose lines are seen eight times."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([line for line in corpus for _ in range(8)], trainer)
    return tokenizer


def train_tokenizer(
    chat_template: str, family: Family = Family(special=SPECIAL_TOKENS, eos="<|im_end|>")
) -> PreTrainedTokenizerFast:
    tokenizer = byte_level(CORPUS, vocab_size=400, special=family.special)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in family.markup])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=family.bos, eos_token=family.eos, chat_template=chat_template
    )


def as_it_is(message: JsonObject, index: int) -> JsonObject:
    """Normalise a message that is in the form of the template already."""
    return message


def parent_of(prompt: Prompt) -> str | None:
    """Return the completion that a prompt continues."""
    return prompt.parent.completion_id if prompt.parent else None


def save(folder: Path, chat_template: str) -> Path:
    train_tokenizer(chat_template).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def family_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a folder with tokenizer and template for each model family."""
    folders: dict[str, Path] = {}
    for name, family in FAMILIES.items():
        template = (TEMPLATES / f"{name}.jinja").read_text().removesuffix("\n")
        folders[name] = tmp_path_factory.mktemp(name)
        train_tokenizer(template, family).save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="session")
def families(family_folders: dict[str, Path]) -> dict[str, Renderer]:
    return {name: Renderer.load(folder) for name, folder in family_folders.items()}


@pytest.fixture(scope="session")
def chatml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("chatml"), CHATML)


@pytest.fixture(scope="session")
def rewriting_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("rewrites_history"), REWRITES_HISTORY)


@pytest.fixture(scope="session")
def tokenizer(chatml_folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(chatml_folder)


@pytest.fixture(scope="session")
def renderer(chatml_folder: Path) -> Renderer:
    return Renderer.load(chatml_folder)
