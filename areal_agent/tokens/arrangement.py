"""What a chat template is given for the messages that an agent sent, so that nothing of them is left out.

Templates drop what they do not expect, or refuse it. `Arrangement.of` finds out by rendering conversations in which
every part is a word of its own, and gives a template what it writes::

    sent                                          given, where the template does not write it as it is
    system messages at the head                   one system message (always), or a user's
    a system message further down                 a user's message in its place
    users' messages one after the other           one
    text beside calls (not that of a sampled      a message before that of the calls
      answer, whose tokens stand in the prompt)
    several calls in one answer                   an answer for each, with its result
    results in another order than their calls     in the order of the calls (always), by their ids
    ids of calls that the template refuses        ids of its own form; a call that the model sampled has the model's
    a tool without description or parameters      empty ones

The arrangement depends on the template alone, so a conversation that grows is arranged in the same way each turn. What
is still not written is refused by `require_complete`, which looks once at each shape of conversation: who speaks, and
with which parts.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from typing import Any

from areal_agent.errors import RequestError
from areal_agent.tokens.canonical import call_ids, head_length
from areal_agent.tokens.formats.detection import PROBE, PROBE_TOOLS, Manner
from areal_agent.tokens.prompt import Shape, longest_cut
from areal_agent.tokens.shield import joined, plain_of
from areal_agent.tokens.template import ChatTemplate
from areal_agent.types import JsonObject

BETWEEN = "\n\n"
"""Written between messages that are given as one."""

_SYSTEM: Shape = ("system", True)
_USER: Shape = ("user", True)
_ANSWER: Shape = ("assistant", True, False, 0, False)
_CALLS, _RESULTS = ("assistant", False, False, 2, False), (("tool", True, 1), ("tool", True, 0))

CLIENTS: Mapping[str, Sequence[Shape]] = {
    "chats": (_SYSTEM, _USER, _ANSWER, _USER),
    "tool loops": (_SYSTEM, _USER, _CALLS, *_RESULTS, _ANSWER, _USER),
    "Codex": (_SYSTEM, _SYSTEM, _USER, _USER, _CALLS, *_RESULTS, _ANSWER, _USER),
    "Claude Code": (_SYSTEM, _USER, _SYSTEM, _CALLS, *_RESULTS, _SYSTEM, _ANSWER, _USER),
}
"""The shapes of what clients send."""

MAX_SHAPES = 4096
"""The number of shapes that are remembered."""

IMAGE_MARK = re.compile(r"\d{76,}")
"""Two of a renderer's secrets and more: an image in a text (`Renderer`). An error does not repeat them."""

_NINE = re.compile("[A-Za-z0-9]{9}")


def own_id(id_: str, name: str, index: int) -> str:
    """Return an id of a call as it is."""
    del name, index
    return id_


def nine_letter_id(id_: str, name: str, index: int) -> str:
    """Return an id of nine letters and digits, the only ones that Mistral's templates take."""
    del name, index
    return id_ if _NINE.fullmatch(id_) else blake2b(id_.encode(), digest_size=9).hexdigest()[:9]


