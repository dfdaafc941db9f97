"""A chat as token sequences, with the assistant's tokens in the loss, by the chat template's own rendering.

Each answer is rendered twice: the messages before it, up to the place where the model answers (its prompt, as it will
be served), and the messages up to it. What the second text has after the first, up to the token that ends the answer,
is what the model learns to write::

    prompt       <user> 7 + 8? <assistant>
    with answer  <user> 7 + 8? <assistant> 15 <end>
                                           ───────── in the loss

A chat is one sequence as long as each prompt goes on from the sequence so far. Where the template has changed the
history (most leave out earlier thinking) the prompt begins a sequence of its own. So every answer is learnt once, after
exactly the text that the model will see. Prompt, answer and what follows are tokenised apart, as the gateway does it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from areal_agent.errors import ConfigError, RequestError
from areal_agent.tokens.canonical import split_thinking
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import ImageSpan, JsonObject


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Example:
    """One sequence: its T tokens, which of them are in the loss, and which stand for images."""

    token_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T]
    images: tuple[ImageSpan, ...] = ()

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """The text of one answer."""

    prompt: str
    answer: str
    end: str  # the text of the token that ends it


@dataclass(kw_only=True, slots=True)
class _Growing:
    """A sequence to which answers are added."""

    text: str = ""  # through the end of the newest answer
    end: str = ""  # with which that ends
    answer_ids: list[int] = field(default_factory=list[int])
    token_ids: list[int] = field(default_factory=list[int])
    loss_mask: list[bool] = field(default_factory=list[bool])

    def add(self, token_ids: Sequence[int], *, is_learnt: bool) -> None:
        self.token_ids += token_ids
        self.loss_mask += [is_learnt] * len(token_ids)

    def example(self, renderer: Renderer) -> Example:
        token_ids, images = renderer.shown(array("i", self.token_ids))
        return Example(
            token_ids=np.array(token_ids, dtype=np.int32),
            loss_mask=np.array(self.loss_mask, dtype=np.bool_),
            images=images,
        )


class ChatRenderer:
    """Turns chats into sequences with one model's template and tokenizer.

    Raises ConfigError for a template that does not write where the model answers.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        if renderer.answer_header:
            return
        asked: list[JsonObject] = [{"role": "user", "content": "x"}]
        answered = renderer.write([*asked, {"role": "assistant", "content": "y"}], (), add_generation_prompt=False)
        header = answered.removeprefix(renderer.write(asked, ())).partition("y")[0]
        if header.strip():
            raise ConfigError(
                f"the chat template has no generation prompt: it writes {header!r} before an answer, but not where the "
                "model is to answer; write it there if add_generation_prompt is set"
            )

    def examples(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = ()) -> tuple[Example, ...]:
        """Return the sequences of a chat of normalised messages. An answer of `weight` 0 is context, and not learnt.

        Raises RequestError when the template refuses the chat, or leaves out what an answer says.
        """
        forms = self._renderer.forms([{name: one[name] for name in one if name != "weight"} for one in messages])
        tool_forms = self._renderer.tool_forms(tools)
        found: list[_Growing] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            turn = self._turn(forms[: index + 1], tool_forms, f"messages[{index}]")
            if not found or not turn.prompt.startswith(found[-1].text):
                found.append(_Growing())
            self._grow(found[-1], turn, is_learnt=message.get("weight", 1) != 0)
        return tuple(one.example(self._renderer) for one in found if any(one.loss_mask))

    def _grow(self, growing: _Growing, turn: _Turn, *, is_learnt: bool) -> None:
        renderer = self._renderer
        added, opened = renderer.split_opened(turn.prompt[len(growing.text) :])
        if growing.text:
            growing.add(renderer.ids_after(growing.answer_ids, growing.end + added), is_learnt=False)
        else:
            growing.add(renderer.ids_of(added), is_learnt=False)
        growing.add(renderer.ids_of(opened), is_learnt=False)
        growing.answer_ids = renderer.ids_of(turn.answer) + renderer.ids_of(turn.end)
        growing.add(growing.answer_ids, is_learnt=is_learnt)
        growing.text, growing.end = turn.prompt + turn.answer + turn.end, turn.end

    def _turn(self, forms: Sequence[JsonObject], tools: Sequence[JsonObject], what: str = "an answer") -> _Turn:
        """Return the text of the answer that comes last in `forms`."""
        renderer, form = self._renderer, forms[-1]
        prompt = renderer.write(forms[:-1], tools)
        if not prompt:
            raise RequestError(f"{what} has nothing before it; begin the chat with a question")
        whole = renderer.write(forms, tools, add_generation_prompt=False)
        start = len(prompt) if whole.startswith(prompt) else self._start_of_answer(forms, tools, prompt, whole)
        if start is None:
            raise RequestError(
                f"the chat template does not write {what} where the model answers, after {prompt[-30:]!r}: give every "
                "answer the reasoning_content that this asks for; if it has one, set history_thinking to 'keep'"
            )
        written = renderer.split_at_end(whole[start:])
        end = renderer.end_texts[-1 if form.get("tool_calls") else 0]  # of a template that ends no last answer
        answer = whole[start:] if written is None else written.answer
        _require_said(form, answer, what)
        return _Turn(prompt=prompt, answer=answer, end=end if written is None else written.end)

    def _start_of_answer(
        self, forms: Sequence[JsonObject], tools: Sequence[JsonObject], prompt: str, whole: str
    ) -> int | None:
        """Return where the answer begins in `whole`, if the template changes what is before it as soon as it is there.

        The text up to the answer is what the text with another answer begins with as well, through the same header and
        opened thinking as in the prompt. What follows has to read back as the answer. None if it does not.
        """
        renderer, form = self._renderer, forms[-1]
        history, opened = renderer.split_opened(prompt)
        header = renderer.answer_header
        if not header or not history.endswith(header):
            return None
        another = {"role": "assistant", "content": renderer.probe(0)}
        other = renderer.write([*forms[:-1], another], tools, add_generation_prompt=False)
        pairs = enumerate(zip(whole, other, strict=False))
        num_shared = next((n for n, (ours, theirs) in pairs if ours != theirs), len(whole))
        start = whole.rfind(header, 0, num_shared) + len(header) + len(opened)
        if not whole[:start].endswith(header + opened):
            return None
        written = renderer.split_at_end(whole[start:])
        answer = whole[start:] if written is None else written.answer
        parsed = renderer.answer_format.parse(answer, is_thinking=renderer.thinking.is_open(opened))
        said = (*split_thinking(form), [call["function"]["name"] for call in form.get("tool_calls") or ()])
        read = {"content": parsed.content, "reasoning_content": parsed.reasoning}
        return start if (*split_thinking(read), [call.name for call in parsed.tool_calls]) == said else None


def _require_said(form: JsonObject, answer: str, what: str) -> None:
    """Raise RequestError if the template has left out a part of an answer."""
    reasoning, content = split_thinking(form)
    parts = {"reasoning_content": reasoning, "content": content}
    parts |= {f"tool_calls[{n}]": call["function"]["name"] for n, call in enumerate(form.get("tool_calls") or ())}
    written = answer.replace("\r\n", "\n")  # as in `split_thinking`
    for name, said in parts.items():
        if said and said not in written:
            raise RequestError(
                f"the chat template does not write {what}.{name} ({said[:40]!r}), so it cannot be learnt; leave it "
                "out, or use a template that writes it"
            )
