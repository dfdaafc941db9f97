"""Plays a conversation on a template as the gateway does, and compares its tokens with what transformers renders.

::

    steps ─▶ request ─▶ Conversation.place ─▶ ids of the prompt ── injected │ sampled │ injected ──┐
               │                                                                                   ├─ equal?
               └─▶ apply_chat_template(messages) ───────────────── before   │  gap    │ after ─────┘

What was sampled stands in the text for the answer that the template writes from the echo: both must read the same. All
else must be the template's own text, to the letter.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count
from typing import Any, cast

import orjson

from areal_agent.conformance.shapes import Play
from areal_agent.conformance.templates import Subject
from areal_agent.errors import RequestError
from areal_agent.gateway.answers import Choice
from areal_agent.gateway.conversation import Conversation, ToolChoice, ToolUse, read_message, read_tools
from areal_agent.gateway.draft import Draft
from areal_agent.tokens.forest import Forest
from areal_agent.tokens.formats.base import ToolCall, answer_message
from areal_agent.tokens.prompt import Answer, Prompt
from areal_agent.types import Completion, Distribution, FinishReason, GenerateResult, JsonObject, TokenChunk

UNSAID = "Nothing."
"""Stands for empty thinking, which templates may leave out where they write any other."""

MARK = re.compile(r"Mark\d+x")


class Verdict(StrEnum):
    """What became of a conversation, from good to bad."""

    EXACT = "exact"  # the text is what transformers renders of the messages
    PLACED = "placed elsewhere"  # all of it is there, in order; the text is that of the messages as they were arranged
    REFUSED = "refused"  # with the place of what cannot be written
    UNNAMED = "REFUSED WITHOUT A PLACE"
    LOST = "LOST"
    FORGED = "FORGED"  # text of a message has become a control token
    DIFFERS = "DIFFERS"
    RAISED = "RAISED"

    @property
    def is_fault(self) -> bool:
        return self.value.isupper()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A verdict and its reasons."""

    verdict: Verdict
    text: str = ""


class _Ended(Exception):
    """The play is over."""

    def __init__(self, verdict: Verdict, text: str) -> None:
        super().__init__(text)
        self.finding = Finding(verdict=verdict, text=text)


def played(subject: Subject, play: Play) -> Finding:
    """Play a conversation and return the worst that was found."""
    player = _Player(subject, play)
    try:
        player.play()
    except _Ended as ended:
        return ended.finding
    except Exception as error:  # whatever the code under test raises is a finding
        return Finding(verdict=Verdict.RAISED, text=f"{type(error).__name__}: {error}")
    return Finding(verdict=player.worst)


