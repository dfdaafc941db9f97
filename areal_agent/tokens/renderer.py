"""The chat template and the tokenizer of a model: what text a conversation is, and what ids that text is.

Owns the two rules of token-in, token-out that concern text: special-token text inside a message is encoded as plain
text (tool output cannot forge a turn), and new text after a sampled answer is tokenised alone, with the template's own
bridge. Knows nothing of sessions and of what was sampled.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from areal_agent.errors import ConfigError, RequestError
from areal_agent.tokens.answers.answer_format import AnswerFormat
from areal_agent.tokens.answers.detection import ReasoningFormat, ToolFormat
from areal_agent.tokens.control import ANSWER_MARKUP, Breaker, any_of, control_texts
from areal_agent.tokens.detokenizer import Detokenizer
from areal_agent.tokens.keep_thinking import STAND_INS, HistoryThinking, keep_template
from areal_agent.tokens.template import ChatTemplate
from areal_agent.tokens.words import WordCache
from areal_agent.types import JsonObject

_OPENED_THINKING = re.compile(r"<think>\s*(</think>\s*)?\Z")


def exported_template(path: Path, history_thinking: HistoryThinking) -> str | None:
    """The chat template to export with a model that starts from `path`; None: its own."""
    if history_thinking is HistoryThinking.TEMPLATE:
        return None
    return Renderer.load(path, history_thinking=history_thinking).chat_template


def is_open(text: str) -> bool:
    """Whether what follows `text` is thinking.

    >>> is_open("<think>"), is_open("<think> </think>")
    (True, False)
    """
    return "<think>" in text.rpartition("</think>")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """Rendered text from an answer on, split at the token that ends the answer."""

    answer: str
    end: str  # text of the end token
    rest: str


class Renderer:
    """Applies a chat template and tokenises. Make it with `load`; safe to use from several threads.

    >>> renderer = Renderer.load(Path("model"))                                     # doctest: +SKIP
    >>> renderer.render([{"role": "user", "content": "hi"}])                        # doctest: +SKIP
    '<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        history_thinking: HistoryThinking = HistoryThinking.TEMPLATE,
        tool_format: ToolFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
    ) -> None:
        if not isinstance(tokenizer.chat_template, str):
            raise ConfigError(
                f"the tokenizer at {tokenizer.name_or_path!r} has no chat template; "
                "put a chat_template.jinja beside its tokenizer.json"
            )
        source = tokenizer.chat_template
        self.answer_format = AnswerFormat.detect(source, tool_format=tool_format, reasoning_format=reasoning_format)
        is_kept = history_thinking is HistoryThinking.KEEP
        self.chat_template = keep_template(source) if is_kept else source
        """The template in use: the one to export with a model that is trained on these prompts."""
        self._template = ChatTemplate(self.chat_template, tokenizer.special_tokens_map)
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._backend.no_truncation()  # a training script leaves such things in tokenizer.json: no prompt is cut here
        self._backend.no_padding()
        self._words = WordCache.of(self._backend)
        self.detokenizer = Detokenizer(self._backend)
        self._secret = secrets.token_hex(16)  # no message can contain it
        texts = control_texts(tokenizer, source) | (STAND_INS if is_kept else frozenset())
        self._turn_texts = texts - ANSWER_MARKUP
        self._breaker = Breaker(texts, with_text=self._secret)
        self._breaker_in_answers = Breaker(self._turn_texts, with_text=self._secret)
        try:
            self.end_texts = self._find_end_texts()
            self.answer_header = self._find_answer_header()
        except RequestError as error:
            raise ConfigError(f"the chat template cannot render a plain question and answer: {error}") from error
        self._end_pattern = re.compile(any_of(self.end_texts))
        self.end_token_id = self._id_of(self.end_texts[0])
        self.thinking_end_id: int | None = self._backend.token_to_id("</think>")
        self.vocab_size = len(tokenizer)
        eos_token_id = cast("int | None", tokenizer.eos_token_id)
        stop_ids = [self._id_of(text) for text in self.end_texts]
        self.stop_token_ids = tuple(dict.fromkeys(stop_ids if eos_token_id is None else [*stop_ids, eos_token_id]))
        self.may_elide = True
        """Whether stand-ins may be rendered for long conversations; false for good once one was caught lying."""

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        history_thinking: HistoryThinking = HistoryThinking.TEMPLATE,
        tool_format: ToolFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
    ) -> Self:
        """Read tokenizer and template from a model's folder; raises ConfigError when they are missing or unusable.

        A format that is None: the one that the template itself writes.
        """
        if not (path / "tokenizer.json").is_file():
            raise ConfigError(f"{path} has no tokenizer.json; name a folder with a Hugging Face tokenizer")
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the tokenizer in {path} cannot be loaded: {error}") from error
        return cls(
            tokenizer,
            history_thinking=history_thinking,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
        )

    # ------------------------------------------------------------------------------------------ data to text

    def render(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = ()) -> str:
        """The text of a conversation up to the place where the model answers.

        For `ids_of` and `ids_after` only: special-token text from messages and tools is marked in it as plain.
        Raises RequestError when the template refuses the conversation.
        """
        return self.text_of_forms([self.form(message) for message in messages], self.tool_forms(tools))

    def form(self, message: JsonObject) -> JsonObject:
        """A normalised message as it is given to the template: special-token text in it is broken up."""
        is_trusted = message["role"] in ("system", "assistant")
        form = (self._breaker_in_answers if is_trusted else self._breaker).broken(message)
        if form.get("reasoning_content") is not None:
            form = {"thinking": form["reasoning_content"], **form}  # as transformers does, for templates that read it
        return form

    def tool_forms(self, tools: Sequence[JsonObject]) -> list[JsonObject]:
        """Tool definitions as they are given to the template."""
        return self._breaker_in_answers.broken(tools)

    def text_of_forms(self, forms: Sequence[JsonObject], tool_forms: Sequence[JsonObject]) -> str:
        """The text of what `form` and `tool_forms` made."""
        return self._template.render(forms, tool_forms)

    def probe(self, number: int) -> str:
        """A text that no message can contain: it stands for the thinking of an answer in rendered text."""
        return f"{self._secret[::-1]}{number:08x}"

    def split_opened(self, text: str) -> tuple[str, str]:
        """The text of a conversation without the thinking that the template opens for the model, and that."""
        opened = _OPENED_THINKING.search(text) if text[-1:].isspace() or text.endswith(">") else None
        return (text[: opened.start()], opened[0]) if opened else (text, "")

    def split_at_end(self, text: str) -> Ended | None:
        """Split rendered text that begins with an answer where that ends; None when no end token stands there."""
        end = self._end_pattern.search(text)
        return Ended(answer=text[: end.start()], end=end[0], rest=text[end.end() :]) if end else None

    # ------------------------------------------------------------------------------------------ text to ids

    def ids_of(self, text: str) -> list[int]:
        """Token ids of rendered text."""
        if self._secret not in text:
            return self._encode(text) if text else []
        return [token_id for piece in text.split(self._secret) if piece for token_id in self._encode(piece)]

    def ids_after(self, sampled_ids: Sequence[int], text: str) -> list[int]:
        """Token ids of the rendered text that follows a sampled answer.

        The text begins with one of the template's end tokens. An answer that ended with it has sampled it already;
        one that was cut off (by its length, or an end token of another kind) still needs it.
        """
        ids = self.ids_of(text)
        if not ids or ids[0] not in self.stop_token_ids:
            raise RequestError(
                f"the chat template ended an answer with {text[:20]!r} instead of {self.end_texts[0]!r}",
                param="messages",
            )
        return ids[1:] if len(sampled_ids) and sampled_ids[-1] == ids[0] else ids

    def ids_of_prompt(self, text: str) -> list[int]:
        """Token ids of a text that is a prompt by itself: special tokens keep their meaning, a first one is added."""
        first = self._template.special_tokens.get("bos_token")
        return self._backend.encode(text, add_special_tokens=not (first and text.startswith(first))).ids

    def text_of(self, token_ids: Sequence[int], *, has_ended: bool) -> str:
        """What a sampled answer says; the last token of one that `has_ended` by itself is its end, not its text."""
        return self.detokenizer.text_of(token_ids[:-1] if has_ended else token_ids)

    def _encode(self, text: str) -> list[int]:
        token_ids = self._words.ids_of(text) if self._words else None
        if token_ids is None:
            # Without offsets: cheaper.
            token_ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return token_ids

    def _id_of(self, token: str) -> int:
        return cast("int", self._backend.token_to_id(token))

    # ------------------------------------------------------------------------------------- what the template does

    def _find_end_texts(self) -> tuple[str, ...]:
        """The control tokens with which the template ends an answer: a plain one first, then one that calls a tool."""
        answer, question = secrets.token_hex(8), {"role": "user", "content": "x"}
        plain = self._tokens_after(answer, [question, {"role": "assistant", "content": answer}])
        if not plain:
            raise ConfigError(
                "the chat template writes no special token of the tokenizer after an answer; "
                "use a template that ends each answer with one, as '<|im_end|>' in ChatML"
            )
        function: dict[str, Any] = {"name": "f", "arguments": {"x": answer}}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
        try:
            calling = self._tokens_after(
                answer, [question, {"role": "assistant", "content": "", "tool_calls": [call]}], [tool]
            )
        except RequestError:
            calling = []  # the model knows no tools
        return (plain[0],) if not calling or plain[0] in calling else (plain[0], calling[-1])

    def _tokens_after(self, answer: str, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = ()) -> list[str]:
        """The control tokens that follow `answer` in the text, in their order."""
        text = self._template.render(messages, tools, add_generation_prompt=False)
        return re.findall(any_of(self._turn_texts), text.rpartition(answer)[2]) if answer in text else []

    def _find_answer_header(self) -> str:
        """What the template writes before every answer, without the thinking that it opens. It may be nothing."""
        question = [{"role": "user", "content": "x"}]
        before = self._template.render(question, add_generation_prompt=False)
        text, _ = self.split_opened(self._template.render(question))
        return text.removeprefix(before) if text.startswith(before) else ""
