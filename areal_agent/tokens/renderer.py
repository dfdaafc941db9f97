"""A model's chat template and tokenizer: messages to text, text to token ids, and token ids to text.

`Renderer` keeps three rules of token-in, token-out. What an agent sent comes into the prompt, or is refused
(`arrangement.py`). Special-token text inside a message is encoded as plain text, so that the output of a tool cannot
forge a turn: `Shield` inserts an unguessable text into it, at which rendered text is cut before it is tokenised. And
the text that follows a sampled answer is tokenised on its own, starting with the template's end token.

`Detokenizer` turns ids to text, at once or as they are sampled. A byte-level BPE gives each id its exact bytes, so text
leaves with the token that completes it. Other tokenizers depend on context (SentencePiece drops a leading space); for
them a window of recent ids is decoded again.
"""

import codecs
import logging
import re
import secrets
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, Self, cast

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from areal_agent.errors import ConfigError, RequestError
from areal_agent.tokens.arrangement import Arrangement, CallIds
from areal_agent.tokens.canonical import split_thinking
from areal_agent.tokens.formats.answer_format import HERMES_NEWLINES, AnswerFormat, ToolFormat
from areal_agent.tokens.formats.base import ToolCall
from areal_agent.tokens.formats.detection import ANSWER, PROBE, PROBE_IDS, PROBE_TOOLS, probe_call, thinking_options
from areal_agent.tokens.formats.thinking import TAGS, ReasoningFormat
from areal_agent.tokens.shield import Shield, joined
from areal_agent.tokens.template import MARKERS, ChatTemplate, HistoryThinking, keep_template, tools_template
from areal_agent.tokens.vision import PROBES, Vision, probe_conversations
from areal_agent.tokens.words import WordCache, any_of
from areal_agent.types import ImageSpan, JsonObject, record

logger = logging.getLogger(__name__)

ANSWER_MARKUP = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
"""Tags that an answer may contain. They keep their meaning in system and assistant messages only."""

