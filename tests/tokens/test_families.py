"""The model families: Qwen2.5, Qwen3, Llama 3, Mistral, DeepSeek V3 and R1.

- any conversation with canonical answers, tool loops and chats, has the ids of the template's full rendering, turn by
  turn, and every answer is in it as it was sampled, except for thinking that the template strips; a call that is forced
  anywhere has the same prompt, followed by the beginning of the call
- a turn adds only what is new
- a template that moves its tools to the last question starts a new root there
- stripped thinking causes a fork at the first stripped answer; in a tool loop it stays; kept thinking never forks
- however the thinking is stripped, each sampled token is in the loss once
- an answer whose beginning was forced is one block with it
- a forced beginning ends the thinking first, if and only if the template has opened some
- the prompt says whether the template opened the thinking
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.tokens.forest import Forest, Prompt, Reply
from areal_agent.tokens.records import token_records
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.template import HistoryThinking
from areal_agent.types import ForkReason, JsonObject, Trajectory, Turn
from tests import histories

from .conftest import as_it_is

NAMES = ("qwen25", "qwen3", "llama3", "mistral", "deepseek", "deepseek_r1")
THINKING = ("qwen3", "deepseek_r1")
TOOLS = ({"type": "function", "function": {"name": "f", "description": "adds", "parameters": {"type": "object"}}},)
CALL_ID = "abcdefghi"


@dataclass(kw_only=True)
class Chat:
    """An agent and a model that writes what its template would write."""

    renderer: Renderer
    tools: Sequence[JsonObject] = ()
    forest: Forest = field(init=False)
    messages: list[JsonObject] = field(default_factory=list[JsonObject])
    full: list[JsonObject] = field(default_factory=list[JsonObject])  # with the thinking
    prompts: list[Prompt] = field(default_factory=list[Prompt])
    reasons: list[ForkReason | None] = field(default_factory=list[ForkReason | None])
    answers: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    def __post_init__(self) -> None:
        self.forest = Forest(self.renderer)

    def hear(self, *messages: JsonObject) -> Prompt:
        self.messages += messages
        self.full += messages
        self.prompts.append(self.forest.plan(list(self.messages), self.tools, normalise=as_it_is))
        return self.prompts[-1]

    def force(self) -> Prompt:
        """Ask the last question again, with an answer that must be a call."""
        opening = self.renderer.answer_format.opening("f")
        prompt = self.forest.plan(list(self.messages), self.tools, normalise=as_it_is, opening=opening)
        said = {"role": "assistant", "content": "a forced call"}
        self.forest.record(prompt, [Reply(completion_id=f"f{len(self.prompts)}", token_ids=(9,), message=said)])
        return prompt

    def say(self, content: str, *, calls: bool = False, thought: str = "") -> None:
        prompt = self.prompts[-1]
        content = "" if calls and self.renderer.arrangement.has_text_apart else content
        thought = thought or ("hm" if prompt.is_thinking else "")
        call = {"id": CALL_ID, "type": "function", "function": {"name": "f", "arguments": {"x": len(content)}}}
        message = {"role": "assistant", "content": content, **({"tool_calls": [call]} if calls else {})}
        text = self._written(message)
        if thought:
            opened = "" if prompt.is_thinking else "<think>\n"
            text = f"{opened}{thought}\n</think>\n\n{text}"
        ids = (*self.renderer.ids_of(text), self.renderer.end_token_id)
        said = {**message, "reasoning_content": thought} if thought else message
        name = f"c{len(self.prompts)}"
        reply = Reply(completion_id=name, token_ids=ids, message=said, has_thinking=bool(thought))
        self.reasons.append(self.forest.record(prompt, [reply]))
        self.answers.append(ids)
        self.messages.append(message)  # as most clients do, without the thinking
        full = f"<think>\n{thought}\n</think>{content}" if thought else content
        self.full.append({**message, "content": full})

    def _written(self, message: JsonObject) -> str:
        """Return what the template writes for an answer that is followed by something, without thinking and end."""
        tool_calls = message.get("tool_calls")
        after = {"role": "tool", "content": "1", "tool_call_id": CALL_ID} if tool_calls else user("next")
        text = self.renderer.render([*self._history_without_tools(), message, after], ())
        ended = self.renderer.split_at_end(text.removeprefix(self._before(message)))
        assert ended
        return ended.answer

    def _before(self, message: JsonObject) -> str:
        return self.renderer.split_opened(self.renderer.render(self._history_without_tools(), ()))[0]

    @staticmethod
    def _history_without_tools() -> list[JsonObject]:
        return [user("a question")]

    def trajectory(self) -> Trajectory:
        starts = itertools.accumulate((len(ids) for ids in self.answers), initial=0)
        turns = [
            turn_of(number, prompt, ids, start)
            for number, (prompt, ids, start) in enumerate(zip(self.prompts, self.answers, starts, strict=False), 1)
        ]
        return histories.trajectory("s", (), 1.0, turns=tuple(turns))

    def rendered_ids(self, *, opening: str = "") -> list[int]:
        """Return the ids of the template's own rendering, and of the beginning of a forced answer."""
        text, opened = self.renderer.split_opened(self.renderer.render(self.full, self.tools))
        opened = self.renderer.opened_before(opening, opened)
        return self.renderer.ids_of(text + opened) + self.renderer.ids_of(opening)