class _Player:
    def __init__(self, subject: Subject, play: Play) -> None:
        self.worst = Verdict.EXACT
        self._subject = subject
        self._renderer = subject.renderer
        self._play = play
        self._tools = play.tools
        self._forest = Forest(subject.renderer)
        self._talk: list[JsonObject] = []
        self._is_echo: list[bool] = []  # of each message of the talk: whether the model wrote it
        self._ids: dict[str, str | None] = {}  # by the id of a call in the play: its id here; None if it was not made
        self._answers: dict[str, JsonObject] = {}  # by completion id, as they were sampled
        self._marks = count(100)
        self._forgets = False

    def play(self) -> None:
        for step in self._play.steps:
            self._step(step)
        self._ask(is_last=True)

    # ------------------------------------------------------------------------------------------------- steps

    def _step(self, step: JsonObject) -> None:
        match step["role"]:
            case "back":
                del self._talk[max(1, len(self._talk) - step["by"]) :]
                del self._is_echo[len(self._talk) :]
            case "forget thinking":
                self._forgets = True
                for index, message in enumerate(self._talk):
                    self._talk[index] = {key: message[key] for key in message if key != "reasoning_content"}
            case "tools":
                self._tools = step["tools"]
            case "again":
                self._ask()
            case "assistant" if "sampled" in step:
                self._answer(self._filled(step))
            case "tool":
                id_ = self._ids.get(step["tool_call_id"], step["tool_call_id"])
                if id_ is not None:
                    self._say({**self._filled(step), "tool_call_id": id_})
            case _:
                self._say(self._filled(step))

    def _say(self, message: JsonObject, *, is_echo: bool = False) -> None:
        self._talk.append(message)
        self._is_echo.append(is_echo)

    def _filled(self, value: Any) -> Any:
        if isinstance(value, str):
            value = re.sub("MARK", lambda _: f"Mark{next(self._marks)}x", value)
            return value.replace("CONTROL", " ".join(self._subject.control_texts))
        if isinstance(value, Mapping):
            return {key: self._filled(item) for key, item in cast("JsonObject", value).items()}
        return [self._filled(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value

    def _answer(self, said: JsonObject) -> None:
        """Sample an answer that says this, record it, and send it back."""
        prompt, conversation = self._ask()
        habits = said["sampled"]
        replies, echoes = [], []
        for index in range(2 if "twice" in habits else 1):
            more = {"content": f"{said['content']} again"} if index else {}
            choice = self._sampled({**said, **more}, prompt, conversation, f"c-{len(self._answers)}")
            self._answers[choice.completion.id] = choice.message
            replies.append(choice.reply(choice.completion.token_ids))
            echoes.append(answer_message(choice.parsed, choice.parsed.content, choice.completion.id))
        self._forest.record(prompt, replies)
        echo = dict(echoes[-1 if "second" in habits else 0])
        if self._forgets:
            echo.pop("reasoning_content", None)
        made = [call["id"] for call in echo.get("tool_calls", ())]
        for index, call in enumerate(said.get("tool_calls", ())):
            self._ids[call["id"]] = made[index] if index < len(made) else None
        self._say(echo, is_echo=True)

    def _sampled(self, said: JsonObject, prompt: Prompt, conversation: Conversation, id_: str) -> Choice:
        renderer, habits = self._renderer, said["sampled"]
        end = renderer.stop_token_ids[-1] if "other end" in habits else renderer.end_token_id
        text, has_calls = self._written(said, prompt, conversation)
        if has_calls and "other end" not in habits:
            end = renderer.stop_token_ids[len(renderer.end_texts) - 1]
        ids = renderer.ids_of(text)
        ids = ids[: len(ids) * 2 // 3] if "cut" in habits else [*ids, end]
        draft = Draft(
            detokenizer=renderer.detokenizer,
            reader=conversation.reading(renderer, prompt).reader(),
            stop_token_ids=renderer.stop_token_ids,
            is_single_call=conversation.is_single_call(True),
        )
        reason = FinishReason.LENGTH if "cut" in habits else FinishReason.STOP
        result = GenerateResult(
            token_ids=tuple(ids), logprobs=(0.0,) * len(ids), versions=(), finish_reason=reason
        )
        draft.feed(TokenChunk(token_ids=result.token_ids, logprobs=result.logprobs))
        _, parsed = draft.finish(result)
        kept = draft.kept(result)
        completion = Completion(
            id=id_,
            token_ids=kept.token_ids,
            logprobs=kept.logprobs,
            versions=(),
            finish_reason=kept.finish_reason,
            distribution=Distribution.EXACT,
        )
        return Choice(index=0, completion=completion, text=draft.text, parsed=parsed, stop_text=draft.stop_text)

    def _written(self, said: JsonObject, prompt: Prompt, conversation: Conversation) -> tuple[str, bool]:
        """Return how the model writes an answer after what the prompt has opened, and whether it has calls."""
        answer_format, habits = self._renderer.answer_format, said["sampled"]
        calls = [
            ToolCall(name=call["function"]["name"], arguments=orjson.loads(call["function"]["arguments"]))
            for call in said.get("tool_calls", ())
        ]
        if not (conversation.may_call_tools and answer_format.has_calls):
            calls = []
        thinking, reasoning = answer_format.thinking, said.get("reasoning_content")
        content = f" \n{said['content']}\n " if "padded" in habits else said["content"]
        if thinking is None:
            reasoning = None
        elif prompt.is_thinking:
            reasoning = reasoning or ""
        elif thinking.end in prompt.opened:
            reasoning = None
        text = answer_format.format(content, calls, reasoning=reasoning)
        if prompt.is_thinking and thinking:
            text = text.removeprefix(thinking.begin)
            text = text.removeprefix("\n") if prompt.opened.endswith("\n") else text
        tight = re.sub(r'": (?=[\["{0-9tfn])', '":', text) if "tight" in habits else text
        return (tight if self._calls_in(tight) == self._calls_in(text) else text), bool(calls)

    def _calls_in(self, text: str) -> tuple[ToolCall, ...]:
        return self._renderer.answer_format.parse(text, tools=self._tools).tool_calls

    # --------------------------------------------------------------------------------------------- requests

    def _ask(self, *, is_last: bool = False) -> tuple[Prompt, Conversation]:
        """Place the conversation as it is, and compare its prompt with the template's text."""
        forced = self._play.forced if is_last else None
        try:
            conversation = Conversation(
                messages=list(self._talk),
                tools=read_tools(list(self._tools)),
                choice=ToolChoice(use=ToolUse.REQUIRED, only=forced) if forced else ToolChoice(),
                continues_last=is_last and self._play.continues_last,
            )
            prompt = conversation.place(self._forest, self._renderer)
        except RequestError as error:
            raise _Ended(self._judged(error), f"{error} (param {error.param})") from None
        self._check(prompt, conversation)
        return prompt, conversation

    def _judged(self, error: RequestError) -> Verdict:
        """Return whether a refusal names a place that the agent can change."""
        place = re.search(r"\bmessages\[(\d+)\]", f"{error.param} {error}")
        if place:
            return Verdict.UNNAMED if self._is_echo[int(place[1])] else Verdict.REFUSED
        return Verdict.REFUSED if re.match(r"tools|tool_choice", error.param or "") else Verdict.UNNAMED

    def _check(self, prompt: Prompt, conversation: Conversation) -> None:
        said = [read_message(message, index) for index, message in enumerate(self._talk)]
        given = said.pop() if conversation.continues_last else None
        spans = _Spans(self._subject, prompt, self._tools)
        told = list[str]()
        for verdict, messages in self._forms(said, prompt):
            expected = self._subject.rendered(messages, self._tools)
            if prompt.opening:
                difference = self._opening_difference(spans, messages, expected, prompt, given)
            else:
                difference = spans.difference(expected)
            if difference is None and expected is not None:
                self._require_all(said, spans.text, expected, verdict)
                if verdict is Verdict.PLACED:
                    self.worst = verdict
                self._require_safe(prompt, said)
                return
            told.append(difference or "")
        lost = [mark for mark in _marks([said, self._tools]) if mark not in spans.text]
        if lost:
            raise _Ended(Verdict.LOST, f"{', '.join(lost)}: sent {_brief(said)}, prompt {spans.text!r}")
        raise _Ended(Verdict.DIFFERS, told[0])

    def _forms(self, said: Sequence[JsonObject], prompt: Prompt) -> Iterator[tuple[Verdict, list[JsonObject]]]:
        """Yield the messages as a template gets them, in every way that is right, and what it means."""
        answers = {answer.prompt.num_messages: answer for answer in prompt.parent.lineage()} if prompt.parent else {}
        as_sent, manner = list[JsonObject](), self._subject.manner
        for index, message in enumerate(said):
            if index in answers:  # its thinking, and the text beside its calls, may have been left out
                sampled = self._answers[answers[index].completion_id]
                message = {**message, **{key: value for key, value in sampled.items() if value or key == "reasoning_content"}}
            if message.get("tool_calls"):
                message = (manner if index in answers else replace(manner, is_single_text=False)).form(message)
            as_sent.append(message)
        arrange = getattr(self._renderer, "arrange", None)
        arranged = list(arrange(as_sent)) if arrange else as_sent
        for verdict, messages in ((Verdict.EXACT, as_sent), (Verdict.PLACED, arranged)):
            if verdict is Verdict.PLACED and arranged == as_sent:
                continue
            yield verdict, messages
            if any(message.get("reasoning_content") is not None for message in messages):
                yield verdict, [{**one, "reasoning_content": UNSAID} if one.get("reasoning_content") == "" else one for one in messages]
                if self._renderer.thinking.is_inline:
                    yield verdict, [self._with_inline_thinking(message) for message in messages]

    def _with_inline_thinking(self, message: JsonObject) -> JsonObject:
        """Return an answer as templates get it that know thinking as a part of the content."""
        if message.get("reasoning_content") is None:
            return message
        thinking = self._renderer.thinking
        content = f"{thinking.begin}\n{message['reasoning_content'] or UNSAID}\n{thinking.end}{message['content'] or ''}"
        return {key: value for key, value in message.items() if key != "reasoning_content"} | {"content": content}

    def _opening_difference(
        self,
        spans: "_Spans",
        messages: Sequence[JsonObject],
        expected: str | None,
        prompt: Prompt,
        given: JsonObject | None,
    ) -> str | None:
        """Compare a prompt that begins the answer: the template must begin such an answer in the same way."""
        if given is None:
            function = {"name": self._play.forced, "arguments": {next(iter(_properties(self._tools[0]))): "x"}}
            call = {"id": "call99999", "type": "function", "function": function}
            answer = self._subject.manner.form({"role": "assistant", "content": "", "tool_calls": [call]})
            begun = self._renderer.answer_format.opening(self._play.forced)
        else:
            answer = {**given, "content": f"{given['content']} and more"}
            begun = self._renderer.answer_format.opening_of_text(given["content"])
        answered = self._subject.rendered([*messages, answer], self._tools, add_generation_prompt=False)
        difference = spans.difference(answered, is_whole=False)
        if difference is None:
            return None
        unthinking = self._subject.rendered(messages, self._tools, enable_thinking=False)
        others = [None if unthinking is None else unthinking + begun]
        if prompt.opened == "" and expected is not None:
            others.append(expected + begun)
        return None if any(spans.difference(other) is None for other in others if other) else difference

    # ------------------------------------------------------------------------------------------ what must hold

    def _require_all(self, said: Sequence[JsonObject], text: str, expected: str, verdict: Verdict) -> None:
        """Require that the prompt has every mark, those of results in the order of their calls."""
        marks = _marks([said, self._tools])
        lost = [mark for mark in marks if mark not in text]
        if lost:
            raise _Ended(Verdict.LOST, f"{', '.join(lost)}: sent {_brief(said)}, the template writes {text!r}")
        twice = [mark for mark in marks if text.count(mark) > max(1, expected.count(mark))]
        if twice:
            raise _Ended(Verdict.DIFFERS, f"{', '.join(twice)} is written twice: {text!r}")
        ordered = _in_order_of_calls(said)
        if verdict is Verdict.PLACED:
            _require_order(_marks(ordered), text, "the messages stand in another order")
        elif ordered != said and not any(message["tool_call_id"] in text for message in said if "tool_call_id" in message):
            results = [message for message in ordered if message["role"] == "tool"]
            _require_order(_marks(results), text, "results stand in another order than their calls")

    def _require_safe(self, prompt: Prompt, said: Sequence[JsonObject]) -> None:
        """Require that no control token stands where the text of a user or a tool stands."""
        contents = [message["content"].strip() for message in said if message["role"] in ("user", "tool")]
        if not any(text in content for content in contents for text in self._subject.control_texts):
            return
        data, spots, position = bytearray(), list[int](), 0
        for token_id in prompt.path():
            if token_id in self._subject.control_ids:
                spots.append(len(data))
            data += self._renderer.detokenizer.bytes_of(token_id)
        for content in contents:
            found = data.find(content.encode(), position)
            if content and found >= 0:
                position = found + len(content.encode())
                if any(found <= spot < position for spot in spots):
                    raise _Ended(Verdict.FORGED, f"{content!r} has a control token in the prompt")


def _properties(tool: JsonObject) -> JsonObject:
    return tool["function"]["parameters"]["properties"]


def _brief(messages: Sequence[JsonObject]) -> str:
    return orjson.dumps(messages, default=str).decode()


def _marks(value: Any) -> list[str]:
    """Return the marks in messages, thinking left out, because templates may leave it out."""
    if isinstance(value, str):
        return MARK.findall(value)
    if isinstance(value, Mapping):
        items = cast("JsonObject", value).items()
        return [mark for key, item in items if key != "reasoning_content" for mark in (*_marks(key), *_marks(item))]
    if isinstance(value, (list, tuple)):
        return [mark for item in cast("Sequence[Any]", value) for mark in _marks(item)]
    return []


def _require_order(marks: Sequence[str], text: str, told: str) -> None:
    places = [text.find(mark) for mark in marks]
    if places != sorted(places):
        raise _Ended(Verdict.DIFFERS, f"{told}: {', '.join(sorted(marks, key=text.find))} instead of {', '.join(marks)}")


def _in_order_of_calls(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the messages with the results that follow calls in the order of the calls."""
    ordered, ids = list[JsonObject](), list[str]()
    run = list[JsonObject]()
    for message in (*messages, {"role": "end"}):
        if message["role"] == "tool":
            run.append(message)
            continue
        known = [one for one in run if one.get("tool_call_id") in ids]
        ordered += sorted(known, key=lambda one: ids.index(one["tool_call_id"])) if len(known) == len(run) else run
        run = []
        ids = [call["id"] for call in message.get("tool_calls", ())]
        ordered.append(message)
    return ordered[:-1]


class _Spans:
    """The text of a prompt, cut where sampled answers stand in it."""

    def __init__(self, subject: Subject, prompt: Prompt, tools: Sequence[JsonObject]) -> None:
        self._subject = subject
        self._tools = tools
        text_of = subject.renderer.detokenizer.text_of
        pieces: list[tuple[Sequence[int], Answer | None, list[Answer]]] = []  # ids, whose they are, answers within
        for one in prompt.lineage():
            if one.parent:
                pieces.append((one.parent.block, one.parent, []))
            length, cut = 0, list[Answer]()
            for index, (ids, answer, within) in enumerate(pieces):
                length += len(ids)
                if length > one.fork_at:
                    cut = [answer for _, answer, _ in pieces[index:] if answer] if answer else []
                    cut = [a for _, answer, within in pieces[index:] for a in ([answer] if answer else within)]
                    if one.fork_at > length - len(ids):
                        raise _Ended(Verdict.DIFFERS, "a fork is in the middle of a span")
                    del pieces[index:]
                    break
            is_last = one is prompt
            ids = one.new_ids if is_last else one.new_ids[: len(one.new_ids) - one.num_opened]
            pieces.append((ids, None, cut))
        self.text = text_of(prompt.path())
        self._injected, self._sampled = [""], list[str]()
        for ids, answer, within in pieces:
            text = text_of(ids)
            if answer:
                self._sampled.append(text)
                self._injected.append("")
                continue
            for one in within:
                said = self._said_after_thinking(one)
                before, found, after = text.partition(said) if said else (text, "", "")
                if found:
                    self._injected[-1] += before
                    self._sampled.append(said)
                    self._injected.append("")
                    text = after
            self._injected[-1] += text

    def _said_after_thinking(self, answer: Answer) -> str:
        thinking = self._subject.renderer.thinking
        text = self._without_end(self._subject.renderer.detokenizer.text_of(answer.block))
        if thinking.end in text:
            return text.rpartition(thinking.end)[2].strip()
        return "" if answer.has_thinking or answer.prompt.is_thinking else text.strip()

    def _without_end(self, text: str) -> str:
        ends = {*self._subject.renderer.end_texts, self._subject.tokenizer.eos_token}
        for end in ends:
            text = text.strip().removesuffix(cast("str", end))
        return text

    def difference(self, expected: str | None, *, is_whole: bool = True) -> str | None:
        """Return the first difference from what the template writes, or None. If not `is_whole`, more may follow."""
        if expected is None:
            return "the template refuses the messages"
        first, *others = self._injected
        if not expected.startswith(first):
            return _parting(first, expected)
        position = len(first)
        for number, (sampled, following) in enumerate(zip(self._sampled, others, strict=True), 1):
            is_end = is_whole and number == len(others)
            found = position - 1
            while (found := self._next(expected, following, found + 1, is_end=is_end)) >= 0:
                if self._reads_the_same(sampled, expected[position:found]):
                    break
                if is_end:
                    found = -1
                    break
            if found < 0:
                return f"after the answer {sampled!r}: {following[:160]!r}, the template: {expected[position:][:200]!r}"
            position = found + len(following)
        if is_whole and position != len(expected):
            return _parting(self.text, expected)
        return None

    def _next(self, text: str, part: str, start: int, *, is_end: bool) -> int:
        if not is_end:
            return text.find(part, start)
        return len(text) - len(part) if text.endswith(part) and len(text) - len(part) >= start else -1

    def _reads_the_same(self, sampled: str, written: str) -> bool:
        """Return whether an answer that was sampled and the template's text of it are the same answer."""
        one, other = self._without_end(sampled), self._without_end(written)
        if "".join(one.split()) == "".join(other.split()):
            return True
        parse = self._subject.renderer.answer_format.parse
        a, b = parse(one, tools=self._tools), parse(other, tools=self._tools)
        return (
            a.tool_calls == b.tool_calls
            and (a.content.strip() == b.content.strip() or (a.tool_calls and not b.content))
            and (a.reasoning or "") == (b.reasoning or "").replace(UNSAID, "")
            and (a.reasoning is None or b.reasoning is not None)
        )


def _parting(got: str, expected: str) -> str:
    at = next((at for at, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), min(len(got), len(expected)))
    return f"after {expected[:at][-60:]!r}: {got[at:][:120]!r}, the template: {expected[at:][:120]!r}"
