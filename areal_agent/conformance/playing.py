"""Plays a conversation on a template as the gateway does, without a server, and judges every prompt.

::

    step ─▶ request ─▶ Conversation.place ─▶ prompt ─▶ a scripted answer, in the model's own format ─▶ its echo
                 │                             │
                 └─▶ apply_chat_template ──────┴─▶ exact, placed elsewhere, refused, or a fault
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Any, cast

import orjson

from areal_agent.conformance.comparing import UNSAID, Spans
from areal_agent.conformance.shapes import Play
from areal_agent.conformance.templates import Subject
from areal_agent.errors import RequestError
from areal_agent.gateway.answers import Choice
from areal_agent.gateway.conversation import Conversation, ToolChoice, ToolUse, read_message, read_tools
from areal_agent.gateway.draft import Draft
from areal_agent.tokens.arrangement import CallIds
from areal_agent.tokens.forest import Forest
from areal_agent.tokens.formats.base import ToolCall, answer_message
from areal_agent.tokens.prompt import Prompt
from areal_agent.types import Completion, Distribution, FinishReason, GenerateResult, JsonObject

_MARK = re.compile(r"(?:Mark|Tool)\d+x")


class Verdict(StrEnum):
    """What became of a conversation, from good to bad."""

    EXACT = "exact"  # the text is what transformers renders of the messages
    PLACED = "placed elsewhere"  # all of it is there, in order: the text of the messages as they were arranged
    REFUSED = "refused"  # with the place of what cannot be written
    UNNAMED = "REFUSED WITHOUT A PLACE"
    DIFFERS = "DIFFERS"
    LOST = "LOST"
    FORGED = "FORGED"  # text of a message has become a control token
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
    """Play a conversation and return what was found."""
    try:
        return Finding(verdict=_Player(subject, play).play())
    except _Ended as ended:
        return ended.finding
    except Exception as error:  # whatever the code under test raises is a finding
        return Finding(verdict=Verdict.RAISED, text=f"{type(error).__name__}: {error}")


class _Player:
    def __init__(self, subject: Subject, play: Play) -> None:
        self._subject = subject
        self._renderer = subject.renderer
        self._renderer.may_elide = True
        self._forest = Forest(subject.renderer)
        self._play = play
        self._tools: Sequence[JsonObject] = play.tools
        self._marks = count(100)
        self._talk: list[JsonObject] = []
        self._is_echo: list[bool] = []  # of each message of the talk: whether the model wrote it
        self._ids: dict[str, str | None] = {}  # by the id of a call in the play: its id here; None if it was not made
        self._answers: dict[str, JsonObject] = {}  # by completion id: as it was sampled
        self._keeps_thinking = True
        self._worst = Verdict.EXACT

    def play(self) -> Verdict:
        for step in self._play.steps:
            self._take(step)
        self._ask(is_last=True)
        if self._forest.audit():
            raise _Ended(Verdict.DIFFERS, "the audit at the session's end found a difference")
        return self._worst

    # ------------------------------------------------------------------------------------------------- steps

    def _take(self, step: JsonObject) -> None:
        match step["role"]:
            case "back":
                kept = max(1, len(self._talk) - step["by"])
                del self._talk[kept:], self._is_echo[kept:]
            case "forget thinking":
                self._keeps_thinking = False
                self._talk = [_without(message, "reasoning_content") for message in self._talk]
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
        habits, calls = said["sampled"], said.get("tool_calls") or []
        begin = said if "begun" in habits and (calls or said["content"].strip()) else None
        prompt, conversation = self._ask(begin)
        replies, echoes = [], []
        for index in range(2 if "twice" in habits else 1):
            one = {**said, "content": f"{said['content']} again"} if index else said
            choice = self._sampled(one, prompt, conversation)
            self._answers[choice.completion.id] = choice.message
            replies.append(choice.reply(choice.completion.token_ids))
            echoes.append(answer_message(choice.parsed, choice.parsed.content, choice.completion.id))
        self._forest.record(prompt, replies)
        echo = echoes[-1 if "second" in habits else 0]
        if not self._keeps_thinking:
            echo = _without(echo, "reasoning_content")
        if "other ids" in habits and "tool_calls" in echo:
            made = [
                {**call, "id": f"other{len(self._talk):02}{index:02}"} for index, call in enumerate(echo["tool_calls"])
            ]
            echo = {**echo, "tool_calls": made}
        made = [call["id"] for call in echo.get("tool_calls", ())]
        self._ids |= {call["id"]: made[index] if index < len(made) else None for index, call in enumerate(calls)}
        self._say(echo, is_echo=True)

    def _sampled(self, said: JsonObject, prompt: Prompt, conversation: Conversation) -> Choice:
        renderer, habits = self._renderer, said["sampled"]
        text, has_calls = self._written(said, prompt, conversation)
        end = renderer.stop_token_ids[len(renderer.end_texts) - 1 if has_calls else 0]
        end = renderer.stop_token_ids[-1] if "other end" in habits else end
        if "cut" in habits:  # behind a header of Harmony's
            text = text[: max(len(text) * 2 // 3, text.rfind("<|message|>") + len("<|message|>"))]
        ids = renderer.ids_of(text) + ([] if "cut" in habits else [end])
        reason = FinishReason.LENGTH if "cut" in habits else FinishReason.STOP
        draft = Draft(
            detokenizer=renderer.detokenizer,
            reader=conversation.reading(renderer, prompt).reader(),
            stop_token_ids=renderer.stop_token_ids,
            is_single_call=conversation.is_single_call(not renderer.arrangement.has_one_call),
        )
        logprobs = (0.0,) * len(ids)
        result = GenerateResult(token_ids=tuple(ids), logprobs=logprobs, versions=(), finish_reason=reason)
        _, parsed = draft.finish(result)
        kept = draft.kept(result)
        completion = Completion(
            id=f"c-{len(self._answers)}",
            token_ids=kept.token_ids,
            logprobs=kept.logprobs,
            versions=(),
            finish_reason=kept.finish_reason,
            distribution=Distribution.EXACT,
        )
        return Choice(index=0, completion=completion, text=draft.text, parsed=parsed, stop_text=draft.stop_text)

    def _written(self, said: JsonObject, prompt: Prompt, conversation: Conversation) -> tuple[str, bool]:
        """Return how the model writes an answer from where the prompt ends, and whether it has calls."""
        answer_format, habits = self._renderer.answer_format, said["sampled"]
        calls = [
            ToolCall(name=call["function"]["name"], arguments=orjson.loads(call["function"]["arguments"]))
            for call in said.get("tool_calls", ())
        ]
        if not (conversation.may_call_tools and answer_format.has_calls):
            calls = []
        if prompt.opening:
            begun = answer_format.opening(calls[0].name) if calls else ""
            return answer_format.format("", calls[:1]).partition(begun)[2] if calls else MORE, bool(calls)
        thinking, reasoning = answer_format.thinking, said.get("reasoning_content")
        if thinking is None or thinking.end in prompt.opened:
            reasoning = None
        elif prompt.is_thinking:
            reasoning = reasoning or ""
        content = f" \n{said['content']}\n " if "padded" in habits else said["content"]
        text = answer_format.format(content, calls, reasoning=reasoning)
        if thinking and prompt.is_thinking:
            text = text.removeprefix(thinking.begin).removeprefix("\n" if prompt.opened.endswith("\n") else "")
        tight = re.sub(r'": (?=[\["{0-9tfn])', '":', text) if "tight" in habits else text
        one, other = (answer_format.parse(form, tools=self._tools).tool_calls for form in (text, tight))
        return (tight if one == other else text), bool(calls)

    # ---------------------------------------------------------------------------------------------- requests

    def _ask(self, begin: JsonObject | None = None, *, is_last: bool = False) -> tuple[Prompt, Conversation]:
        """Place the conversation, and judge its prompt. `begin` is the answer that the prompt must begin.

        Of the prompts of a long conversation only some are judged before the last one, because that takes time.
        """
        calls = (begin or {}).get("tool_calls")
        if calls and not self._tools:
            begin = calls = None
        forced = calls[0]["function"]["name"] if calls else None
        given = [_without(begin, "sampled")] if begin and not calls else []
        try:
            tools = read_tools(list(self._tools))
            self._tools = tools.definitions
            if not self._talk:
                raise RequestError("there are no messages", param="messages[0]")
            conversation = Conversation(
                messages=[*self._talk, *given],
                tools=tools,
                choice=ToolChoice(use=ToolUse.REQUIRED, only=forced) if forced else ToolChoice(),
                template_options=self._play.options,
                continues_last=bool(given),
            )
            prompt = conversation.place(self._forest, self._renderer)
        except RequestError as error:
            raise _Ended(self._judged(error), f"{error} (param {error.param})") from None
        if is_last or len(self._talk) < 16 or len(self._talk) % 8 == 0:
            self._check(prompt, begin)
        return prompt, conversation

    def _judged(self, error: RequestError) -> Verdict:
        """Return whether a refusal names a place that the agent can change."""
        index = re.search(r"\bmessages\[(\d+)\]", f"{error.param} {error}")
        if index is None:
            return Verdict.REFUSED if re.match("tools|tool_choice", error.param or "") else Verdict.UNNAMED
        at = int(index[1])
        is_asked_twice = at > 0 and self._talk[at - 1]["role"] == "assistant"  # without a word in between
        return Verdict.UNNAMED if any(self._is_echo[at : at + 1]) and not is_asked_twice else Verdict.REFUSED

    def _check(self, prompt: Prompt, begin: JsonObject | None) -> None:
        said = [read_message(message, index) for index, message in enumerate(self._talk)]
        spans, differences = Spans(self._subject, prompt, self._tools), dict[Verdict, str]()
        for verdict, messages in self._forms(said, prompt):
            expected = self._rendered(messages, verdict)
            if begin is None:
                found = spans.difference(expected)
            else:
                found = self._beginning(spans, messages, prompt, verdict, begin)
            if found is None:
                self._require_all(said, spans.text, expected or spans.text, verdict)
                self._require_safe(prompt, said)
                self._worst = max(self._worst, verdict, key=list(Verdict).index)
                return
            differences.setdefault(verdict, found)
        lost = [mark for mark in _marks([said, self._tools]) if mark not in spans.text]
        told = ", ".join(lost) or "; as it was arranged: ".join(differences.values())
        raise _Ended(Verdict.LOST if lost else Verdict.DIFFERS, f"{told} in {spans.text!r}")

    def _rendered(self, messages: Sequence[JsonObject], verdict: Verdict, **options: Any) -> str | None:
        """Return the text of messages, by the model's own template, or as they are arranged by the one in use."""
        tools, options = self._tools, {**self._play.options, **options}
        if verdict is Verdict.PLACED:
            own, used = cast("str", self._subject.tokenizer.chat_template), self._renderer.chat_template
            tools = self._renderer.arrangement.tools(tools)
            options["chat_template"] = used if used.endswith(own) else own  # what is derived for tools ends with it
        return self._subject.rendered(messages, tools, **options)

    def _forms(self, said: Sequence[JsonObject], prompt: Prompt) -> Iterator[tuple[Verdict, list[JsonObject]]]:
        """Yield the messages as a template may get them: as they were sent, and as they were arranged."""
        answers = {answer.prompt.num_messages: answer for answer in prompt.parent.lineage()} if prompt.parent else {}
        arrangement, base, own_ids = self._renderer.arrangement, list[JsonObject](), dict[str, str]()
        for index, one in enumerate(said):
            message: JsonObject = one
            if index in answers:  # an echo may lack thinking and the text beside calls, and have other ids
                sampled = self._answers[answers[index].completion_id]
                calls, text = message.get("tool_calls", []), self._renderer.detokenizer.text_of(answers[index].sampled)
                for call, own in zip(calls, sampled["tool_calls"], strict=True):
                    own_ids[call["id"]] = own["id"] if own["id"] in text else call["id"]
                own_calls = [{**call, "id": own_ids[call["id"]]} for call in calls]
                message = {**sampled, "tool_calls": own_calls} if calls else _without(sampled, "tool_calls")
            if "tool_call_id" in message:
                message = {**message, "tool_call_id": own_ids.get(message["tool_call_id"], message["tool_call_id"])}
            base.append(message)
        thinks = any(message.get("reasoning_content") is not None for message in base)
        variants = [
            [write(message) if index in answers else message for index, message in enumerate(base)]
            for write in (_as_it_is, *((_not_empty, self._inline) if thinks else ()))
        ]
        for forms in variants:
            yield Verdict.EXACT, [self._in_manner(form) for form in forms]
        bare = answers.keys() if arrangement.has_text_apart else ()  # their text beside calls stands in the prompt
        for forms in variants:
            ids = CallIds(arrangement)
            given = (_without_text(form) if index in bare else form for index, form in enumerate(forms))
            yield Verdict.PLACED, arrangement([self._in_manner(ids.inward(form)) for form in given])

    def _in_manner(self, message: JsonObject) -> JsonObject:
        return self._renderer.arrangement.manner.form(message) if message.get("tool_calls") else message

    def _inline(self, message: JsonObject) -> JsonObject:
        """Return an answer with its thinking inside its content, where some templates look for it."""
        arrangement, thinking = self._renderer.arrangement, self._renderer.thinking
        is_alone = message.get("tool_calls") and (arrangement.has_text_apart or arrangement.manner.is_content_null)
        if message.get("reasoning_content") is None or not thinking.is_inline:
            return message
        content = (
            f"{thinking.begin}\n{message['reasoning_content'] or UNSAID}\n{thinking.end}{message['content'] or ''}"
        )
        return _without(message, "reasoning_content") | ({} if is_alone else {"content": content})

    def _beginning(
        self, spans: Spans, messages: list[JsonObject], prompt: Prompt, verdict: Verdict, begin: JsonObject
    ) -> str | None:
        """Return how a prompt that begins an answer differs from how the template begins such an answer."""
        index, calls, write = len(self._talk), begin.get("tool_calls", ())[:1], self._renderer.answer_format
        answer = (
            {**begin, "content": "", "tool_calls": calls} if calls else {**begin, "content": begin["content"] + MORE}
        )
        answer = read_message(_without(_without(answer, "sampled"), "reasoning_content"), index)
        answer = self._renderer.arrangement.manner.form(answer) if calls else answer
        opening = write.opening(calls[0]["function"]["name"]) if calls else write.opening_of_text(begin["content"])
        thoughtful = {**answer, "reasoning_content": UNSAID}
        difference = None
        for one in (answer, thoughtful):
            answered = self._rendered([*messages, one], verdict, add_generation_prompt=False)
            found = spans.difference(answered and answered.replace(UNSAID, ""), is_whole=False)
            if found is None:
                return None
            difference = difference or found
        others = [self._rendered(messages, verdict, enable_thinking=False)]
        others += [] if self._renderer.thinking.is_open(prompt.opened) else [self._rendered(messages, verdict)]
        return None if any(spans.difference(one + opening) is None for one in others if one is not None) else difference

    # ------------------------------------------------------------------------------------------ what must hold

    def _require_all(self, said: Sequence[JsonObject], text: str, expected: str, verdict: Verdict) -> None:
        """Require that the prompt has every mark once, and those of results in the order of their calls."""
        marks, ordered = _marks([said, self._tools]), _in_order_of_calls(said)
        if lost := [mark for mark in marks if mark not in text]:
            raise _Ended(Verdict.LOST, f"{', '.join(lost)} in {text!r}")
        own = {mark for mark in marks if mark.startswith("Mark")}
        if twice := [mark for mark in own if text.count(mark) > max(1, expected.count(mark))]:
            raise _Ended(Verdict.DIFFERS, f"{', '.join(twice)} is there twice, in {text!r}")
        has_ids = any(message.get("tool_call_id", text) in text for message in said if message["role"] == "tool")
        if verdict is Verdict.EXACT:  # templates have an order of their own, but results without ids are taken by place
            ordered = [] if has_ids else [message for message in ordered if message["role"] == "tool"]
        contents = [message["content"] for message in ordered if message["role"] != "system"]  # which has its own place
        for values in (
            contents,
            [call["function"]["arguments"] for one in ordered for call in one.get("tool_calls", ())],
        ):
            wanted = [mark for mark in _marks(values) if mark in own]
            if wanted != sorted(wanted, key=text.find):
                raise _Ended(Verdict.DIFFERS, f"{', '.join(wanted)} in another order in {text!r}")

    def _require_safe(self, prompt: Prompt, said: Sequence[JsonObject]) -> None:
        """Require that no control token stands in the text of a user or a tool."""
        contents = [message["content"].strip() for message in said if message["role"] in ("user", "tool")]
        if not any(text in content for content in contents for text in self._subject.control_texts):
            return
        data, spots, end = bytearray(), list[int](), 0
        for token_id in prompt.path():
            spots += [len(data)] if token_id in self._subject.control_ids else []
            data += self._renderer.detokenizer.bytes_of(token_id)
        for content in filter(None, contents):
            begin = data.find(content.encode(), end)
            end = begin + len(content.encode()) if begin >= 0 else end  # escaped, where the template writes it as JSON
            if begin >= 0 and any(begin <= spot < end for spot in spots):
                raise _Ended(Verdict.FORGED, f"{content!r} has a control token in it")


