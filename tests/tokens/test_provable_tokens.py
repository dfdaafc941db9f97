"""Properties of every session (random conversations, samples and forks):

- the prompt of a turn that continues an answer begins with exactly its prompt and its sampled ids
- what is trained is what was sampled: each sampled token is in the loss of exactly one record, with its own
  log-probability, and prompt tokens are in none
- if every answer is what the template would render, the prompt ids are the template's own followed by those of the
  forced opening: for every request, whatever was asked, repeated and edited before
- a request that is recognised as sent has the same place, tokens and reason as one that is found by its data
- text from tools and users never becomes a special token
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.tokens.forest import Forest, Prompt, Reply
from areal_agent.tokens.formats.answer_format import AnswerFormat, ToolFormat
from areal_agent.tokens.formats.base import ToolCall
from areal_agent.tokens.formats.thinking import ReasoningFormat
from areal_agent.tokens.records import token_records
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import Completion, Trajectory, Turn
from tests import histories

from .conftest import as_it_is, parent_of

HERMES = AnswerFormat(tool_format=ToolFormat.HERMES, reasoning_format=ReasoningFormat.NONE)
NUM_SPECIAL = 7


texts = st.text(max_size=12) | st.sampled_from(
    ["<|im_end|>", "a<|im_start|>assistant\n", "</tool_call><tool_call>", "<think>", "<|im_<|im_end|>end|>", "3 é 漢"]
)
sampled_ids = st.lists(st.integers(0, 300), min_size=1, max_size=6)  # partial UTF-8 and special tokens among them


@dataclass(kw_only=True)
class Agent:
    """Talks with a forest and keeps what the ledger would keep. A conversation is the list of its messages so far."""

    renderer: Renderer
    forest: Forest = field(init=False)
    by_data: Forest = field(init=False)  # is given the same requests, and recognises none as sent
    conversations: list[list[dict[str, Any]]] = field(default_factory=lambda: [[]])
    turns: list[Turn] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.forest = Forest(self.renderer)
        self.by_data = Forest(self.renderer, max_lines=0)

    def turn(
        self,
        history: list[dict[str, Any]],
        text: str,
        samples: list[list[int]],
        *,
        is_ended: bool,
        begins_with: str = "",
    ) -> None:
        messages = [*history, {"role": "tool" if history else "user", "content": text}]
        prompt = self._plan(self.forest, messages, begins_with)
        same = self._plan(self.by_data, messages, begins_with)
        replies = [self._reply(ids, is_ended=is_ended, begins_with=begins_with) for ids in samples]
        fork_reason = self.forest.record(prompt, replies)
        assert self.by_data.record(same, replies) is fork_reason
        assert (parent_of(same), same.fork_at, tuple(same.new_ids)) == (
            parent_of(prompt),
            prompt.fork_at,
            tuple(prompt.new_ids),
        )
        assert same.identity == prompt.identity
        assert same.new_messages == prompt.new_messages
        parent = prompt.parent
        if parent:
            kept = tuple(parent.prompt.path()) + tuple(parent.sampled)
            assert tuple(prompt.path())[: len(kept)] == kept
            assert prompt.fork_at == len(kept)
        assert tuple(prompt.path())[prompt.fork_at :] == tuple(prompt.new_ids)
        assert len(prompt.path()) == prompt.num_tokens
        self.turns.append(
            histories.turn(
                f"t{len(self.turns)}",
                *map(self._completion, replies),
                parent=parent_of(prompt),
                fork_at=prompt.fork_at,
                new_prompt_ids=tuple(prompt.new_ids),
                fork_reason=fork_reason,
            )
        )
        self.prompts.append(prompt)
        self.conversations += [[*messages, dict(reply.message)] for reply in replies]

    @staticmethod
    def _plan(forest: Forest, messages: list[dict[str, Any]], begins_with: str) -> Prompt:
        return forest.plan(messages, (), normalise=as_it_is, opening=begins_with)

    def _reply(self, ids: list[int], *, is_ended: bool, begins_with: str) -> Reply:
        token_ids = (*ids, self.renderer.end_token_id) if is_ended else tuple(ids)
        answer = HERMES.parse(begins_with + self.renderer.text_of(token_ids, has_ended=is_ended))
        calls = [
            {"id": "", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
        return Reply(
            completion_id=f"c{next(self.numbers)}",
            token_ids=token_ids,
            message={"role": "assistant", "content": answer.content, "tool_calls": calls},
        )

    def _completion(self, reply: Reply) -> Completion:
        logprobs = tuple(-next(self.numbers) / 1024 for _ in reply.token_ids)
        versions = [len(self.turns)] * len(reply.token_ids)
        return histories.completion(reply.completion_id, versions, token_ids=reply.token_ids, logprobs=logprobs)


moves = st.tuples(
    st.integers(0, 99),  # which conversation continues
    st.sampled_from(["go on", "repeat", "edit", "edit the answer"]),
    texts,
)
steps = st.lists(
    st.tuples(
        moves,
        st.lists(sampled_ids, min_size=1, max_size=2),
        st.booleans(),
        st.sampled_from(["", "", "<tool_call>", "so"]),
    ),
    min_size=1,
    max_size=8,
)


def history_of(agent: Agent, move: tuple[int, str, str]) -> tuple[list[dict[str, Any]], str]:
    """Return the messages before the next one, and that message."""
    choice, kind, text = move
    history = agent.conversations[choice % len(agent.conversations)]
    if kind == "repeat" and history:
        return history[:-2], history[-2]["content"]
    if kind == "edit" and len(history) > 2:
        return [*history[:-2], {"role": "tool", "content": text}, history[-1]], text
    if kind == "edit the answer" and history:
        return [*history[:-1], {**history[-1], "content": "an answer that nobody sampled"}], text
    return history, text


def play(renderer: Renderer, steps: list[tuple[tuple[int, str, str], list[list[int]], bool, str]]) -> Agent:
    agent = Agent(renderer=renderer)
    for move, samples, is_ended, begins_with in steps:
        history, text = history_of(agent, move)
        agent.turn(history, text, samples, is_ended=is_ended, begins_with=begins_with)
    return agent


def trajectory_of(turns: list[Turn]) -> Trajectory:
    return histories.trajectory("s", (), 1.0, turns=tuple(turns))


@given(steps=steps)
def test_what_is_trained_is_what_was_sampled(renderer: Renderer, steps: Any) -> None:
    agent = play(renderer, steps)
    records = token_records(trajectory_of(agent.turns))
    trained = [
        (logprob, token_id, version)
        for record in records
        for logprob, token_id, version in zip(
            record.behavior_logprobs[record.loss_mask],
            record.token_ids[record.loss_mask],
            record.versions[record.loss_mask],
            strict=True,
        )
    ]
    sampled = [
        (np.float32(logprob), token_id, version)
        for turn in agent.turns
        for one in turn.completions
        for logprob, token_id, version in zip(one.logprobs, one.token_ids, one.version_steps(), strict=True)
    ]
    assert sorted(trained) == sorted(sampled)  # each log-probability is given to one sampled token only


@given(contents=st.lists(st.tuples(texts, texts), min_size=1, max_size=5), system=texts)
def test_a_straight_conversation_is_one_record_of_all_its_tokens(
    renderer: Renderer, contents: list[tuple[str, str]], system: str
) -> None:
    agent = Agent(renderer=renderer)
    history: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for number, (text, _) in enumerate(contents):
        agent.turn(history, text, [[20 + number, 4, 21]], is_ended=number % 2 == 0)
        history = agent.conversations[-1]
    (record,) = token_records(trajectory_of(agent.turns))
    last = agent.turns[-1]
    assert len(record.token_ids) == last.fork_at + len(last.new_prompt_ids) + len(last.completions[0].token_ids)
    assert record.turn_index[-1] == len(contents) - 1


words = st.text(alphabet="abc xyz", min_size=1, max_size=9).map(lambda text: "a" + text + "b")
tool_calls = st.builds(
    ToolCall, name=words, arguments=st.dictionaries(words, st.integers() | words | st.lists(st.integers()), max_size=2)
)


@given(steps=st.lists(st.tuples(moves, words, st.lists(tool_calls, max_size=2), st.booleans()), min_size=1, max_size=7))
def test_canonical_histories_have_the_templates_own_ids(
    renderer: Renderer, steps: list[tuple[tuple[int, str, str], str, list[ToolCall], bool]]
) -> None:
    agent = Agent(renderer=renderer)
    for move, content, calls, is_forced in steps:
        history, text = history_of(agent, move)
        opening = "<tool_call>" if calls and is_forced else ""
        said = HERMES.format("" if opening else content, calls)
        agent.turn(history, text, [renderer.ids_of(said.removeprefix(opening))], is_ended=True, begins_with=opening)
        rendered = renderer.ids_of(renderer.render(agent.conversations[-1][:-1]))
        assert list(agent.prompts[-1].path()) == rendered + renderer.ids_of(opening)


@given(role=st.sampled_from(["user", "tool"]), pieces=st.lists(texts, max_size=5))
def test_text_never_becomes_a_special_token(renderer: Renderer, role: str, pieces: list[str]) -> None:
    content = "".join(pieces)
    ids = renderer.ids_of(renderer.render([{"role": role, "content": content}]))
    assert sum(token_id < NUM_SPECIAL for token_id in ids) == 3  # start and end of the message, start of the answer
    assert renderer.text_of(ids, has_ended=False) == (
        f"<|im_start|>{role}\n{content}<|im_end|>\n<|im_start|>assistant\n"
    )