def function_id(id_: str, name: str, index: int) -> str:
    """Return an id with the function's name, which Kimi's template writes in the place of the name."""
    is_own = re.fullmatch(rf"(functions\.)?{re.escape(name)}:\d+", id_)
    return id_ if is_own else f"functions.{name}:{index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """How the messages of a conversation are given to one template.

    >>> plain = Arrangement(template=ChatTemplate("{{ messages }}", {}))
    >>> given = plain([{"role": "system", "content": "a"}, {"role": "system", "content": "b"}])
    >>> given
    [{'role': 'system', 'content': 'a\\n\\nb'}]
    """

    template: ChatTemplate
    manner: Manner = field(default_factory=Manner)
    has_system: bool = True
    has_later_system: bool = True
    joins_users: bool = False
    has_text_apart: bool = False
    has_one_call: bool = False
    """An answer has at most one call: where the model samples one, the answer ends with its first."""
    inward_id: Callable[[str, str, int], str] = own_id
    has_ids: bool = True
    needs_description: bool = False
    needs_parameters: bool = False
    has_definitions: bool = True
    has_calls: bool = True
    has_results: bool = True
    _known: dict[Any, int | None] = field(default_factory=dict[Any, int | None], compare=False, repr=False)

    @classmethod
    def of(cls, template: ChatTemplate, manner: Manner, *, has_calls: bool) -> "Arrangement":
        """Find out what a template writes. `has_calls`: it writes calls, in this `manner`."""
        found = cls(template=template, manner=manner)
        system, user, answer = _SYSTEM, _USER, _ANSWER
        found = replace(found, has_system=found.writes([system, user]))
        found = replace(found, joins_users=not found.writes([user, user]))
        has_later = found.writes([system, user, system]) and found.writes([system, user, answer, system, user])
        found = replace(found, has_later_system=has_later)
        if not has_calls:
            return replace(found, has_definitions=False)
        for tool in ({"description": ""}, {"parameters": {"type": "object", "properties": {}}}):
            bare = {key: one for key, one in PROBE_TOOLS[0]["function"].items() if key not in tool}
            if not found.writes([user], tools=({"type": "function", "function": bare},)):
                found = replace(found, **{f"needs_{next(iter(tool))}": True})
        found = found._with_ids()
        calls, result = _calling(1), ("tool", True, 0)
        found = replace(
            found,
            has_definitions=found.writes([user], tools=PROBE_TOOLS),
            has_calls=found._first_missing([user, calls], 1, PROBE_TOOLS) != 1,
            has_results=found._first_missing([user, calls, result], 2, PROBE_TOOLS) != 2,
        )
        beside = [[user, _calling(1, has_text=True, thinks=thinks), result, answer, user] for thinks in (False, True)]
        if not all(map(found._writes_in_order, beside)):
            apart = replace(found, has_text_apart=True)
            found = apart if all(map(apart.writes, beside)) else found
        loop = [system, user, calls, result]
        if not found.writes(loop) and replace(found, has_system=False).writes(loop):
            found = replace(found, has_system=False)  # Mistral's write it with the last message, if that is a question
        several = [user, _calling(2), result, ("tool", True, 1)]
        if found.writes([user, calls, result]) and not found.writes(several):
            found = replace(found, has_one_call=True)
        return found

    def _with_ids(self) -> "Arrangement":
        """Choose ids with which a call and its result are written, and which are in both or in neither."""
        for inward_id in (own_id, nine_letter_id, function_id):
            arrangement = replace(self, inward_id=inward_id)
            marked = _Marked([_USER, _calling(1), ("tool", True, 0)], arrangement)
            text = arrangement._written(marked, PROBE_TOOLS)
            id_ = call_ids(marked.forms[1])[0]
            if text and marked.missing_in(text) is None and text.count(id_) != 1:
                return replace(arrangement, has_ids=id_ in text)
        return self

    # ------------------------------------------------------------------------------------------ what is given

    def __call__(self, forms: Sequence[JsonObject]) -> list[JsonObject]:
        """Return the messages that the template is given for normalised ones."""
        num_head = head_length(forms)
        given = list(forms[num_head:])
        if not self.has_later_system:
            given = [_as_user(one) if one["role"] == "system" else one for one in given]
        if any("tool_calls" in one and (self.has_text_apart or len(one["tool_calls"]) > 1) for one in given):
            given = [one for answered in _with_results(given) for one in self._answered(answered)]
        if num_head:
            head = _as_one(forms[:num_head])
            given = [head if self.has_system else _as_user(head), *given]
        return list(_joined_users(given)) if self.joins_users else given

    def _answered(self, messages: Sequence[JsonObject]) -> Iterator[JsonObject]:
        """Arrange an answer and the results of its calls, or one other message."""
        answer, results = messages[0], messages[1:]
        calls: Sequence[JsonObject] = answer.get("tool_calls") or ()
        places = [shape[2] for shape in shapes_of(messages)[1:]] if results else []
        order = sorted(range(len(results)), key=lambda n: places[n] if places[n] >= 0 else len(calls))
        if calls and self.has_text_apart and answer["content"]:
            yield {name: answer[name] for name in answer.keys() & {"role", "content"}}
            answer = self.manner.form({**answer, "content": ""})
        if not self.has_one_call or len(calls) < 2:
            yield answer
            yield from (results[n] for n in order)
            return
        for number, call in enumerate(calls):
            yield {**answer, "tool_calls": [call]} if number == 0 else self.manner.form(_call_alone(call))
            yield from (results[n] for n in order if places[n] == number)
        yield from (results[n] for n in order if places[n] < 0)

    def tools(self, definitions: Sequence[JsonObject]) -> Sequence[JsonObject]:
        """Return tool definitions with what the template needs of each."""
        if not (self.needs_description or self.needs_parameters):
            return definitions
        more: dict[str, Any] = {"description": ""} if self.needs_description else {}
        more |= {"parameters": {"type": "object", "properties": {}}} if self.needs_parameters else {}
        return [{**tool, "function": {**more, **tool["function"]}} for tool in definitions]

    # ------------------------------------------------------------------------------------- what is left out

    def writes(self, shapes: Sequence[Shape], *, tools: Sequence[JsonObject] = ()) -> bool:
        """Return whether the template writes all of a conversation of these shapes."""
        return self._first_missing(shapes, 0, tools) is None

    def clients(self) -> tuple[list[str], list[str]]:
        """Return the clients whose messages the template writes whole, and those of which it would refuse some."""
        tools = PROBE_TOOLS if self.has_definitions else ()
        served = {name: self.writes(shapes, tools=tools) for name, shapes in CLIENTS.items()}
        return [name for name in served if served[name]], [name for name in served if not served[name]]

    def changes(self) -> list[str]:
        """Return what is given to the template in another way than it was sent, for people."""
        told = {
            "a system message as a user's": not self.has_system,
            "a later system message as a user's": self.has_system and not self.has_later_system,
            "users' messages in a row as one": self.joins_users,
            "text beside calls before them": self.has_text_apart,
            "one call an answer": self.has_one_call,
            "no definitions of tools": not self.has_definitions,
        }
        return [what for what, is_so in told.items() if is_so]

    def _writes_in_order(self, shapes: Sequence[Shape]) -> bool:
        marked = _Marked(shapes, self)
        text = self._written(marked, ())
        return text is not None and marked.is_in_order(text)

    def require_complete(
        self,
        forms: Sequence[JsonObject],
        shapes: Sequence[Shape],
        *,
        num_new: int,
        num_messages: int,
        has_tools: bool,
    ) -> None:
        """Raise RequestError if the template would leave out a part of the last `num_new` messages, or the tools.

        `shapes` are those of the forms. `num_messages` is the number of messages of the request, whose last ones the
        forms are. Reasoning need not be written, nor what a template leaves out of the session's own answers: no server
        of the model writes it.
        """
        start = len(forms) - num_new
        short = shapes if num_new < len(shapes) else _shortened(shapes)
        first = start if num_new < len(shapes) else 0
        if self._missing(short, first, has_tools) is None:
            return
        missing = self._missing(shapes, start, has_tools)
        if missing is None:
            return
        if missing < 0:
            raise RequestError(
                "the model's chat template does not write the definitions of tools in this conversation; send a user's "
                "message, leave out tools, or serve the model with a template that writes them",
                param="tools",
                code="unsupported_content",
            )
        why = "would leave out a part of it, or take no answer after it"
        raise self.refusal(forms[missing], num_messages - len(forms) + missing, why)

    def refusal(self, form: JsonObject, index: int, why: str) -> RequestError:
        """Return the error about one message that the template does not take."""
        role, calls = form["role"], form.get("tool_calls")
        what = f"a message of the {role}" + (" with calls" if calls else "")
        what = "the result of a call" if role == "tool" else what
        said = IMAGE_MARK.sub("[image]", plain_of(form.get("content") or ""))
        remedy = {
            "tool": "send a result only after the answer that has its call",
            "system": "put its text into the first system message or into a user's message",
        }.get(role, "send it without calls or as a message of its own")
        return RequestError(
            f"messages[{index}] is {what} ({said!r:.60}), and the model's chat template {why}: {remedy}, or serve the "
            "model with a template that writes it",
            param=f"messages[{index}]",
            code="unsupported_content",
        )

    def _missing(self, shapes: Sequence[Shape], start: int, has_tools: bool) -> int | None:
        key = (tuple(shapes), start, has_tools)
        if key not in self._known:
            if len(self._known) >= MAX_SHAPES:
                self._known.clear()
            missing = self._first_missing(shapes, start, PROBE_TOOLS if has_tools else (), is_refusal_fine=True)
            self._known[key] = missing
        return self._known[key]

    def _first_missing(
        self, shapes: Sequence[Shape], start: int, tools: Sequence[JsonObject], *, is_refusal_fine: bool = False
    ) -> int | None:
        """Return the first message from `start` on that has a part that is not written, -1 for the tools, or None."""
        marked = _Marked(shapes, self)
        text = self._written(marked, tools)
        if text is None:  # of the real conversation, this is the template's own answer
            return None if is_refusal_fine else start
        missing = marked.missing_in(text, start)
        missing = self._first_astray(shapes, start) if missing is None else missing
        if missing is None and is_refusal_fine and not self._can_go_on(shapes, tools):
            sent = (n for n in range(start, len(shapes)) if shapes[n][0] != "assistant" or not shapes[n][-1])
            return next((n for n in sent if not self._can_go_on(shapes[: n + 1], tools)), None)
        return -1 if missing is None and tools and PROBE.name not in text else missing

    def _can_go_on(self, shapes: Sequence[Shape], tools: Sequence[JsonObject]) -> bool:
        """Return whether the template takes an answer to these messages."""
        return self._written(_Marked([*shapes, _ANSWER, _USER], self), tools) is not None

    def _first_astray(self, shapes: Sequence[Shape], start: int) -> int | None:
        """Return the first result that would be read as that of another call, or as an answer's turn."""
        expected, num_calls, answer, group = 0, 0, 0, list[int]()
        for index, shape in enumerate((*shapes, _USER)):
            if shape[0] == "tool":
                group.append(index)
                continue
            for result in sorted(group, key=lambda one: shapes[one][2]):
                place = shapes[result][2]
                is_astray = not self.has_ids and (
                    (num_calls > 0 and (num_calls, len(group)) != (1, 1)) if place < 0 else place != expected
                )
                is_astray |= self.has_one_call and num_calls > 1 and group[0] != answer + 1  # it makes no pair
                if result >= start and (is_astray or (place < 0 and self.joins_users)):
                    return result
                expected = max(expected, place + 1)
            group = []
            if shape[0] == "assistant":
                expected, num_calls, answer = 0, shape[3], index
        return None

    def _written(self, marked: "_Marked", tools: Sequence[JsonObject]) -> str | None:
        try:
            return self.template.render(self(marked.forms), self.tools(tools))
        except RequestError:
            return None


