"""The tiny model's recipe and tokenizer, its demonstrations, and its folder in the cache. Imports no torch.

A cached model is named by everything that determines it: the recipe, the seed, and what the demonstrations yield. It is
not named by their source, so editing a file beside them, or moving them, builds no new model.

The tokenizer is trained on conversations, with a chat template of ChatML and Hermes tool calls: a byte-level BPE. A
digit is always a token of its own, and between digits the text is split only at line ends, so that what the
demonstrations repeat (`{"name": "python", "arguments": ... print(`) becomes one token. A number is then always at the
same distance from its copy, which is what a small model learns first. The text of a conversation is a prefix of the
text of every continuation of it.
"""

import hashlib
import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import orjson
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from areal_agent.errors import ConfigError

Conversation = list[dict[str, Any]]
"""Messages in OpenAI's format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Shape, tokenizer and warm start of a model of about a million parameters."""

    version: int = 2  # increase it when the code that follows the recipe changes its result

    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 2
    num_heads: int = 6
    head_dim: int = 32
    rope_theta: float = 1_000.0  # positions matter within a hundred tokens
    max_context_tokens: int = 1024

    vocab_size: int = 1024  # at most; the demonstrations determine it
    num_tokenizer_conversations: int = 4_000

    batch_size: int = 16  # conversations
    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.98)
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    num_warmup_steps: int = 30

    check_every: int = 25  # steps between two measurements of what it has learnt
    num_check_conversations: int = 128
    copy_gate: float = 0.9  # copying at least this well starts the decay of the learning rate
    flat_share: float = 0.2  # where there is nothing to copy, so does a loss that falls by less than this share
    num_flat_checks: int = 4  # in so many checks
    max_gate_steps: int = 500  # the decay starts here at the latest
    num_decay_steps: int = 150


RECIPE = Recipe()

DEMONSTRATIONS = "envs.calculator.demonstrations:demonstrations"
"""The default demonstrations of the tiny model: an import path, so that no environment is imported."""
TINY = "tiny"


def demonstrations_of(model: str) -> str | None:
    """Return the demonstrations for the tiny model of a config; None when `model` names another model.

    >>> demonstrations_of("tiny:my.module:function"), demonstrations_of("org/name")
    ('my.module:function', None)
    """
    name, colon, path = model.partition(":")
    if name != TINY:
        return None
    return path if colon else DEMONSTRATIONS


def model_name(recipe: Recipe, seed: int, demonstrations: str) -> str:
    """Return the name of this model: the same name is the same model. It takes some tenths of a second.

    Raises ConfigError when the demonstrations cannot be loaded, fail, end, or differ from one call to the next.
    """
    yielded = _digest(demonstrations, seed)
    if _digest(demonstrations, seed) != yielded:
        raise ConfigError(
            f"demonstrations: {demonstrations!r} yielded other conversations when called again with seed {seed}, so "
            "its model could not be found again; draw everything from random.Random(seed)"
        )
    digest = hashlib.sha256(orjson.dumps(asdict(recipe)) + yielded.encode()).hexdigest()
    return f"tiny-{digest[:16]}-seed{seed}"


def model_folder(recipe: Recipe, seed: int, demonstrations: str) -> Path:
    """Return the folder for this model, which need not exist, in the cache: `$AREAL_AGENT_CACHE`, else XDG's.

    Raises ConfigError as `model_name` does.
    """
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("AREAL_AGENT_CACHE") or users / "areal_agent")
    return root / model_name(recipe, seed, demonstrations)


NUM_HASHED = 1_000
"""Conversations by which demonstrations are told apart: a habit of one in a hundred is among them."""


def _digest(demonstrations: str, seed: int) -> str:
    """Return the SHA-256 of the first conversations."""
    digest, number = hashlib.sha256(), 0
    function = load_demonstrations(demonstrations)
    try:
        for conversation in islice(function(seed), NUM_HASHED):
            digest.update(orjson.dumps(conversation))
            number += 1
    except Exception as error:  # the user's code
        raise ConfigError(
            f"demonstrations: {demonstrations!r} failed after {number} conversations: {type(error).__name__}: {error}; "
            "it must yield lists of messages in OpenAI's format"
        ) from error
    if number < NUM_HASHED:
        raise ConfigError(
            f"demonstrations: {demonstrations!r} ended after {number} conversations; it must yield them without end"
        )
    return digest.hexdigest()


Demonstrations = Callable[[int], Iterator[Conversation]]
"""`demonstrations(seed)` yields conversations without end."""


def load_demonstrations(path: str) -> Demonstrations:
    """Import `package.module:function`. Raises ConfigError that says which half is wrong."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"demonstrations: {path!r} is not of the form 'package.module:function'; give such a path")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise ConfigError(
            f"demonstrations: importing {module_name!r} failed: {error}; run it where that package can be imported"
        ) from error
    except Exception as error:  # the user's code
        raise ConfigError(
            f"demonstrations: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise ConfigError(f"demonstrations: {module_name!r} has no function {name!r}")
    return cast(Demonstrations, found)


CHAT_TEMPLATE = r"""
{#- Tool definitions are read and not printed: the model knows its one tool by training, and short prompts are fast. -#}
{%- if tools -%}{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- elif message.content -%}
        {%- for part in message.content -%}
            {{- part.text -}}
        {%- endfor -%}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {%- set arguments = call.function.arguments -%}
        {{- '<tool_call>{"name": ' + call.function.name | tojson + ', "arguments": ' -}}
        {{- arguments if arguments is string else arguments | tojson -}}
        {{- '}</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
""".strip()

PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
TOOL_CALL_TAGS = ("<tool_call>", "</tool_call>")  # part of an answer, so not special: decoding keeps them
ASSISTANT = "assistant\n"  # follows START where the model speaks; a single token, because text is split at line ends

MIN_FREQUENCY = 8
_PIECES = Regex(r"\d|[^\d\n]*\n|[^\d\n]+")


def render(conversation: Conversation) -> str:
    """Return the text of a whole conversation."""
    texts, _ = render_jinja_template([conversation], chat_template=CHAT_TEMPLATE)
    return texts[0]


def copies_numbers(conversations: Iterable[Conversation]) -> bool:
    """Return whether most of the numbers that the model says were in the conversation before.

    >>> asked, told = {"role": "user", "content": "7 plus 8?"}, {"role": "assistant", "content": "7 + 8 is 15"}
    >>> copies_numbers([[asked, told]]), copies_numbers([[told]])
    (True, False)
    """
    num_said = num_copied = 0
    for conversation in conversations:
        heard: set[str] = set()
        for message in render(conversation).split(START):
            numbers: list[str] = re.findall(r"\d+", message)
            if message.startswith(ASSISTANT):
                num_said += len(numbers)
                num_copied += sum(number in heard for number in numbers)
            heard.update(numbers)
    return num_copied > num_said / 2


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` tokens on rendered conversations. It has the chat template."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [Split(_PIECES, behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = ByteLevelDecoder()  # pyright: ignore[reportAttributeAccessIssue]
    special = [PAD, START, END]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in TOOL_CALL_TAGS])
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=special,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=CHAT_TEMPLATE,
        pad_token=PAD,
        eos_token=END,
        clean_up_tokenization_spaces=False,
    )


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """Return the id of `token`, which has to be a single token."""
    (found,) = tokenizer.encode(token, add_special_tokens=False)
    return found
