"""The chat template and the tokenizer of a model: what text a conversation is, and what ids that text is.

Owns the two rules of token-in, token-out that concern text: special-token text inside a message is encoded as plain
text (tool output cannot forge a turn), and new text after a sampled answer is tokenised alone, with the template's own
bridge. Knows nothing of sessions and of what was sampled.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, cast

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from areal_agent.errors import ConfigError, RequestError
from areal_agent.tokens.detokenizer import Detokenizer
from areal_agent.types import JsonObject

ANSWER_MARKUP = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
"""Tags that an answer may hold: in system and assistant messages they keep their meaning, elsewhere they are text."""


class HistoryThinking(StrEnum):
    """What happens to the thinking of earlier answers when the template would strip it from the history."""

    TEMPLATE = "template"  # the template has its way: the conversation goes on in a new root
    KEEP = "keep"  # the sampled ids stay in the prompt, thinking included


class Renderer:
    """Applies a chat template and tokenises. Make it with `load`; safe to use from several threads.

    >>> renderer = Renderer.load(Path("model"))                                     # doctest: +SKIP
    >>> renderer.render([{"role": "user", "content": "hi"}])                        # doctest: +SKIP
    '<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, history_thinking: HistoryThinking) -> None:
        if not isinstance(tokenizer.chat_template, str):
            raise ConfigError(
                f"the tokenizer at {tokenizer.name_or_path!r} has no chat template; "
                "put a chat_template.jinja beside its tokenizer.json"
            )
        self._tokenizer = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self.detokenizer = Detokenizer(self._backend)
        self._history_thinking = history_thinking
        self._break = secrets.token_hex(16)  # stands, in rendered text, where special-token text is broken up
        control_tokens = _control_tokens(tokenizer)
        self._control = _any_of(control_tokens)
        self._control_outside_answers = _any_of(control_tokens - ANSWER_MARKUP)
        try:
            self._end_text = self._find_end_text(control_tokens)
            self._template_strips_thinking = self._probe_thinking()
        except RequestError as error:
            raise ConfigError(f"the chat template cannot render a plain question and answer: {error}") from error
        self.end_token_id = cast("int", self._backend.token_to_id(self._end_text))
        self.vocab_size = len(tokenizer)
        eos_token_id = cast("int | None", tokenizer.eos_token_id)
        self.stop_token_ids: tuple[int, ...] = (self.end_token_id,)
        if eos_token_id is not None and eos_token_id != self.end_token_id:
            self.stop_token_ids += (eos_token_id,)

    @classmethod
    def load(cls, path: Path, *, history_thinking: HistoryThinking = HistoryThinking.TEMPLATE) -> Self:
        """Read tokenizer and template from a model's folder; raises ConfigError when they are missing or unusable."""
        if not (path / "tokenizer.json").is_file():
            raise ConfigError(f"{path} has no tokenizer.json; name a folder with a Hugging Face tokenizer")
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the tokenizer in {path} cannot be loaded: {error}") from error
        return cls(tokenizer, history_thinking=history_thinking)

    def render(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = ()) -> str:
        """The text of a conversation up to the place where the model answers.

        For `ids_of` and `ids_after` only: special-token text from messages and tools is marked in it as plain.
        Raises RequestError when the template refuses the conversation.
        """
        return self._apply(
            [self._message_as_text(message) for message in messages],
            [self._as_text(tool, self._control_outside_answers) for tool in tools],
        )

    def strips_thinking(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject], at: Sequence[int]) -> bool:
        """Whether the template, left its way, would strip the thinking of the answers at these positions."""
        if not at or not self._template_strips_thinking or self._history_thinking is HistoryThinking.KEEP:
            return False
        probed = list(messages)
        probes = [f"{self._break}{position:08x}" for position in at]
        for position, probe in zip(at, probes, strict=True):
            probed[position] = {"role": "assistant", "content": _with_thinking(probe)}
        text = self.render(probed, tools)
        return any(probe not in text for probe in probes)

    def ids_of(self, text: str) -> list[int]:
        """Token ids of rendered text."""
        if self._break not in text:
            return self._encode(text)
        return [token_id for piece in text.split(self._break) if piece for token_id in self._encode(piece)]

    def ids_after(self, sampled_ids: Sequence[int], text: str) -> list[int]:
        """Token ids of the rendered text that follows a sampled answer.

        The text begins with the template's end token. An answer that ended with it has sampled it already; one that
        was cut off (by its length, or an end token of another kind) still needs it.
        """
        ids = self.ids_of(text)
        if not ids or ids[0] != self.end_token_id:
            raise RequestError(
                f"the chat template ended an answer with {text[:20]!r} instead of {self._end_text!r}", param="messages"
            )
        return ids[1:] if sampled_ids and sampled_ids[-1] == self.end_token_id else ids

    def text_of(self, token_ids: Sequence[int], *, has_ended: bool) -> str:
        """What a sampled answer says; the last token of one that `has_ended` by itself is its end, not its text."""
        return self._backend.decode(list(token_ids[:-1] if has_ended else token_ids), skip_special_tokens=False)

    def _encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _apply(self, messages: list[dict[str, Any]], tools: list[Any], *, add_generation_prompt: bool = True) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except Exception as error:  # the template is foreign code, run on foreign data
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return cast("str", text)

    def _message_as_text(self, message: JsonObject) -> dict[str, Any]:
        is_trusted = message["role"] in ("system", "assistant")
        return self._as_text(message, self._control_outside_answers if is_trusted else self._control)

    def _as_text(self, value: Any, control: re.Pattern[str]) -> Any:
        """`value` with every special-token text in its strings broken after its first character."""
        if isinstance(value, str):
            while control.search(value):
                value = control.sub(lambda match: match[0][0] + self._break + match[0][1:], value)
            return value
        if isinstance(value, Mapping):
            return {self._as_text(key, control): self._as_text(item, control) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._as_text(item, control) for item in value]
        return value

    def _find_end_text(self, control_tokens: frozenset[str]) -> str:
        """The special token with which the template ends an answer."""
        answer = secrets.token_hex(8)
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
        after = self._apply(messages, [], add_generation_prompt=False).partition(answer)[2]
        for token in sorted(control_tokens, key=len, reverse=True):
            if after.startswith(token):
                return token
        raise ConfigError(
            f"the chat template writes {after[:20]!r} after an answer, which is no special token of the tokenizer; "
            "use a template that ends each answer with one, as '<|im_end|>' in ChatML"
        )

    def _probe_thinking(self) -> bool:
        thought = secrets.token_hex(8)
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": _with_thinking(thought)},
            {"role": "user", "content": "x"},
        ]
        return thought not in self._apply(messages, [])


def _with_thinking(thought: str) -> str:
    return f"<think>\n{thought}\n</think>\n\nanswer"


def _control_tokens(tokenizer: PreTrainedTokenizerFast) -> frozenset[str]:
    """The texts that the tokenizer turns into tokens with a meaning of their own: special ones, and the template's.

    Added tokens that are runs of white space carry no meaning; one of a single character cannot be broken up.
    """
    template = cast("str", tokenizer.chat_template)
    return frozenset(
        text
        for token in tokenizer.added_tokens_decoder.values()
        if len(text := token.content.strip()) > 1 and (token.special or text in template or text in ANSWER_MARKUP)
    )


def _any_of(texts: frozenset[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
