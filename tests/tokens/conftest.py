"""A byte-level tokenizer with ChatML and Hermes tools, trained here, and templates that change the history."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from areal_agent.tokens.renderer import Renderer

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

# Counts the messages at the top: whatever is said later changes how the conversation begins.
REWRITES_HISTORY = "{{- '<|im_start|>system\\n' ~ (messages | length) ~ '<|im_end|>\\n' }}" + CHATML

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")

CORPUS = (
    "the quick brown fox jumps over the lazy dog, again and again",
    "system user assistant tool name arguments code python print result answer",
    '{"name": "python", "arguments": {"code": "print(1 + 2)"}}',
)


def train_tokenizer(chat_template: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([line for line in CORPUS for _ in range(8)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=chat_template)


def save(folder: Path, chat_template: str) -> Path:
    train_tokenizer(chat_template).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chatml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("chatml"), CHATML)


@pytest.fixture(scope="session")
def stripping_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("strips_thinking"), STRIPS_THINKING)


@pytest.fixture(scope="session")
def rewriting_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("rewrites_history"), REWRITES_HISTORY)


@pytest.fixture(scope="session")
def tokenizer(chatml_folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(chatml_folder)


@pytest.fixture(scope="session")
def renderer(chatml_folder: Path) -> Renderer:
    return Renderer.load(chatml_folder)
