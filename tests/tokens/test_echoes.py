"""Habits of clients: how an answer may come back and still be the answer.

- whatever mix of habits each request has, it continues the same answers with the same tokens as a verbatim echo, in
  every model family and with parallel samples, and the audit finds no difference (property)
- numbers are equal by value: `1.0` is 1, but 1 is not true, and beyond 2**53 a float is no integer
- the text beside calls may be left out but not changed, and tells parallel samples apart where it is repeated
- an answer that sampled the stop text itself is another; tests/gateway/test_echoes.py adds stop texts again
- a conversation with numbers is still recognised as sent: its history is not read again
"""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.tokens.forest import Forest, Prompt, Reply
from areal_agent.tokens.formats.base import ToolCall
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import ForkReason, JsonObject

from .conftest import as_it_is, parent_of

QUESTION = {"role": "user", "content": "a question"}
TOOLS = ({"type": "function", "function": {"name": "f", "description": "adds", "parameters": {"type": "object"}}},)
STOP = "</code>"


def call(call_id: str = "abcdefghi", **arguments: Any) -> JsonObject:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def said(content: str, *calls: JsonObject, thought: str = "") -> JsonObject:
    beside = {"reasoning_content": thought} if thought else {}
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **beside}


class Talk:
    """A forest, and the answers that were sampled in it: c1, c2 ... in order."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.forest = Forest(renderer)
        self.num_answers = 0

    def ask(self, *messages: JsonObject) -> Prompt:
        return self.forest.plan(messages, TOOLS, normalise=as_it_is)

    def answer(self, prompt: Prompt, *answers: JsonObject, stop_text: str = "") -> ForkReason | None:
        return self.forest.record(prompt, [self._reply(one, stop_text) for one in answers])

    def _reply(self, message: JsonObject, stop_text: str) -> Reply:
        self.num_answers += 1
        thought = message.get("reasoning_content")
        text = f"{thought}</think>\n\n" if thought else ""
        calls = [ToolCall(**one["function"]) for one in message.get("tool_calls", ())]
        text += self.renderer.answer_format.format(message["content"], calls) + stop_text
        token_ids = self.renderer.ids_of(text)
        return Reply(
            completion_id=f"c{self.num_answers}",
            token_ids=token_ids if stop_text else (*token_ids, self.renderer.end_token_id),
            message=message,
            has_thinking=bool(thought),
            stop_text=stop_text,
        )

    def continued(self, echo: JsonObject) -> str | None:
        """Return the completion that a request with this echo continues."""
        return parent_of(self.ask(QUESTION, echo, QUESTION))


@pytest.fixture
def talk(renderer: Renderer) -> Talk:
    return Talk(renderer)


# --------------------------------------------------------------------------------------------------- any mix

values = st.integers(-(2**60), 2**60) | st.sampled_from([1.0, -0.0, 1e3, 0.5, 2.0**52, 1e300, True, "1.0", None])
arguments = st.dictionaries(st.sampled_from("xyz"), values | st.lists(values, max_size=2), max_size=2)
texts = st.sampled_from(["", "one", "one\r\ntwo", "so.0\n", STOP])
samples = st.tuples(texts, st.none() | arguments, texts, st.booleans())  # content, call, thought, stopped
turns = st.lists(st.tuples(st.lists(samples, min_size=1, max_size=2), st.integers(0, 1)), min_size=1, max_size=9)


def by_javascript(value: Any) -> Any:
    """Return what JSON.parse and JSON.stringify make of it."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {name: by_javascript(item) for name, item in value.items()}
    return [by_javascript(item) for item in value] if isinstance(value, list) else value


def in_another_way(answer: JsonObject, stop_text: str, habits: Sequence[bool]) -> JsonObject:
    """Return an answer as a client with these habits sends it back."""
    drops_text, drops_thought, has_unix_ends, has_javascript, adds_stop = habits
    echo = dict(answer)
    if drops_thought:
        echo.pop("reasoning_content", None)
    if drops_text and "tool_calls" in echo:
        echo["content"] = ""
    if adds_stop and "tool_calls" not in echo:
        echo["content"] += stop_text
    if has_unix_ends:
        echo |= {k: v.replace("\r\n", "\n") for k, v in echo.items() if isinstance(v, str)}
    return by_javascript(echo) if has_javascript else echo


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "llama3", "mistral", "deepseek", "deepseek_r1"])
@given(turns=turns, data=st.data())
def test_any_mix_of_habits_continues_the_same_answers(
    families: dict[str, Renderer], name: str, turns: Any, data: st.DataObject
) -> None:
    verbatim, habitual = Talk(families[name]), Talk(families[name])
    history: list[tuple[JsonObject, str, JsonObject]] = []  # answers, their stop texts and what follows
    for number, (sampled, chosen) in enumerate(turns):
        echoes = [in_another_way(one, stop, data.draw(st.tuples(*[st.booleans()] * 5))) for one, stop, _ in history]
        before = verbatim.ask(QUESTION, *(m for one, _, after in history for m in (one, after)))
        now = habitual.ask(
            QUESTION, *(m for one, (*_, after) in zip(echoes, history, strict=True) for m in (one, after))
        )
        assert parent_of(now) == parent_of(before)
        assert (now.fork_at, list(now.path())) == (before.fork_at, list(before.path()))
        stop_text = STOP if sampled[0][3] else ""
        answers = [
            said(
                content if called is not None else f"{index} {content}",  # equal calls are told apart by their ids
                *([] if called is None else [call(f"{number:08}{index}", **called)]),
                thought=thought or ("hm" if now.is_thinking else ""),
            )
            for index, (content, called, thought, _) in enumerate(sampled)
        ]
        reason = verbatim.answer(before, *answers, stop_text=stop_text)
        assert habitual.answer(now, *answers, stop_text=stop_text) is reason
        answer = answers[chosen % len(answers)]
        calls = answer.get("tool_calls")
        after = {"role": "tool", "content": "1", "tool_call_id": calls[0]["id"]} if calls else QUESTION
        history.append((answer, stop_text, after))
    assert habitual.forest.audit() == 0