def turn_of(number: int, prompt: Prompt, token_ids: tuple[int, ...], first_logprob: int) -> Turn:
    """Return a turn whose log-probabilities count down, so that each token has its own."""
    logprobs = tuple(float(-first_logprob - n) for n in range(len(token_ids)))
    return histories.turn(
        f"t{number}",
        histories.completion(f"c{number}", [0] * len(token_ids), token_ids=token_ids, logprobs=logprobs),
        parent=prompt.parent.completion_id if prompt.parent else None,
        fork_at=prompt.fork_at,
        new_prompt_ids=tuple(prompt.new_ids),
    )


def user(text: str) -> JsonObject:
    return {"role": "user", "content": text}


def result(text: str) -> JsonObject:
    return {"role": "tool", "content": text, "tool_call_id": CALL_ID}


def contains(path: Sequence[int], part: Sequence[int]) -> bool:
    return any(tuple(path[n : n + len(part)]) == tuple(part) for n in range(len(path)))


texts = st.text(max_size=12) | st.sampled_from(
    ["<|im_end|>", "[/INST]", "<｜User｜>x", "<|eot_id|>", "<think>", "</think>", "   \n\n ", "é漢 3", "</s>"]
)
words = st.text(alphabet="abc xyz", min_size=1, max_size=9).map(lambda text: "a" + text + "b")
turns = st.lists(st.tuples(texts, words, st.booleans(), st.booleans()), min_size=1, max_size=16)


@given(
    name=st.sampled_from(NAMES), system=st.none() | words, turns=turns, has_tools=st.booleans(), forces=st.booleans()
)
def test_prompts_have_the_ids_of_the_full_rendering(
    families: dict[str, Renderer],
    name: str,
    system: str | None,
    turns: list[tuple[str, str, bool, bool]],
    has_tools: bool,
    forces: bool,
) -> None:
    chat = Chat(renderer=families[name], tools=TOOLS if has_tools else ())
    if system is not None:
        head = [{"role": "system", "content": system}]
        chat.messages += head
        chat.full += head
    is_called = False
    for text, content, calls, thinks in turns:
        prompt = chat.hear(result(text) if is_called else user(text))
        assert list(prompt.path()) == chat.rendered_ids()
        if forces:
            forced = chat.force()
            assert list(forced.path()) == chat.rendered_ids(opening=forced.opening)
        chat.say(content, calls=calls, thought="hm" if thinks and name in THINKING else "")
        is_called = calls
        if prompt.parent and prompt.fork_at == prompt.parent.path_length:
            assert contains(prompt.path(), prompt.parent.sampled)
    assert chat.forest.audit() == 0
    assert families[name].may_elide


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_adds_what_is_new(families: dict[str, Renderer], name: str) -> None:
    chat = Chat(renderer=families[name], tools=TOOLS)
    chat.hear(user("hello"))
    for number in range(40):
        chat.say(f"step {number}", calls=True)
        prompt = chat.hear(result(f"result {number}"))
        assert prompt.parent is not None
        assert prompt.fork_at >= prompt.parent.prompt.block_at
        assert len(prompt.new_ids) < 80
        assert "result" in chat.renderer.text_of(prompt.new_ids, has_ended=False)


def test_tools_that_move_start_a_root(families: dict[str, Renderer]) -> None:
    chat = Chat(renderer=families["mistral"], tools=TOOLS)
    chat.hear(user("hello"))
    chat.say("hi")
    prompt = chat.hear(user("more"))
    chat.say("yes")
    assert prompt.parent is None
    assert chat.reasons == [None, ForkReason.TEMPLATE_REWRITES_HISTORY]


def test_a_thoughtful_chat_is_a_trunk_with_leaves(families: dict[str, Renderer]) -> None:
    chat = Chat(renderer=families["qwen3"])
    for number in range(20):
        prompt = chat.hear(user(f"question {number}"))
        chat.say(f"answer {number}", thought="hm")
        if number:
            assert prompt.parent is not None
            assert prompt.fork_at == prompt.parent.prompt.num_tokens  # all of the old prompt, none of the thinking
            slice_behind_thinking = chat.answers[number - 1][-len(chat.renderer.ids_of(f"answer {number - 1}")) - 1 :]
            assert tuple(prompt.new_ids)[: len(slice_behind_thinking)] == slice_behind_thinking
    assert chat.reasons == [None] + [ForkReason.TEMPLATE_STRIPS_THINKING] * 19


