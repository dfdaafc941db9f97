"""Plays a conversation on a template as the gateway does, without a server, and judges every prompt.

::

    step ─▶ request ─▶ Conversation.place ─▶ prompt ─▶ a scripted answer, in the model's own format ─▶ its echo
                 │                             │
                 └─▶ apply_chat_template ──────┴─▶ exact, placed elsewhere, refused, or a fault

    prompt      injected │ sampled │ injected │ sampled │ injected
                   =          ~         =          ~         =
    template    the template's text, in which the answers are written from their echoes

What was injected must stand in the template's text to the letter. What was sampled must read as what the template
writes in its place; white space, the layout of JSON and empty thinking may differ, and the template may leave out text
beside a sampled call, or make it thinking. Where it leaves out thinking, the sampled text begins behind that.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from functools import partial
from itertools import count
from typing import Any

import orjson

from areal_agent.conformance.shapes import NAMES, ROLES, TEXTS, Play
from areal_agent.conformance.templates import UNSAID, Subject
from areal_agent.errors import RequestError
from areal_agent.gateway.conversation import Conversation, read_message
from areal_agent.gateway.draft import Draft
from areal_agent.gateway.tools import ToolChoice, ToolUse, read_tools
from areal_agent.tokens.forest import Forest
from areal_agent.tokens.formats.base import ToolCall, answer_message
from areal_agent.tokens.prompt import Prompt, Reply
from areal_agent.types import FinishReason, GenerateResult, JsonObject

MORE = " and more"
"""What the model adds to an answer that was begun for it."""


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


class Finding(Exception):
    """A verdict and its reasons. It is raised where it ends a play."""

    def __init__(self, verdict: Verdict, text: str = "") -> None:
        super().__init__(f"{verdict}: {text}")
        self.verdict = verdict


def played(subject: Subject, play: Play) -> Finding:
    """Play a conversation and return what was found."""
    try:
        return Finding(_Player(subject, play).play())
    except Finding as finding:
        return finding
    except Exception as error:  # whatever the code under test raises is a finding
        return Finding(Verdict.RAISED, f"{type(error).__name__}: {error}")


class _Player:
    def __init__(self, subject: Subject, play: Play) -> None:
        self._subject, self._renderer, self._play = subject, subject.renderer, play
        self._renderer.may_elide = True
        self._forest = Forest(subject.renderer)
        self._tools = play.tools
        self._marks, self._call_numbers = count(100), count(1)
        self._talk: list[JsonObject] = []
        self._echoes: set[int] = set()  # the places in the talk of the model's answers
        self._ids: dict[str, str | None] = {}  # by the number of a call: its id; None if the model did not make it
        self._answers: dict[str, JsonObject] = {}  # by completion id: as it was sampled
        self._keeps_thinking = True
        self._worst = Verdict.EXACT

    def play(self) -> Verdict:
        for word in self._play.line.split():
            self._take(word[0], word[1:])
        self._ask()
        if self._forest.audit():
            raise Finding(Verdict.DIFFERS, "the audit at the session's end found a difference")
        return self._worst

    # ------------------------------------------------------------------------------------------------- steps

    def _take(self, kind: str, flags: str) -> None:
        match kind:
            case "B":
                first = [message["role"] for message in self._talk].index("user") + 1
                del self._talk[max(first, len(self._talk) - int(flags)) :]
                self._echoes.intersection_update(range(len(self._talk)))
            case "F":
                self._keeps_thinking = False
                self._talk = [_without(message, "reasoning_content") for message in self._talk]
            case "G":
                if self._is_asked:
                    self._ask()
            case "T":
                self._tools = self._play.tools[: int(flags)]
            case "A":
                self._answer(flags, re.findall(r"\d", flags))
            case "R":
                id_ = self._ids.get(flags[-1], f"orphan{flags[-1]:0>3}")
                self._talk += [{"role": "tool", "content": self._content(flags), "tool_call_id": id_}] if id_ else []
            case _:
                self._talk.append({"role": ROLES[kind], "content": self._content(flags)})

    @property
    def _is_asked(self) -> bool:
        """Whether the model is to answer: no agent asks it right after an answer, without a word."""
        return self._talk[-1]["role"] != "assistant"

    def _content(self, flags: str) -> str:
        return self._filled(TEXTS[next((flag for flag in flags if flag in TEXTS), "")])

    def _filled(self, text: str) -> str:
        text = re.sub("MARK", lambda _: f"Mark{next(self._marks)}x", text)
        return text.replace("CONTROL", " ".join(self._subject.control_texts))

    def _answer(self, flags: str, numbers: Sequence[str]) -> None:
        """Take an answer: the client's own, or one that is sampled, recorded, and sent back."""
        said: dict[str, Any] = {"role": "assistant", "content": ""}
        said |= {"content": self._content(flags)} if "t" in flags or not numbers else {}
        said |= {"reasoning_content": "Hm,\n\nso."} if "h" in flags else {}
        calls = [{"name": NAMES[int(one) % 2], "arguments": self._filled(self._play.arguments)} for one in numbers]
        if calls:  # Mistral's templates want ids of nine letters and digits
            ids = (f"call{next(self._call_numbers):05}" for _ in calls)
            said["tool_calls"] = [
                {"id": id_, "type": "function", "function": one} for id_, one in zip(ids, calls, strict=True)
            ]
        if "m" in flags and self._is_asked:
            said = self._sampled(said, flags)
            self._echoes.add(len(self._talk))
        made = [call["id"] for call in said.get("tool_calls", ())]
        self._ids |= {number: made[at] if at < len(made) else None for at, number in enumerate(numbers)}
        self._talk.append(said)

    def _sampled(self, said: JsonObject, flags: str) -> dict[str, Any]:
        """Let the model say an answer, record it, and return its echo."""
        is_begun = "b" in flags and bool(self._tools if "tool_calls" in said else said["content"].strip())
        prompt, conversation = self._ask(said if is_begun else None)
        both = (said, {**said, "content": f"{said['content']} again"})[: 1 + ("d" in flags)]
        replies = [self._reply(one, flags, prompt, conversation) for one in both]
        self._forest.record(prompt, replies)
        echo = dict(self._answers[replies[-1 if "s" in flags else 0].completion_id])
        if not self._keeps_thinking:
            echo = _without(echo, "reasoning_content")
        if "n" in flags and "tool_calls" in echo:
            echo["tool_calls"] = [{**call, "id": f"new{next(self._call_numbers):06}"} for call in echo["tool_calls"]]
        return echo

    def _reply(self, said: JsonObject, flags: str, prompt: Prompt, conversation: Conversation) -> Reply:
        renderer = self._renderer
        text, has_calls = self._written(said, flags, prompt, conversation)
        end = renderer.stop_token_ids[-1 if "o" in flags else len(renderer.end_texts) - 1 if has_calls else 0]
        ids = renderer.ids_of(text[: len(text) * 2 // 3]) if "x" in flags else [*renderer.ids_of(text), end]
        draft = Draft(
            detokenizer=renderer.detokenizer,
            reader=conversation.reading(renderer, prompt).reader(),
            stop_token_ids=renderer.stop_token_ids,
            is_single_call=conversation.is_single_call(not renderer.arrangement.has_one_call),
        )
        reason = FinishReason.LENGTH if "x" in flags else FinishReason.STOP
        result = GenerateResult(token_ids=tuple(ids), logprobs=(0.0,) * len(ids), versions=(), finish_reason=reason)
        _, parsed = draft.finish(result)
        id_ = f"c-{len(self._answers)}"
        self._answers[id_] = answer_message(parsed, parsed.content, id_)
        return Reply(
            completion_id=id_,
            token_ids=draft.kept(result).token_ids,
            message=read_message(self._answers[id_], 0),
            own_ids=tuple(call.id for call in parsed.tool_calls),
            has_thinking=parsed.reasoning is not None,
        )

    def _written(self, said: JsonObject, flags: str, prompt: Prompt, conversation: Conversation) -> tuple[str, bool]:
        """Return how the model writes an answer from where the prompt ends, and whether it has calls."""
        write, calls = self._renderer.answer_format, list[ToolCall]()
        if conversation.may_call_tools and write.has_calls:
            functions = [call["function"] for call in said.get("tool_calls", ())]
            calls = [ToolCall(name=one["name"], arguments=orjson.loads(one["arguments"] or "{}")) for one in functions]
        if prompt.opening:
            return write.format("", calls[:1]).partition(write.opening(calls[0].name))[2] if calls else MORE, bool(
                calls
            )
        thinking, reasoning = write.thinking, said.get("reasoning_content")
        if thinking is None or thinking.end in prompt.opened:
            reasoning = None
        elif prompt.is_thinking:
            reasoning = reasoning or ""
        text = write.format(f" \n{said['content']}\n " if "p" in flags else said["content"], calls, reasoning=reasoning)
        if thinking and prompt.is_thinking:
            text = text.removeprefix(thinking.begin).removeprefix("\n" if prompt.opened.endswith("\n") else "")
        return (text.replace('": ', '":') if "i" in flags else text), bool(calls)

    # ---------------------------------------------------------------------------------------------- requests

    def _ask(self, begin: JsonObject | None = None) -> tuple[Prompt, Conversation]:
        """Place the conversation, and judge its prompt. `begin` is the answer that the prompt must begin."""
        calls = (begin or {}).get("tool_calls")
        given = [_without(begin, "reasoning_content")] if begin and not calls else []
        try:
            tools = read_tools(list(self._tools))
            self._tools = tools.definitions
            only = calls[0]["function"]["name"] if calls else None
            conversation = Conversation(
                messages=[*self._talk, *given],
                tools=tools,
                choice=ToolChoice(use=ToolUse.REQUIRED, only=only) if only else ToolChoice(),
                template_options=self._play.options,
                continues_last=bool(given),
            )
            prompt = conversation.place(self._forest, self._renderer)
        except RequestError as error:
            raise Finding(self._judged(error), f"{error} (param {error.param})") from None
        self._check(prompt, begin)
        return prompt, conversation

    def _judged(self, error: RequestError) -> Verdict:
        """Return whether a refusal names a place that the agent can change: not an answer that it was given."""
        index = re.search(r"\bmessages\[(\d+)\]", f"{error.param} {error}")
        if index is None:
            return Verdict.REFUSED if re.match("tools|tool_choice", error.param or "") else Verdict.UNNAMED
        return Verdict.UNNAMED if int(index[1]) in self._echoes else Verdict.REFUSED

    def _check(self, prompt: Prompt, begin: JsonObject | None) -> None:
        """Require that the prompt is the text of the messages as they were sent, or as they were arranged."""
        text, differences = self._renderer.detokenizer.text_of(prompt.path()), dict[Verdict, str]()
        said = [read_message(message, index) for index, message in enumerate(self._talk)]
        own = [said[at]["content"] for at in self._echoes if said[at].get("tool_calls")]
        marks = [mark for mark in _marks([said, self._tools]) if mark not in _marks(own)]  # which may be left out
        lost = [mark for mark in marks if mark not in text]
        for verdict, expected in self._expected(prompt, said, begin):
            difference = self._difference(prompt, text, expected)
            if difference is None and not lost:
                self._require_order(said, text, expected, verdict)
                self._require_safe(prompt, text, said)
                self._worst = max(self._worst, verdict, key=list(Verdict).index)
                return
            differences.setdefault(verdict, difference or "nothing")
        told = ", ".join(lost) or "; as it was arranged: ".join(differences.values()) or "transformers refuses it"
        raise Finding(Verdict.LOST if lost else Verdict.DIFFERS, f"{told} in {text!r}")

    # -------------------------------------------------------------------------------- what transformers renders

    def _expected(
        self, prompt: Prompt, said: Sequence[JsonObject], begin: JsonObject | None
    ) -> Iterator[tuple[Verdict, str]]:
        """Yield the texts that a prompt may have: of the messages as they were sent, then as they were arranged.

        A template may find the thinking of answers beside their content, not empty, or inside it.
        """
        base, own = self._as_sampled(prompt, said)
        for verdict in (Verdict.EXACT, Verdict.PLACED):
            is_bare = verdict is Verdict.PLACED and self._renderer.arrangement.has_text_apart
            tried = list[Sequence[JsonObject]]()
            for place in ("as it is", "beside", "inside"):
                messages = [self._form(one, place, is_bare) if at in own else one for at, one in enumerate(base)]
                if messages not in tried:
                    tried.append(messages)
                    yield from ((verdict, text) for text in self._texts(messages, prompt.opening, begin, verdict))

    def _form(self, answer: JsonObject, place: str, is_bare: bool) -> JsonObject:
        """Return an own answer with its thinking in this place, and perhaps without its text beside calls."""
        arrangement, thinking, form = self._renderer.arrangement, self._renderer.thinking, dict(answer)
        if is_bare and "tool_calls" in form:
            form["content"] = ""
        thought = form.get("reasoning_content")
        if thought is None or place == "as it is":
            return form
        form["reasoning_content"] = thought or UNSAID
        if place == "inside" and thinking.is_inline:
            del form["reasoning_content"]
            if "tool_calls" not in form or not (is_bare or arrangement.manner.is_content_null):
                form["content"] = f"{thinking.begin}\n{thought or UNSAID}\n{thinking.end}{form['content'] or ''}"
        return form

    def _as_sampled(self, prompt: Prompt, said: Sequence[JsonObject]) -> tuple[list[JsonObject], Collection[int]]:
        """Return the messages with the answers of the path as they were sampled, and the places of these.

        An echo may lack thinking and the text beside calls, and have other ids.
        """
        answers = {answer.prompt.num_messages: answer for answer in prompt.parent.lineage()} if prompt.parent else {}
        base, ids = list[JsonObject](), dict[str, str]()
        for index, message in enumerate(said):
            more: dict[str, Any] = {}
            if answer := answers.get(index):
                calls = message.get("tool_calls", [])
                ids |= {call["id"]: own or call["id"] for call, own in zip(calls, answer.own_ids, strict=True)}
                more = {**read_message(self._answers[answer.completion_id], index)}
                more |= {"tool_calls": [{**call, "id": ids[call["id"]]} for call in calls]} if calls else {}
            elif "tool_call_id" in message:
                more = {"tool_call_id": ids.get(message["tool_call_id"], message["tool_call_id"])}
            base.append({**message, **more})
        return base, answers.keys()

    def _texts(
        self, said: Sequence[JsonObject], opening: str, begin: JsonObject | None, verdict: Verdict
    ) -> Iterator[str]:
        """Yield the text of messages; where an answer was begun, that of such an answer up to the end of `opening`."""
        arrangement, form = self._renderer.arrangement, self._renderer.arrangement.manner.form
        given, tools, used = said, self._tools, self._subject.template
        if verdict is Verdict.PLACED:
            given, tools, used = self._renderer.arrange(said), arrangement.tools(tools), self._subject.used
        given = [form(one) if one.get("tool_calls") else one for one in given]
        rendered = partial(self._subject.rendered, tools=tools, chat_template=used, **self._play.options)
        texts = [rendered(given)]
        if begin is not None:
            calls = begin.get("tool_calls", ())[:1]
            more = {"content": "", "tool_calls": calls} if calls else {"content": begin["content"] + MORE}
            answer = read_message({"role": "assistant", **more}, len(given))
            answer = form(answer) if calls else answer
            for one in (answer, {**answer, "reasoning_content": UNSAID}):
                text = rendered([*given, one], add_generation_prompt=False)
                texts.append(text and text[: text.rfind(opening)])
            texts = [text and text + opening for text in (*texts, rendered(given, enable_thinking=False))]
        return (text for text in texts if text)

    # ------------------------------------------------------------------------------------------ what must hold

    def _difference(self, prompt: Prompt, text: str, expected: str) -> str | None:
        """Return the first difference of a prompt from the template's text, but for sampled answers, or None."""
        if text == expected:
            return None
        ids, pieces, start = prompt.path(), [""], 0  # sampled and injected text by turns
        text_of = self._renderer.detokenizer.text_of
        for begin, end in prompt.sampled_spans():
            if begin > start or len(pieces) == 1:  # else right after another answer
                pieces += [text_of(ids[start:begin]), ""]
            pieces[-1] += text_of(ids[begin:end])
            start = end
        pieces.append(text_of(ids[start:]))
        position = 0
        for number, (answer, following) in enumerate(zip(pieces[::2], pieces[1::2], strict=True), 1):
            is_last = 2 * number == len(pieces)
            found = len(expected) - len(following) if is_last else expected.find(following, position)
            while found > position and not is_last and not self._reads_as(answer, expected[position:found]):
                found = expected.find(following, found + 1)
            is_same = found >= position and expected.startswith(following, found)
            if not is_same or not self._reads_as(answer, expected[position:found]):
                rest = expected[position:]
                same = next((at for at, one in enumerate(following) if rest[at : at + 1] != one), len(following))
                after, comes, has = answer + following[:same], following[same:], rest[same:]
                return f"after {after[-60:]!r} comes {comes[:200]!r}, the template has {has[:200]!r}"
            position = found + len(following)
        return None

    def _reads_as(self, sampled: str, written: str) -> bool:
        """Return whether the template's text of an answer reads as what was sampled."""
        one, other = (self._without_end(text) for text in (sampled, written))
        if "".join(one.split()) == "".join(other.split()):
            return True
        a, b = (self._renderer.answer_format.parse(text, tools=self._tools) for text in (one, other))
        words, is_cut = (
            f"{a.content} {a.reasoning or ''}".split(),
            not sampled.rstrip().endswith(tuple(self._subject.ends)),
        )
        if one and is_cut and all(word in other for word in words) and all(word in one for word in b.content.split()):
            return True
        thought, said, written, is_calling = b.reasoning or "", a.content.strip(), b.content.strip(), bool(a.tool_calls)
        return (
            a.tool_calls == b.tool_calls
            and (written == said or (is_calling and not written))
            and (thought == (a.reasoning or "") or (is_calling and thought == said))
            and (a.reasoning is None or b.reasoning is not None)
        )

    def _without_end(self, text: str) -> str:
        """Return the text of an answer without its end token, or the header of Harmony's in which it was cut off."""
        text = re.sub(r"<\|(start|channel)\|>[^<]*$", "", text)
        end = next((end for end in self._subject.ends if text.rstrip().endswith(end)), "")
        return text.rstrip().removesuffix(end) if end else text

    def _require_order(self, said: Sequence[JsonObject], text: str, expected: str, verdict: Verdict) -> None:
        """Require that no mark is there twice, and that results are in the order of their calls.

        Where messages were placed elsewhere, the others must be in order, too, but for the system's.
        """
        marks = {mark for mark in _marks(said) if mark.startswith("Mark") and mark in text}
        if twice := [mark for mark in marks if text.count(mark) > max(1, expected.count(mark))]:
            raise Finding(Verdict.DIFFERS, f"{', '.join(twice)} is there twice, in {text!r}")
        calls = [call["id"] for one in said for call in one.get("tool_calls", ())]
        results = [one for one in said if one.get("tool_call_id") in calls]
        results.sort(key=lambda one: calls.index(one["tool_call_id"]))
        talk = [one for one in said if one["role"] in ("user", "assistant")]
        if verdict is Verdict.EXACT:  # templates have an order of their own, but results without ids are taken by place
            results, talk = [one for one in results if one["tool_call_id"] not in text], []
        for messages, name in ((results, "content"), (talk, "content"), (talk, "tool_calls")):
            wanted = [mark for mark in _marks([one.get(name) for one in messages]) if mark in marks]
            if wanted != sorted(wanted, key=text.find):
                raise Finding(Verdict.DIFFERS, f"{', '.join(wanted)} in another order in {text!r}")

    def _require_safe(self, prompt: Prompt, text: str, said: Sequence[JsonObject]) -> None:
        """Require that no control token stands in the text of a user or a tool."""
        bytes_of, control_ids = self._renderer.detokenizer.bytes_of, self._subject.control_ids
        plain = b""
        for content in (message["content"].strip() for message in said if message["role"] in ("user", "tool")):
            if content in text and any(control in content for control in self._subject.control_texts):
                plain = plain or b"".join(b"\0" if one in control_ids else bytes_of(one) for one in prompt.path())
                if content.encode() not in plain:
                    raise Finding(Verdict.FORGED, f"{content!r} has a control token in it")


def _without(message: JsonObject, name: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != name}


def _marks(value: Any) -> list[str]:
    """Return the marks in messages, but for thinking, which templates leave out."""
    return re.findall(r"(?:Mark|Tool)\d+x", re.sub(rb'"reasoning_content":"[^"]*"', b"", orjson.dumps(value)).decode())