MORE = " and more"
"""What the model adds to an answer that was begun for it."""


def _as_it_is(message: JsonObject) -> JsonObject:
    return message


def _not_empty(message: JsonObject) -> JsonObject:
    """Return an answer with other thinking than an empty one."""
    return {**message, "reasoning_content": UNSAID} if message.get("reasoning_content") == "" else message


def _without_text(message: JsonObject) -> JsonObject:
    return {**message, "content": ""} if message.get("tool_calls") else message


def _without(message: JsonObject, name: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != name}


def _marks(value: Any) -> list[str]:
    """Return the marks in messages, but for thinking, which templates leave out."""
    return _MARK.findall(orjson.dumps(_plain(value)).decode())


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = cast("JsonObject", value).items()
        return {key: _plain(item) for key, item in items if key != "reasoning_content"}
    return [_plain(item) for item in cast("Sequence[Any]", value)] if isinstance(value, (list, tuple)) else value


def _in_order_of_calls(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the messages, the results that follow calls being in the order of the calls."""
    ordered, ids, first = list[JsonObject](), list[str](), 0
    for message in messages:
        ordered.append(message)
        if message["role"] != "tool":
            ids, first = [call["id"] for call in message.get("tool_calls", ())], len(ordered)
        elif all(one.get("tool_call_id") in ids for one in ordered[first:]):
            ordered[first:] = sorted(ordered[first:], key=lambda one: ids.index(one["tool_call_id"]))
    return ordered
