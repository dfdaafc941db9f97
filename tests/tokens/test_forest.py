"""The forest of a session's turns:

- a conversation that continues keeps every token, and adds only what is new
- a conversation may have hundreds of turns
- an answer is recognised by what it says, not by its layout: white space, null content, ids, JSON spacing
- it may come back with a name, unless the template writes names; an answer that the agent brought keeps its own
- its reasoning may be left out, beside its content or in it
- a repeated prompt branches at the same place: `repeated`; one whose later messages are edited: `edited`
- it may be repeated with another opening of its answer, at any turn: otherwise the prompt is the same
- an answer that was changed or left out makes a root: `edited`, if a recorded request precedes it
- concurrent calls each continue their own answer, whatever their order
- an unknown first message makes a root: `new_conversation`; so do the same messages under other tools:
  `tools_changed`, and under another system message: `system_changed`
- of two answers that say the same, the one whose tool-call ids are repeated is continued, then the unused one
- a template that rewrites the history starts a new root: `template_rewrites_history`
- a request's identity is the same in every session, whatever else was asked there, and differs between repetitions and
  between openings
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from areal_agent.tokens.forest import Forest, Prompt, Reply
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import ForkReason, JsonObject

from .conftest import CHATML, as_it_is, parent_of

HELLO = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": "more"}
TOOLS = ({"type": "function", "function": {"name": "f"}},)


class Chat:
    """A forest, and an agent that talks with it: numbers its answers c1, c2 ... in order."""

    def __init__(self, renderer: Renderer) -> None:
        self.forest = Forest(renderer)
        self.renderer = renderer
        self.num_answers = 0

    def answer(self, prompt: Prompt, message: JsonObject, ids: Sequence[int] = ()) -> ForkReason | None:
        self.num_answers += 1
        token_ids = tuple(ids) or (*self.renderer.ids_of(message["content"]), self.renderer.end_token_id)
        name = f"c{self.num_answers}"
        reply = Reply(completion_id=name, token_ids=token_ids, message=message)
        return self.forest.record(prompt, [reply])

    def say(self, *messages: JsonObject, tools: Sequence[JsonObject] = (), opening: str = "") -> Prompt:
        return self.forest.plan(messages, tools, normalise=as_it_is, opening=opening)

    def turn(self, *messages: JsonObject, reply: str, tools: Sequence[JsonObject] = ()) -> ForkReason | None:
        return self.answer(self.say(*messages, tools=tools), assistant(reply))


@pytest.fixture
def chat(renderer: Renderer) -> Chat:
    return Chat(renderer)


def assistant(content: str, *calls: JsonObject) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def call(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


BEGUN = "<tool_call>"


def test_a_conversation_that_goes_on_keeps_every_token(chat: Chat) -> None:
    first = chat.say(HELLO)
    sampled = (300, 7, 250, chat.renderer.end_token_id)  # not what tokenising the text would give
    chat.answer(first, assistant("hi"), sampled)
    second = chat.say(HELLO, assistant("hi"), MORE)
    assert tuple(second.path())[: len(first.path()) + 4] == tuple(first.path()) + sampled
    bridge = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert chat.renderer.text_of(second.new_ids, has_ended=False) == bridge
    assert second.fork_at == second.num_tokens - len(second.new_ids)
    assert second.new_messages == (MORE,)


def test_a_conversation_may_have_hundreds_of_turns(chat: Chat) -> None:
    messages: list[JsonObject] = []
    for _ in range(400):
        messages.append(MORE)
        prompt = chat.say(*messages)
        chat.answer(prompt, assistant("hi"), (9,))
        messages.append(assistant("hi"))
    assert prompt.num_tokens == len(prompt.path())
    assert prompt.parent is not None
    assert sum(1 for _ in prompt.parent.lineage()) == 399


@pytest.mark.parametrize(
    "echo",
    [
        assistant("  hm\n", call("c", x=1, y=[2])),
        {"role": "assistant", "content": "hm", "tool_calls": [call("", y=[2], x=1)]},
    ],
    ids=["white space", "another id and key order"],
)
def test_an_answer_is_recognised_by_what_it_says(chat: Chat, echo: JsonObject) -> None:
    chat.answer(chat.say(HELLO), assistant("hm", call("c", x=1, y=[2])), (9,))
    assert parent_of(chat.say(HELLO, echo, MORE)) == "c1"


@pytest.mark.parametrize(
    "echo",
    [
        assistant("hm", call("c", x=2)),
        assistant("hm"),
        assistant("no", call("c", x=1)),
        assistant("hm", call("c", x=1), call("d", x=1)),
        {**assistant("hm", call("c", x=1)), "reasoning_content": "I think"},
    ],
)
def test_another_answer_is_not_recognised(chat: Chat, echo: JsonObject) -> None:
    chat.answer(chat.say(HELLO), assistant("hm", call("c", x=1)), (9,))
    assert parent_of(chat.say(HELLO, echo, MORE)) is None


def test_an_answer_may_come_back_with_a_name(chat: Chat) -> None:
    chat.turn(HELLO, reply="hi")
    prompt = chat.say(HELLO, {**assistant("hi"), "name": "Alice"}, MORE)
    assert parent_of(prompt) == "c1"
    assert chat.answer(prompt, assistant("so")) is None


def test_a_name_that_the_template_writes_starts_a_root(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        CHATML.replace("+ message.role +", "+ message.role + (' ' + message.name if message.name else '') +")
    )
    chat = Chat(Renderer.load(tmp_path))
    chat.turn(HELLO, reply="hi")
    messages = [HELLO, {**assistant("hi"), "name": "Alice"}, MORE]
    prompt = chat.say(*messages)
    assert list(prompt.path()) == chat.renderer.ids_of(chat.renderer.render(messages))
    assert "Alice" in chat.renderer.text_of(prompt.path(), has_ended=False)
    assert chat.answer(prompt, assistant("so")) is ForkReason.TEMPLATE_REWRITES_HISTORY


@pytest.mark.parametrize("aside", ["name", "reasoning_content"])
def test_an_answer_that_the_agent_brought_keeps_what_stands_beside_it(chat: Chat, aside: str) -> None:
    example = {**assistant("an example"), aside: "Alice"}
    chat.turn(HELLO, {**example, aside: "Bob"}, MORE, reply="hi")
    chat.turn(HELLO, example, MORE, reply="hi")
    assert parent_of(chat.say(HELLO, example, MORE, assistant("hi"), MORE)) == "c2"
    assert parent_of(chat.say(HELLO, {**example, aside: "Bob"}, MORE, assistant("hi"), MORE)) == "c1"


def test_a_repeated_prompt_branches(chat: Chat) -> None:
    chat.turn(HELLO, reply="hi")
    assert chat.turn(HELLO, reply="ho") is ForkReason.REPEATED
    chat.turn(HELLO, assistant("hi"), MORE, reply="yes")
    assert chat.turn(HELLO, assistant("hi"), MORE, reply="no") is ForkReason.REPEATED


@pytest.mark.parametrize("messages", [(HELLO,), (HELLO, assistant("hi"), MORE)], ids=["first turn", "second turn"])
@pytest.mark.parametrize("openings", [("", BEGUN, ""), (BEGUN, "", BEGUN)])
def test_a_repeated_prompt_may_begin_its_answer_in_another_way(
    chat: Chat, messages: Sequence[JsonObject], openings: Sequence[str]
) -> None:
    chat.answer(chat.say(HELLO), assistant("hi"), (300, 7, 250, chat.renderer.end_token_id))
    plain = chat.say(*messages)
    reasons: list[ForkReason | None] = []
    for opening in openings:
        prompt = chat.say(*messages, opening=opening)
        assert list(prompt.path()) == [*plain.path(), *chat.renderer.ids_of(opening)]
        assert (parent_of(prompt), prompt.fork_at) == (parent_of(plain), plain.fork_at)
        reasons.append(chat.answer(prompt, assistant("so")))
    assert reasons[1:] == [ForkReason.REPEATED] * 2


def test_an_answer_with_a_beginning_of_its_own_is_continued(chat: Chat) -> None:
    chat.turn(HELLO, reply="hi")
    forced = chat.say(HELLO, opening=BEGUN)
    sampled = (300, 7, chat.renderer.end_token_id)
    chat.answer(forced, assistant("", call("c", x=1)), sampled)
    prompt = chat.say(HELLO, assistant("", call("c", x=1)), MORE)
    assert parent_of(prompt) == "c2"
    assert tuple(prompt.path())[: prompt.fork_at] == tuple(forced.path()) + sampled


@pytest.mark.parametrize(
    "messages",
    [
        (HELLO, assistant("changed"), MORE),
        (HELLO, {**assistant("hi"), "reasoning_content": "I never thought so"}, MORE),
        (HELLO, MORE),
    ],
    ids=["its text", "its reasoning", "left out"],
)
def test_a_first_answer_that_was_changed_is_an_edit(chat: Chat, messages: Sequence[JsonObject]) -> None:
    chat.turn(HELLO, reply="hi")
    prompt = chat.say(*messages)
    assert parent_of(prompt) is None
    assert list(prompt.new_ids) == chat.renderer.ids_of(chat.renderer.render(messages))
    assert chat.answer(prompt, assistant("so")) is ForkReason.EDITED


def test_what_stands_before_an_edit_has_the_same_system_message(chat: Chat) -> None:
    chat.turn({"role": "system", "content": "be brief"}, HELLO, reply="hi")
    assert chat.turn(HELLO, assistant("changed"), MORE, reply="so") is ForkReason.NEW_CONVERSATION


def test_an_edited_history_branches_where_it_left(chat: Chat) -> None:
    chat.turn(HELLO, reply="hi")
    chat.turn(HELLO, assistant("hi"), MORE, reply="yes")
    edited = chat.say(HELLO, assistant("hi"), {"role": "user", "content": "else"}, assistant("yes"), MORE)
    assert parent_of(edited) == "c1"
    assert chat.answer(edited, assistant("so"), (9,)) is ForkReason.EDITED


@pytest.mark.parametrize(
    ("echo", "is_same"),
    [
        ({"content": "yes"}, True),
        ({"content": "yes", "reasoning_content": "hm"}, True),
        ({"content": "<think>hm</think>yes"}, True),
        ({"content": "yes", "reasoning_content": "so"}, False),
    ],
    ids=["left out", "beside", "inside", "other"],
)
def test_reasoning_may_be_left_out_but_not_changed(chat: Chat, echo: JsonObject, *, is_same: bool) -> None:
    chat.answer(chat.say(HELLO), {**assistant("yes"), "reasoning_content": "hm"}, (9,))
    prompt = chat.say(HELLO, {"role": "assistant", **echo}, MORE)
    assert (parent_of(prompt) == "c1") is is_same


def test_concurrent_calls_continue_their_own_answers(chat: Chat) -> None:
    left, right = chat.say(HELLO), chat.say(MORE)
    chat.answer(right, assistant("right"))
    chat.answer(left, assistant("left"))
    assert parent_of(chat.say(MORE, assistant("right"), HELLO)) == "c1"
    assert parent_of(chat.say(HELLO, assistant("left"), MORE)) == "c2"


def test_another_beginning_is_a_new_conversation(chat: Chat) -> None:
    chat.turn(HELLO, reply="hi")
    assert chat.turn(MORE, reply="hi") is ForkReason.NEW_CONVERSATION


def test_another_system_message_is_a_new_root(chat: Chat) -> None:
    chat.turn(HELLO, reply="hi")
    brief = {"role": "system", "content": "be brief"}
    assert chat.turn(brief, HELLO, reply="hi") is ForkReason.SYSTEM_CHANGED
    prompt = chat.say({"role": "system", "content": "be long"}, HELLO, assistant("hi"), MORE)
    assert parent_of(prompt) is None
    assert chat.answer(prompt, assistant("so")) is ForkReason.SYSTEM_CHANGED


def test_other_tools_are_a_new_root(chat: Chat) -> None:
    chat.turn(HELLO, reply="hi")
    assert chat.turn(HELLO, reply="hi", tools=TOOLS) is ForkReason.TOOLS_CHANGED
    assert parent_of(chat.say(HELLO, assistant("hi"), MORE)) == "c1"
    assert parent_of(chat.say(HELLO, assistant("hi"), MORE, tools=TOOLS)) == "c2"
    other_tools = ({"type": "function", "function": {"name": "g"}},)
    prompt = chat.say(HELLO, assistant("hi"), MORE, tools=other_tools)
    assert parent_of(prompt) is None
    assert chat.answer(prompt, assistant("so")) is ForkReason.TOOLS_CHANGED


def test_equal_answers_are_told_apart_by_their_call_ids(chat: Chat) -> None:
    for call_id in ("a", "b"):
        chat.answer(chat.say(HELLO), assistant("", call(call_id, x=1)), (9,))
    result = {"role": "tool", "content": "1"}
    assert parent_of(chat.say(HELLO, assistant("", call("b", x=1)), result)) == "c2"
    assert parent_of(chat.say(HELLO, assistant("", call("a", x=1)), result)) == "c1"


def test_equal_answers_without_ids_are_used_in_turn(chat: Chat) -> None:
    for ids in ((9,), (10,)):
        chat.answer(chat.say(HELLO), assistant("yes"), ids)
    assert chat.turn(HELLO, assistant("yes"), MORE, reply="a") is None
    assert parent_of(chat.say(HELLO, assistant("yes"), MORE)) == "c2"


def test_a_template_that_rewrites_history_starts_a_root(rewriting_folder: Path) -> None:
    chat = Chat(Renderer.load(rewriting_folder))
    chat.turn(HELLO, reply="hi")
    prompt = chat.say(HELLO, assistant("hi"), MORE)
    assert parent_of(prompt) is None
    assert chat.answer(prompt, assistant("so")) is ForkReason.TEMPLATE_REWRITES_HISTORY
    assert list(prompt.new_ids) == chat.renderer.ids_of(chat.renderer.render([HELLO, assistant("hi"), MORE]))


def test_identity_is_the_same_in_every_session_and_tells_requests_apart(renderer: Renderer) -> None:
    one, other = Chat(renderer), Chat(renderer)
    other.say(MORE)  # another order of events
    forced = other.say(HELLO, opening=BEGUN)
    other.answer(forced, assistant("hi"))
    first = one.say(HELLO).identity
    assert first == other.say(HELLO).identity
    assert len({first, one.say(HELLO).identity, one.say(HELLO, tools=TOOLS).identity, forced.identity}) == 4