# -------------------------------------------------------------------------------------------------- each alone


@pytest.mark.parametrize(
    ("sampled", "echoed", "is_same"),
    [
        (1.0, 1, True),
        (1000, 1e3, True),
        (-0.0, 0, True),
        ([{"y": 2.0}], [{"y": 2}], True),
        (1.5, 1, False),
        (1, True, False),
        (0, False, False),
        ("1.0", "1", False),
        (2**53 + 1, 2**53, False),
        (2**53, 2.0**53, False),  # which may have been 2**53 + 1
        (10**20, 10**20, True),
        (10**20, 10**20 + 1, False),
    ],
)
def test_numbers_are_equal_by_value(talk: Talk, sampled: Any, echoed: Any, *, is_same: bool) -> None:
    talk.answer(talk.ask(QUESTION), said("", call(x=sampled)))
    talk.answer(talk.ask(QUESTION, said("", call(x=sampled)), QUESTION), said("one"))
    again = talk.ask(QUESTION, said("", call(x=echoed)), QUESTION, said("one"), QUESTION)
    assert parent_of(again) == ("c2" if is_same else None)


@pytest.mark.parametrize(
    ("echo", "parent"),
    [
        (said("", call("a", x=1)), "c1"),
        (said("", call("b", x=1)), "c2"),
        (said("one", call(x=1)), "c1"),
        (said(" two\n", call(x=1)), "c2"),
        (said("three", call(x=1)), None),
        (said("one"), None),
    ],
    ids=["left out", "left out by the other", "repeated", "the other's", "changed", "without the call"],
)
def test_text_beside_calls_may_be_left_out(talk: Talk, echo: JsonObject, parent: str | None) -> None:
    talk.answer(talk.ask(QUESTION), said("one", call("a", x=1)), said("two", call("b", x=1)))
    assert talk.continued(echo) == parent


def test_samples_that_differ_beside_their_calls_are_continued_without_a_fork(talk: Talk) -> None:
    one, two = said("one", call("a", x=1)), said("two", call("b", x=1))
    talk.answer(talk.ask(QUESTION), one, two)
    reasons = [talk.answer(talk.ask(QUESTION, echo, QUESTION), said("so")) for echo in (one, two, two)]
    assert reasons == [None, None, ForkReason.REPEATED]


def test_text_beside_a_call_that_nobody_sampled_counts(talk: Talk) -> None:
    example, other = said("an example", call(x=1)), said("another one", call(x=1))
    talk.answer(talk.ask(QUESTION, example, QUESTION), said("yes"))
    talk.answer(talk.ask(QUESTION, other, QUESTION), said("yes"))
    parents = [parent_of(talk.ask(QUESTION, one, QUESTION, said("yes"), QUESTION)) for one in (example, other)]
    assert parents == ["c1", "c2"]


def test_an_answer_that_sampled_the_stop_text_itself_is_another(talk: Talk) -> None:
    talk.answer(talk.ask(QUESTION), said(f"a{STOP}"))
    talk.answer(talk.ask(QUESTION), said("a"), stop_text=STOP)
    assert (talk.continued(said(f"a{STOP}")), talk.continued(said("a"))) == ("c1", "c2")


def test_a_conversation_with_numbers_is_recognised_as_sent(talk: Talk) -> None:
    read: list[int] = []

    def normalise(message: JsonObject, index: int) -> JsonObject:
        read.append(index)
        return message

    answer = said("", {**call(x=1, y=2**60, z=3.5), "index": 0})
    talk.answer(talk.ask(QUESTION), answer)
    talk.answer(talk.ask(QUESTION, answer, QUESTION), said("one"))
    history = [dict(message) for message in (QUESTION, answer, QUESTION, said("one"), QUESTION)]
    talk.forest.plan(history, TOOLS, normalise=normalise)
    assert read == [3, 4]