class CallIds:
    """Gives calls, and their results, the ids that they have in the prompt."""

    def __init__(self, arrangement: Arrangement) -> None:
        self._inward_id = arrangement.inward_id
        self._waiting: list[tuple[str, str]] = []  # the ids of calls without a result: the agent's, and the prompt's

    def inward(self, message: JsonObject, own: Sequence[str | None] = ()) -> JsonObject:
        """Return a message with these ids. `own` are those that the model gave the calls of a sampled answer."""
        if calls := message.get("tool_calls"):
            ids = [
                (own[number] if number < len(own) else None)
                or self._inward_id(call.get("id", ""), call["function"]["name"], number)
                for number, call in enumerate(calls)
            ]
            self._waiting = [*zip(call_ids(message), ids, strict=True), *self._waiting]
            return {**message, "tool_calls": [{**call, "id": id_} for call, id_ in zip(calls, ids, strict=True)]}
        if message["role"] != "tool" or not self._waiting:
            return message
        id_ = message.get("tool_call_id")
        found = next((pair for pair in self._waiting if not id_ or (pair[0] or id_) == id_), None)
        if found is None:
            return message
        self._waiting.remove(found)
        return message if found[1] == id_ else {**message, "tool_call_id": found[1]}


def shapes_of(forms: Sequence[JsonObject], sampled: Collection[int] = ()) -> list[Shape]:
    """Return the shape of each message: a result's has the number of its call in the answer before it, or -1.

    `sampled` are the places of the session's own answers. Of calls with one id, the first is that of the first result;
    a result without an id is that of the next call.
    """
    shapes: list[Shape] = []
    calls: Sequence[JsonObject] = ()
    free: list[int] = []
    for index, form in enumerate(forms):
        role, content = form["role"], form["content"]
        has_text = bool(content) and not content.isspace()
        if role == "tool":
            id_ = form.get("tool_call_id")
            place = next((n for n in free if not id_ or (calls[n].get("id") or id_) == id_), -1)
            if place >= 0:
                free.remove(place)
            shapes.append((role, has_text, place))
        elif role == "assistant":
            calls = form.get("tool_calls") or ()
            free = list(range(len(calls)))
            shapes.append((role, has_text, bool(form.get("reasoning_content")), len(calls), index in sampled))
        else:
            shapes.append((role, has_text))
    return shapes