EXAMPLE = ToolCall(name="NAME", arguments={"ARGUMENT": "VALUE"})
"""The call that shows a model how to call, where its template does not."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are not UTF-8
MAX_TOKEN_BYTES = 1024  # longer than any token of a vocabulary


@record
class Ended:
    """Rendered text from an answer on, split at the token that ends the answer."""

    answer: str
    end: str  # text of the end token
    rest: str


class Renderer:
    r"""Applies a chat template and tokenises. Create it with `load`; safe to use from several threads.

    >>> renderer = Renderer.load(Path("model"))                                     # doctest: +SKIP
    >>> renderer.render([{"role": "user", "content": "hi"}])                        # doctest: +SKIP
    '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'
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
        special = tokenizer.special_tokens_map
        source, self.answer_format, self.arrangement = _fitted(
            tokenizer.chat_template, special, tool_format, reasoning_format
        )
        is_kept = history_thinking is HistoryThinking.KEEP
        self.chat_template = keep_template(source) if is_kept else source
        """The template in use. Export it with a model that is trained on these prompts."""
        self.is_derived = self.chat_template != tokenizer.chat_template
        if is_kept:
            self.arrangement = replace(self.arrangement, template=ChatTemplate(self.chat_template, special))
        self.template = self.arrangement.template
        self.reads_calls = tool_format is not None or self.answer_format.has_calls
        """Whether calls can be read from answers, or somebody has said that none are to be read."""
        self.thinking = self.answer_format.thinking or TAGS[ReasoningFormat.THINK]
        self._opened_thinking = self.thinking.opened()
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._backend.no_truncation()  # training scripts leave these in tokenizer.json; no prompt is cut here
        self._backend.no_padding()
        self._words = WordCache.of(self._backend)
        self.detokenizer = Detokenizer(self._backend)
        self._secret = f"{secrets.randbelow(10**38):038}"  # no message can contain it, and no template changes its case
        texts = _control_texts(tokenizer, source) | (MARKERS if is_kept else frozenset())
        self._turn_texts = texts - ANSWER_MARKUP
        self._shield = Shield(texts, mark=self._secret)
        self._shield_in_answers = Shield(self._turn_texts, mark=self._secret)
        try:
            self.answer_header = self._find_answer_header()
            self.end_texts = self._find_end_texts()
            self._end_pattern = self._find_end_pattern()
            self.joins_answers = self._find_joined_answers()
            self._no_thinking = self._find_no_thinking()  # before text, and before a call
        except RequestError as error:
            raise ConfigError(f"the chat template cannot render a plain question and answer: {error}") from error
        self.end_token_id = self.id_of(self.end_texts[0])
        self.thinking_end_ids: list[int] = self._backend.encode(self.thinking.end, add_special_tokens=False).ids
        self.vocab_size = len(tokenizer)
        self._folder: Path | None = None  # of a model whose images nobody has asked for yet; set by `load`
        self._vision: Vision | None = None
        self._looking = threading.RLock()  # the proof of a vision renders with it
        eos_token_id = cast("int | None", tokenizer.eos_token_id)
        stop_ids = [self.id_of(text) for text in self.end_texts]
        self.stop_token_ids = tuple(dict.fromkeys(stop_ids if eos_token_id is None else [*stop_ids, eos_token_id]))
        self.may_elide = True
        """Whether stand-ins may be rendered for long conversations; false for good after an audit has failed."""
        self.is_mismatch_logged = False

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        history_thinking: HistoryThinking = HistoryThinking.TEMPLATE,
        tool_format: ToolFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
        chat_template: str | None = None,
    ) -> Self:
        """Read tokenizer and template from a model's folder. Raises ConfigError when they are missing or unusable.

        A format that is None is detected from the template. `chat_template` is used in place of the folder's.
        """
        renderer = cls(
            load_tokenizer(path, chat_template),
            history_thinking=history_thinking,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
        )
        renderer._folder = path
        return renderer

    def vision(self) -> Vision | None:
        """Return what the model makes of images; None for one that gets none.

        The first call loads and proves it, which takes seconds and imports torch if the model sees. If the proof fails,
        a log line says why.
        """
        with self._looking:
            folder, self._folder = self._folder, None
            try:
                if folder is not None:
                    self._look(folder)
            except ConfigError as error:
                self._vision = None
                logger.warning("the model in %s gets no images, they are refused: %s", folder, error)
            except BaseException:
                self._folder, self._vision = folder, None  # not proved: the next call tries again
                raise
            return self._vision

    def _look(self, path: Path) -> None:
        """Load what the model does with images, and prove it: our ids are those of the text that its template writes.

        Raises ConfigError if they are not.
        """
        added = {id_: token.content for id_, token in self._backend.get_added_tokens_decoder().items()}
        vision = self._vision = Vision.load(path, self.template, added)
        if vision is None:
            return
        pad = added[vision.pad_id]
        for as_lists, ours in probe_conversations():
            try:
                pieces = self.template.render(self.arrange(as_lists)).split(pad)
                ids, spans = self.shown(array("i", self.ids_of(self.render(ours))))
            except RequestError:
                pieces, ids, spans = [], array("i"), ()
            if len(pieces) != len(PROBES) + 1 and len(as_lists) > 1:
                continue  # a template that takes results as text alone is given them so, with their images
            pads = [pad * vision.num_pads(width, height) for _, width, height in PROBES]
            text = "".join(map("".join, zip(pieces, [*pads, ""], strict=False)))
            if len(pieces) != len(spans) + 1 or ids.tolist() != self._encode(text):
                raise ConfigError(
                    f"the template's text with images has other tokens than ours: {pad.join(pieces)!r:.300}"
                )

    # ------------------------------------------------------------------------------------------ data to text

    def render(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = ()) -> str:
        """Return the text of a conversation up to the place where the model answers.

        Use it for `ids_of` and `ids_after` only: special-token text from messages and tools is broken up in it.
        Raises RequestError when the template refuses the conversation.
        """
        return self.write(self.forms(messages), self.tool_forms(tools))

    def arrange(self, messages: Sequence[JsonObject]) -> list[JsonObject]:
        """Return the messages that the template is given for normalised ones, as `apply_chat_template` takes them."""
        ids, manner = CallIds(self.arrangement), self.arrangement.manner
        inward = [ids.inward(message) for message in messages]
        return self.arrangement([manner.form(one) if one.get("tool_calls") else one for one in inward])

    def write(
        self,
        forms: Sequence[JsonObject],
        tool_forms: Sequence[JsonObject],
        *,
        options: JsonObject | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of forms, arranged as the template wants them. Raises RequestError as `render` does."""
        try:
            return self.template.render(
                self.arrangement(forms), tool_forms, options=options or {}, add_generation_prompt=add_generation_prompt
            )
        except RequestError as error:
            raise self._refusal(forms, tool_forms, options or {}, error) from error

    def _refusal(
        self, forms: Sequence[JsonObject], tool_forms: Sequence[JsonObject], options: JsonObject, error: RequestError
    ) -> RequestError:
        """Name the message with which the template began to refuse a conversation."""
        first, last = 1, len(forms)
        while first < last:
            middle = (first + last) // 2
            try:
                self.template.render(self.arrangement(forms[:middle]), tool_forms, options=options)
                first = middle + 1
            except RequestError:
                last = middle
        return (
            self.arrangement.refusal(forms[first - 1], first - 1, f"refuses it ({error.__cause__})") if forms else error
        )

    def forms(self, messages: Sequence[JsonObject]) -> list[JsonObject]:
        """Return the normalised messages of a conversation as the template receives them."""
        ids = CallIds(self.arrangement)
        return [self.form(message, ids) for message in messages]

    def form(self, message: JsonObject, ids: CallIds | None = None) -> JsonObject:
        """Return a normalised message as the template receives it, with special-token text in it broken up.

        `ids`: those of the calls before it.
        """
        form = self._shielded(ids.inward(message) if ids else message)
        if form.get("reasoning_content") is not None:
            form = {"thinking": form["reasoning_content"], **form}  # as transformers does, for templates that read it
        return self.arrangement.manner.form(form) if form.get("tool_calls") else form

    def form_with_thinking(self, message: JsonObject, thinking: str) -> JsonObject:
        """Return a normalised answer as the template receives it, with this text in the place of its thinking."""
        content = message["content"] if message.get("reasoning_content") else split_thinking(message)[1]
        form = dict(self._shielded({**message, "content": content, "reasoning_content": None}))
        del form["reasoning_content"]
        if self.thinking.is_inline and "reasoning_content" not in self.template.source:
            # No white space after the thinking: some templates would keep it when they leave the thinking out.
            form["content"] = f"{self.thinking.begin}\n{thinking}\n{self.thinking.end}" + form["content"]
        else:
            form |= {"thinking": thinking, "reasoning_content": thinking}
        return self.arrangement.manner.form(form) if form.get("tool_calls") else form

    def _shielded(self, message: JsonObject) -> JsonObject:
        is_trusted = message["role"] in ("system", "assistant")
        form = (self._shield_in_answers if is_trusted else self._shield).over(message)
        return {**form, "content": self._drawn(form["content"])} if isinstance(form["content"], list) else form

    def _drawn(self, parts: Sequence[JsonObject]) -> str:
        """Return shielded content with images as one text, in which marks stand for them."""
        vision = self.vision()
        if vision is None:
            raise RequestError(
                "a message has an image, and this model takes text only: send {'type': 'text', 'text': ...}",
                param="messages",
                code="unsupported_content",
            )

        def drawn(part: JsonObject) -> str:
            if part["type"] == "text":
                return part["text"]
            mark = vision.mark(part["digest"], part["width"], part["height"])
            return f"{vision.before}{self._secret}{mark}{self._secret}{vision.after}"

        return joined(map(drawn, parts))

    def tool_forms(self, tools: Sequence[JsonObject]) -> list[JsonObject]:
        """Return tool definitions as the template receives them."""
        return self._shield_in_answers.over(self.arrangement.tools(tools))

    def options_read(self, options: JsonObject) -> JsonObject:
        """Return those options that the template reads, as it receives them; the others change nothing."""
        read = {name: value for name, value in options.items() if name in self.template.variables}
        return self._shield_in_answers.over(read) if read else read

    def probe(self, number: int) -> str:
        """Return a text that no message can contain; it stands for the thinking of an answer in rendered text."""
        return f"{self._secret[::-1]}{number:08x}"

    def split_opened(self, text: str) -> tuple[str, str]:
        """Split off the thinking that the template opens at the end. Return the text before it, and it."""
        start = text.rfind(self.thinking.begin)
        opened = self._opened_thinking.match(text, start) if start >= 0 else None
        return (text[: opened.start()], opened[0]) if opened else (text, "")

    def opened_before(self, opening: str, opened: str) -> str:
        """Return the thinking before an answer that must begin with `opening`, where the template has `opened` some.

        It is none, in the form in which the template writes an answer without thinking.
        """
        if not opening or not self.thinking.is_open(opened):
            return opened
        is_call = self.answer_format.has_calls and opening.startswith(self.answer_format.opening(None))
        return self._no_thinking[is_call]

    def split_at_end(self, text: str) -> Ended | None:
        """Split rendered text that begins with an answer at the answer's end token; None if there is none."""
        end = self._end_pattern.search(text)
        return Ended(answer=text[: end.start()], end=end[0], rest=text[end.end() :]) if end else None

    def without_shields(self, text: str) -> str:
        """Return rendered text as people read it."""
        return text.replace(self._secret, "")

    def after(self, text: str, beginning: str) -> str | None:
        """Return what follows `beginning`, the text of ids, in rendered text that begins with it; None if it does not.

        White space does not count where a tokenizer changes it.
        """
        if not self.detokenizer.is_byte_level:
            beginning, text = ("".join(one.split()) for one in (beginning, text))
        for piece in text.split(self._secret):
            if len(beginning) <= len(piece):
                break
            if not beginning.startswith(piece):
                return None
            beginning, text = beginning[len(piece) :], text[len(piece) + len(self._secret) :]
        return text[len(beginning) :] if text.startswith(beginning) else None

    # ------------------------------------------------------------------------------------------ text to ids

    def ids_of(self, text: str) -> list[int]:
        """Return the token ids of rendered text."""
        if self._secret not in text:
            return self._encode(text) if text else []
        return [token_id for piece in text.split(self._secret) if piece for token_id in self._ids_of_piece(piece)]

    def _ids_of_piece(self, piece: str) -> list[int]:
        ids = self._vision.ids_of(piece) if self._vision else None  # a mark is of a vision that is loaded
        return self._encode(piece) if ids is None else ids

    def shown(self, token_ids: "array[int]") -> "tuple[array[int], tuple[ImageSpan, ...]]":
        """Return the ids of a prompt as the model has them, and where its images stand."""
        return self._vision.shown(token_ids) if self._vision else (token_ids, ())

    def text_of_part(self, token_ids: Sequence[int]) -> str:
        """Return the text of a part of a prompt's ids, with the marks of its images."""
        if self._vision is None:
            return self.detokenizer.text_of(token_ids)
        pieces = self._vision.pieces(token_ids)
        return "".join(one if isinstance(one, str) else self.detokenizer.text_of(one) for one in pieces)

    def ids_after(self, sampled_ids: Sequence[int], text: str) -> list[int]:
        """Return the token ids of the rendered text that follows a sampled answer.

        The text begins with one of the template's end tokens. An answer that sampled this token does not get it again;
        one that was cut off (by its length, or by another end token) still needs it.
        """
        ids = self.ids_of(text)
        if not ids or not (ids[0] in self.stop_token_ids or self._end_pattern.match(text)):
            raise RequestError(
                f"the chat template ended an answer with {text[:20]!r} instead of {self.end_texts[0]!r}",
                param="messages",
            )
        return ids[1:] if len(sampled_ids) and sampled_ids[-1] == ids[0] else ids

    def ids_of_prompt(self, text: str) -> list[int]:
        """Return the token ids of a plain prompt: special tokens keep their meaning, and a first one is added."""
        first = self.template.special_tokens.get("bos_token")
        return self._backend.encode(text, add_special_tokens=not (first and text.startswith(first))).ids

    def text_of(self, token_ids: Sequence[int], *, has_ended: bool) -> str:
        """Return the text of a sampled answer. If it `has_ended` by itself, its last token is its end, not its text."""
        return self.detokenizer.text_of(token_ids[:-1] if has_ended else token_ids)

    def _encode(self, text: str) -> list[int]:
        token_ids = self._words.ids_of(text) if self._words else None
        if token_ids is None:
            # Without offsets, which cost time.
            token_ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return token_ids

    def id_of(self, token: str) -> int:
        return cast("int", self._backend.token_to_id(token))

    # ------------------------------------------------------------------------------------- what the template does

    def _find_end_texts(self) -> tuple[str, ...]:
        """Return the control tokens that end an answer: first a plain answer, then one that calls a tool."""
        plain = self._tokens_after_answer(is_last=True) or self._tokens_after_answer(is_last=False)
        if not plain:
            raise ConfigError(
                "the chat template writes no special token of the tokenizer after an answer; "
                "use a template that ends each answer with one, as '<|im_end|>' in ChatML"
            )
        calling = self._token_after_call(plain[0])
        return (plain[0],) if calling == plain[0] else (plain[0], calling)

    def _find_end_pattern(self) -> re.Pattern[str]:
        """Return a pattern for what ends an answer in rendered text: an end token, or any that no answer has.

        An answer that is not the last may end with another token (Harmony's), which also stands within answers.
        """
        written = self.answer_format.format("x", (PROBE,) if self.answer_format.has_calls else ())
        written += self.thinking.write("x", "x")
        ends = any_of({*self.end_texts, *(text for text in self._turn_texts if text not in written)})
        inside = self._tokens_after_answer(is_last=False)[:1]
        if not inside or inside[0] in self.end_texts or not self.answer_header:
            return re.compile(ends)
        return re.compile(f"{ends}|{re.escape(inside[0])}(?!{re.escape(self.answer_header)})")

    def _find_joined_answers(self) -> bool:
        """Return whether two answers in a row, or two calls, may look like one: no end of an answer is between them."""
        answers: list[tuple[JsonObject, str]] = [({"role": "assistant", "content": ANSWER}, ANSWER)]
        if self.answer_format.has_calls:
            answers.append((probe_call(PROBE_IDS[0]), str(PROBE.arguments["word"])))
        for answer, word in answers:
            try:
                text = self.write(self.forms([{"role": "user", "content": "x"}, answer, answer]), ())
            except RequestError:
                continue  # such a conversation will be refused
            pieces = text.split(word)
            if len(pieces) > 2 and not self._end_pattern.search(pieces[1]):
                return True
        return False

    def _find_no_thinking(self) -> tuple[str, str]:
        """Return what the template writes instead of thinking where that is turned off, or else where there is none."""
        question, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": ANSWER}
        before = self.template.render([question], add_generation_prompt=False) + self.answer_header
        off = self.template.render([question], options=thinking_options(False))
        said = self.template.render([question, answer], add_generation_prompt=False).partition(ANSWER)[0]
        called = said
        if self.answer_format.has_calls:
            forms = self.forms([question, probe_call(PROBE_IDS[0])])
            call = self.write(forms, (), add_generation_prompt=False)
            called = call[: call.rfind(self.answer_format.opening(None).lstrip())]

        def first_without(*texts: str) -> str:
            found = (text[len(before) :] for text in texts if text.startswith(before))
            return next((text for text in found if not self.thinking.is_open(text)), self.thinking.write("", ""))

        return first_without(off, said), first_without(off, called)

    def _tokens_after_answer(self, *, is_last: bool) -> list[str]:
        answer, question = secrets.token_hex(8), {"role": "user", "content": "x"}
        messages: list[JsonObject] = [question, {"role": "assistant", "content": answer}]
        return self._tokens_after(answer, messages if is_last else [*messages, question])

    def _token_after_call(self, plain: str) -> str:
        """Return the control token that ends an answer with a call; `plain`, which ends others, if no other does."""
        written = self.answer_format.format("", (PROBE,)) if self.answer_format.has_calls else ""
        question, word = {"role": "user", "content": "x"}, str(PROBE.arguments["word"])
        for id_ in PROBE_IDS:
            called = [question, self.arrangement.manner.form(probe_call(id_))]
            result = {"role": "tool", "content": "x", "tool_call_id": id_}
            for messages in (called, [*called, result]):
                try:
                    tokens = self._tokens_after(word, messages, PROBE_TOOLS)
                except RequestError:
                    continue
                outside = [token for token in tokens if token not in written]
                if outside:
                    return plain if plain in outside else outside[0] if written else outside[-1]
        return plain

    def _tokens_after(self, answer: str, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = ()) -> list[str]:
        """Return the control tokens that follow `answer` in the text, in order."""
        text = self.template.render(messages, tools, add_generation_prompt=False)
        return re.findall(any_of(self._turn_texts), text.rpartition(answer)[2]) if answer in text else []

    def _find_answer_header(self) -> str:
        """Return what the template writes before every answer, without the thinking that it opens. It may be empty."""
        question = [{"role": "user", "content": "x"}]
        before = self.template.render(question, add_generation_prompt=False)
        text, _ = self.split_opened(self.template.render(question))
        return text.removeprefix(before) if text.startswith(before) else ""


def _fitted(
    source: str,
    special_tokens: Mapping[str, str],
    tool_format: ToolFormat | None,
    reasoning_format: ReasoningFormat | None,
) -> tuple[str, AnswerFormat, Arrangement]:
    """Return a template that writes what its model can do with tools, how the model answers, and the arrangement.

    It is the model's own, unless that leaves out the definitions of tools, or their calls in a format that was named.
    """
    template = ChatTemplate(source, special_tokens)
    answer_format, manner = AnswerFormat.detect(template, tool_format=tool_format, reasoning_format=reasoning_format)
    arrangement = Arrangement.of(template, manner, has_calls=answer_format.has_calls)
    derived, reads_tools = source, "tools" in template.variables  # one that reads them knows why it does not write them
    if answer_format.has_calls:
        derived = tools_template(
            source,
            example=None if reads_tools or arrangement.has_definitions else answer_format.format("", (EXAMPLE,)),
            newline=None if arrangement.has_calls else HERMES_NEWLINES.get(answer_format.tool_format),
            has_results=arrangement.has_results,
            has_system=arrangement.has_system,
        )
    return (
        (source, answer_format, arrangement)
        if derived == source
        else _fitted(derived, special_tokens, tool_format, reasoning_format)
    )


def load_tokenizer(path: Path, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Read the tokenizer of a model's folder, perhaps with another template. Raises ConfigError when it is unusable."""
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(f"{path} has no tokenizer.json; name a folder with a Hugging Face tokenizer")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    except Exception as error:  # transformers raises almost anything on a damaged file
        raise ConfigError(f"the tokenizer in {path} cannot be loaded: {type(error).__name__}: {error}") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def exported_template(
    path: Path, history_thinking: HistoryThinking, tool_format: ToolFormat | None = None, given: str | None = None
) -> str | None:
    """Return the chat template to export with a model that starts from `path`, or None for the model's own.

    `given` is used in place of the model's own.
    """
    tokenizer = load_tokenizer(path, given)
    if tokenizer.chat_template is None:  # nothing is rendered with it: the agents are elsewhere
        return None
    renderer = Renderer(tokenizer, history_thinking=history_thinking, tool_format=tool_format)
    return renderer.chat_template if renderer.is_derived or given is not None else None


def _control_texts(tokenizer: PreTrainedTokenizerFast, template: str) -> frozenset[str]:
    """Return the texts of special tokens, and of other added tokens that the template or the markup of answers uses.

    Added tokens that are runs of white space have no meaning, and one of a single character cannot be broken up.
    """
    return frozenset(
        text
        for token in tokenizer.added_tokens_decoder.values()
        if len(text := token.content.strip()) > 1 and (token.special or text in template or text in ANSWER_MARKUP)
    )


class TextStream(Protocol):
    """The text of ids that come one by one; all pieces together are the text of all ids."""

    def feed(self, token_id: int) -> str:
        """Return the text that this id makes certain; the beginning of a character is held back."""
        ...

    def finish(self) -> str:
        """Return the text that was held back, after the last id."""
        ...


class Detokenizer:
    """Turns the ids of one tokenizer into text. Safe to use from several threads.

    >>> Detokenizer(Tokenizer.from_file("tokenizer.json")).text_of([5, 6])          # doctest: +SKIP
    'hello'
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self.is_byte_level = isinstance(backend.decoder, ByteLevel)
        self._bytes = _BytesOf(self)
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included. Bytes that are not UTF-8 come out as REPLACEMENT."""
        if not self.is_byte_level:
            return self._backend.decode(list(token_ids), skip_special_tokens=False)
        return b"".join(map(self._bytes.__getitem__, token_ids)).decode(errors="replace")

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of one id: exact for a byte-level BPE, otherwise those of its text alone."""
        if not self.is_byte_level:
            return self.text_of([token_id]).encode()
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else _bytes_of_token(token)

    def num_tokens_through(self, mark: str, token_ids: Sequence[int]) -> int:
        """Return the number of ids up to the end of `mark` in their text, or of all ids if it does not occur."""
        mark_id = self._backend.token_to_id(mark)
        if mark_id is not None and mark_id in token_ids:
            return token_ids.index(mark_id) + 1
        told = bytearray()
        for num_tokens, token_id in enumerate(token_ids, start=1):
            told += self.bytes_of(token_id)
            if mark.encode() in told[-len(mark) - MAX_TOKEN_BYTES :]:
                return num_tokens
        return len(token_ids)

    def stream(self) -> TextStream:
        """Begin a stream of text for one answer."""
        return _ByteStream(self) if self.is_byte_level else _WindowStream(self)


class _BytesOf(dict[int, bytes]):
    """The bytes of each id that was asked for."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = self._detokenizer.bytes_of(token_id)
        return self[token_id]


class _ByteStream:
    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        return self._decoder.decode(self._detokenizer.bytes_of(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Decodes recent ids together with their predecessors, so that the context is that of the whole text."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._shown_ids: list[int] = []  # their text has left; they are the context of the pending ids
        self._pending_ids: list[int] = []

    def feed(self, token_id: int) -> str:
        self._pending_ids.append(token_id)
        text = self._pending_text()
        return "" if not text or text.endswith(REPLACEMENT) else self._show(text)

    def finish(self) -> str:
        return self._show(self._pending_text())

    def _pending_text(self) -> str:
        context = self._detokenizer.text_of(self._shown_ids)
        return self._detokenizer.text_of(self._shown_ids + self._pending_ids)[len(context) :]

    def _show(self, text: str) -> str:
        self._shown_ids, self._pending_ids = self._pending_ids or self._shown_ids, []
        return text


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary; a printable byte is its own character."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _bytes_of_token(token: str) -> bytes:
    """Return the bytes of a token. An added token with a character outside the alphabet stands for its own text."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode()
