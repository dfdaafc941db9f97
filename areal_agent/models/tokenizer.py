"""The tiny model's tokenizer, trained on conversations, and its chat template: ChatML with Hermes tool calls.

A byte-level BPE. A digit is always a token of its own, and between digits the text is split only at line ends, so that
what the demonstrations repeat (`{"name": "python", "arguments": ... print(`) becomes one token. A number is then always
at the same distance from its copy, which is what a small model learns first.
The text of a conversation is a prefix of the text of every continuation of it.
"""

from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

CHAT_TEMPLATE = r"""
{#- Tool definitions are not printed: the model knows its one tool by training, and short prompts keep it fast. -#}
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


Conversation = list[dict[str, Any]]
"""Messages in OpenAI's format."""

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