def _calling(num_calls: int, *, has_text: bool = False, thinks: bool = False) -> Shape:
    return "assistant", has_text, thinks, num_calls, False


def _shortened(shapes: Sequence[Shape]) -> Sequence[Shape]:
    """Leave out periods, as stand-ins do: what a template writes of one, it writes of the next."""
    while (cut := longest_cut(shapes)) is not None:
        shapes = [*shapes[: cut[0]], *shapes[cut[1] :]]
    return shapes


class _Marked:
    """A conversation of given shapes, with a word of its own in each part; reasoning is not looked for."""

    def __init__(self, shapes: Sequence[Shape], arrangement: Arrangement) -> None:
        self.forms: list[JsonObject] = []
        self._marks: list[list[str]] = []
        self._number = count(1)
        ids, called = CallIds(arrangement), tuple[str, ...]()
        for role, has_text, *parts in shapes:
            self._marks.append([])
            form: dict[str, Any] = {"role": role, "content": self._mark() if has_text else ""}
            if role == "tool":
                form["tool_call_id"] = called[parts[0]] if parts[0] >= 0 else "orphan001"
            elif role == "assistant":
                form |= {"reasoning_content": "axolotl", "thinking": "axolotl"} if parts[0] else {}
                if parts[1]:
                    form["tool_calls"] = [self._call() for _ in range(parts[1])]
                    form = dict(arrangement.manner.form(form))
                called = call_ids(form)
                if parts[2] and parts[1] and has_text:
                    del self._marks[-1][0]  # text beside calls
            self.forms.append(ids.inward(form))

    def _mark(self) -> str:
        self._marks[-1].append(f"salamander{next(self._number):04}x")
        return self._marks[-1][-1]

    def _call(self) -> JsonObject:
        function = {"name": self._mark(), "arguments": {"word": self._mark()}}
        return {"id": f"call_{next(self._number):08}", "type": "function", "function": function}

    def is_in_order(self, text: str) -> bool:
        """Return whether every part is in `text`, and those of one message in their order."""
        places = [[text.find(mark) for mark in marks] for marks in self._marks]
        return all(-1 not in one and one == sorted(one) for one in places)

    def missing_in(self, text: str, start: int = 0) -> int | None:
        """Return the first message from `start` on that has a part that is not in `text`, or None."""
        found = (n for n, marks in enumerate(self._marks) if n >= start and not all(mark in text for mark in marks))
        return next(found, None)


def _as_one(messages: Sequence[JsonObject]) -> JsonObject:
    if len(messages) == 1:
        return messages[0]
    contents = [one["content"] for one in messages if one["content"]]
    parts = (part for number, text in enumerate(contents) for part in ((BETWEEN, text) if number else (text,)))
    return {**messages[0], "content": joined(parts)}


def _as_user(message: JsonObject) -> JsonObject:
    return {**message, "role": "user"}


def _call_alone(call: JsonObject) -> JsonObject:
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _joined_users(messages: Sequence[JsonObject]) -> Iterator[JsonObject]:
    users: list[JsonObject] = []
    for message in messages:
        if message["role"] == "user":
            users.append(message)
            continue
        if users:
            yield _as_one(users)
            users = []
        yield message
    if users:
        yield _as_one(users)


def _with_results(messages: Sequence[JsonObject]) -> Iterator[Sequence[JsonObject]]:
    """Yield each answer with calls together with the results that follow it, and every other message alone."""
    index = 0
    while index < len(messages):
        end = index + 1
        if messages[index].get("tool_calls"):
            while end < len(messages) and messages[end]["role"] == "tool":
                end += 1
        yield messages[index:end]
        index = end