def test_a_tool_loop_keeps_its_thinking_until_the_next_question(families: dict[str, Renderer]) -> None:
    chat = Chat(renderer=families["qwen3"], tools=TOOLS)
    first = chat.hear(user("hello"))
    for number in range(6):
        chat.say(f"step {number}", calls=True, thought="hm")
        chat.hear(result("1"))
    chat.say("done", thought="hm")
    prompt = chat.hear(user("more"))
    assert list(prompt.path()) == chat.rendered_ids()
    chat.say("so")
    assert chat.reasons == [None] * 7 + [ForkReason.TEMPLATE_STRIPS_THINKING]
    assert prompt.parent is not None
    assert prompt.parent.completion_id == "c7"
    assert prompt.fork_at == first.num_tokens
    assert "hm" not in chat.renderer.text_of(prompt.path(), has_ended=False)


@given(name=st.sampled_from(THINKING), turns=turns)
def test_each_sampled_token_is_in_the_loss_once(
    families: dict[str, Renderer], name: str, turns: list[tuple[str, str, bool, bool]]
) -> None:
    chat, is_called = Chat(renderer=families[name], tools=TOOLS), False
    for text, content, calls, thinks in turns:
        chat.hear(result(text) if is_called else user(text))
        chat.say(content, calls=calls, thought="hm" if thinks else "")
        is_called = calls
    trained = [
        (logprob, token_id)
        for record in token_records(chat.trajectory())
        for logprob, token_id in zip(
            record.behavior_logprobs[record.loss_mask], record.token_ids[record.loss_mask], strict=True
        )
    ]
    sampled = [token_id for ids in chat.answers for token_id in ids]
    assert sorted(trained, reverse=True) == [(-number, token_id) for number, token_id in enumerate(sampled)]


@pytest.mark.parametrize("name", THINKING)
def test_kept_thinking_never_forks(family_folders: dict[str, Path], name: str) -> None:
    chat = Chat(renderer=Renderer.load(family_folders[name], history_thinking=HistoryThinking.KEEP), tools=TOOLS)
    for number in range(12):
        prompt = chat.hear(user(f"question {number}"))
        assert list(prompt.path()) == chat.rendered_ids()
        chat.say("answer", thought="hm")
    assert chat.reasons == [None] * 12


def test_unfinished_thinking_is_stripped_whole(families: dict[str, Renderer]) -> None:
    renderer = families["qwen3"]
    forest = Forest(renderer)
    hello, empty = user("hello"), {"role": "assistant", "content": ""}
    first = forest.plan([hello], (), normalise=as_it_is)
    cut_off = tuple(renderer.ids_of("<think>\nhm hm"))
    reply = Reply(
        completion_id="c1", token_ids=cut_off, message={**empty, "reasoning_content": "hm hm"}, has_thinking=True
    )
    forest.record(first, [reply])
    prompt = forest.plan([hello, empty, user("more")], (), normalise=as_it_is)
    assert prompt.fork_at == first.num_tokens
    assert list(prompt.path()) == renderer.ids_of(renderer.render([hello, empty, user("more")]))


def test_a_forced_beginning_belongs_to_the_answer(families: dict[str, Renderer]) -> None:
    renderer = families["qwen25"]
    forest, hello = Forest(renderer), user("hello")
    opening = '<tool_call>\n{"name": "f", "arguments": '
    first = forest.plan([hello], TOOLS, normalise=as_it_is, opening=opening)
    assert renderer.text_of(first.new_ids, has_ended=False).endswith("assistant\n" + opening)
    call = {"id": "", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    sampled = (*renderer.ids_of('{"x": 1}}\n</tool_call>'), renderer.end_token_id)
    forest.record(first, [Reply(completion_id="c1", token_ids=sampled, message=message)])
    prompt = forest.plan([hello, message, result("1")], TOOLS, normalise=as_it_is)
    assert prompt.fork_at == first.num_tokens + len(sampled)
    text = renderer.text_of(prompt.path(), has_ended=False)
    assert text == renderer.render([hello, message, result("1")], TOOLS)


def test_a_forced_call_has_no_thinking_as_the_template_writes_one(families: dict[str, Renderer]) -> None:
    chat = Chat(renderer=families["deepseek_r1"], tools=TOOLS)
    text = chat.renderer.text_of(chat.hear(user("hello")).path(), has_ended=False)
    forced = chat.renderer.text_of(chat.force().path(), has_ended=False)
    assert (
        forced
        == text.removesuffix("<think>\n")
        + "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json"
    )


@pytest.mark.parametrize(("name", "is_thinking"), [("qwen3", False), ("deepseek", False), ("deepseek_r1", True)])
def test_the_prompt_says_whether_thinking_is_opened(
    families: dict[str, Renderer], name: str, is_thinking: bool
) -> None:
    prompt = Forest(families[name]).plan([user("hello")], (), normalise=as_it_is)
    assert prompt.is_thinking is is_thinking
