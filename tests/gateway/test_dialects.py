"""The same episodes through three protocols (`areal_agent.conformance URL`). By the depth of the conversation, the
engine answers with text, reasoning, calls, parallel ones, a broken one, and nothing:

- each episode, through each protocol, has the records that it has through chat completions
- what the episodes are for does happen: calls, forced ones, retries, streams cut off, edits, limits
- `previous_response_id` is used wherever the history allows it
- an edited history, another number of requests, and each fact that differs, is found and told in plain words
- the command tells of each play, of fields that only one protocol has, and of an engine that does not sample the same
  twice; its exit code is 0 or 1
"""

import asyncio
import itertools
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from areal_agent.conformance.__main__ import main
from areal_agent.conformance.protocols import DATA, DIALECTS, FACTS, NOT_REPEATABLE, Answer, Player, difference
from areal_agent.errors import GatewayError
from areal_agent.gateway.auth import KEY_VARIABLE
from areal_agent.tokens.formats.base import ToolCall
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import GenerateRequest
from tests.tokens.conftest import FAMILIES, TEMPLATES, train_tokenizer

from .conftest import ADMIN_KEY, OpenWorld, WatchedEngine

ANSWERS = (
    "<think>\nBoth, at once.\n</think>\n\nI look.\n"
    '<tool_call>{"name": "weather", "arguments": {"city": "Zürich", "days": 2.0}}</tool_call>\n'
    '<tool_call>\n{"arguments": {"code": "a = \\"\\u00e9\\"\\n"}, "name": "python"}\n</tool_call><|im_end|>',
    '<tool_call>{"name": "python", "arguments": {}}</tool_call><|im_end|>',
    "<think>\n</think>\n\n  It is **so**. \n<|im_end|>",
    "<tool_call>{broken<|im_end|>",
    "<|im_end|>",
)
FORCED = '\n{"name": "weather", "arguments": {"city": "Bern"}}</tool_call><|im_end|>'
EPISODES: dict[str, Any] = {episode["name"]: episode for episode in DATA["episodes"]}
CASES = [("hermes", first) for first in range(1, len(ANSWERS))]  # the test of the command plays from the first on
CASES += [("qwen25", 0), ("qwen3", 0), ("deepseek_r1", 0), ("llama3", 1)]  # Llama 3's template takes one call at a time
TURN = {"deepseek_r1": "<｜Assistant｜>", "llama3": "assistant<|end_header_id|>"}  # else: as in ChatML
CHAT = DIALECTS[0]
OTHERS = {dialect.name: dialect for dialect in DIALECTS[1:]}


def answers_of(renderer: Renderer, family: str) -> list[str]:
    """Return ANSWERS in the format of a family; where they have a broken call, there is nothing."""
    write, end = renderer.answer_format.format, FAMILIES[family].eos
    calls = (
        ToolCall(name="weather", arguments={"city": "Zürich", "days": 2.0}),
        ToolCall(name="python", arguments={"code": 'a = "é"\n'}),
    )
    thought = "Both, at once." if family in ("qwen3", "deepseek_r1") else None
    texts = [write("I look.", calls, reasoning=thought), write("", calls[:1]), write("  It is **so**. \n"), "", ""]
    return [text + end for text in texts]


async def open_player(
    open_world: OpenWorld, first: int = 0, family: str = "hermes", *, drift: Callable[[], int] = int
) -> Player:
    """Open a gateway whose answers depend on the prompt's depth, from the `first` on, and on `drift`."""
    options, answers = {}, ANSWERS
    if family != "hermes":
        renderer = Renderer(train_tokenizer((TEMPLATES / f"{family}.jinja").read_text(), FAMILIES[family]))
        options, answers = {"model": renderer, "vocab_size": 1000}, answers_of(renderer, family)

    def script(request: GenerateRequest) -> list[int]:
        text = world.renderer.detokenizer.text_of(request.input_ids)
        number = first + text.count(TURN.get(family, "assistant\n")) - 1 + drift()
        return world.ids(FORCED if text.endswith("<tool_call>") else answers[number % len(answers)])

    # A token at each turn of the event loop, so that a client can hang up in mid-stream.
    engine: Any = WatchedEngine(script, clock=asyncio.get_running_loop(), token_s=0.0)
    world = await open_world(engine=engine, max_context_tokens=8000, **options)
    return Player(world.http, world.url, ADMIN_KEY, seed=1, max_tokens=200)


@pytest.mark.parametrize(("family", "first"), CASES)
async def test_it_records_what_chat_records(open_world: OpenWorld, family: str, first: int) -> None:
    player = await open_player(open_world, first, family)
    for name, episode in EPISODES.items():
        reference = await player.play(episode, CHAT)
        for dialect in DIALECTS[1:]:
            found = difference(await player.play(episode, dialect), reference)
            assert found is None, (name, dialect.name, found)


async def test_episodes_do_what_they_are_for(open_world: OpenWorld) -> None:
    player = await open_player(open_world)
    plays = {name: await player.play(episode, CHAT) for name, episode in EPISODES.items()}
    told = ("fork reason", "end")
    seen = {name: {record[fact] for record in play.records if record for fact in told} for name, play in plays.items()}
    assert plays["tools"].num_calls == 3
    assert plays["parallel calls"].num_calls == 3
    assert plays["forced calls"].num_calls == 2
    assert "repeated" in seen["retries"]
    assert {"abort", "repeated"} <= seen["streams cut off"]
    assert len(plays["streams cut off"].cut) == 2
    assert {"edited", "new_conversation"} <= seen["edited history"]
    assert "length" in seen["cut by the limit"]


async def test_what_an_earlier_answer_stands_for_is_not_sent_again() -> None:
    by_id = OTHERS["previous_response_id"]
    question: Any = {"role": "user", "content": "?"}
    answer = Answer("resp_1", [{"type": "message"}], [], (question,))
    body = by_id.body((question, answer, question), None, [], must_call=False)
    assert (body["previous_response_id"], len(body["input"])) == ("resp_1", 1)
    edited: Any = {"role": "user", "content": "!"}
    body = by_id.body((edited, answer, question), None, [], must_call=False)
    assert ("previous_response_id" in body, len(body["input"])) == (False, 3)


async def test_an_edited_history_is_a_difference(open_world: OpenWorld) -> None:
    player = await open_player(open_world)
    episode = deepcopy(EPISODES["tools"])
    reference = await player.play(episode, CHAT)
    episode["asks"][2]["user"] = "And 2**11, by python?"
    found = difference(await player.play(episode, OTHERS["messages"]), reference)
    assert found and found.startswith("request 3: prompt ids: at ")


async def test_each_fact_and_each_record_counts(open_world: OpenWorld) -> None:
    play = await (await open_player(open_world)).play(EPISODES["tools"], CHAT)
    for name in FACTS:
        other = deepcopy(play)
        record: Any = other.records[1]
        match record[name]:
            case list() as ids:
                ids[-1] += 1
            case dict() as sampling:
                sampling["seed"] = -1
            case _:
                record[name] = "another"
        found = difference(other, play)
        assert found and found.startswith(f"request 2: {name}: ")
    other.records[1] = None
    assert difference(other, play) == "request 2 is not in the ledger"


async def test_the_command_where_all_are_equal(open_world: OpenWorld, capsys: Any, monkeypatch: Any) -> None:
    player = await open_player(open_world)
    monkeypatch.setenv(KEY_VARIABLE, ADMIN_KEY)
    assert await asyncio.to_thread(main, [player.url, "--max-tokens", "200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  messages              equal" in lines
    assert "not compared, only /v1/chat/completions has them: choices, created" in lines
    assert lines[-1] == f"all of {3 * len(EPISODES)} plays are equal to chat"


async def test_the_command_where_an_engine_does_not_repeat_itself(open_world: OpenWorld, capsys: Any) -> None:
    player = await open_player(open_world, drift=itertools.count().__next__)
    assert await asyncio.to_thread(main, [player.url, "--admin-key", ADMIN_KEY]) == 1
    out = capsys.readouterr().out
    assert f"chat differs from itself, too: {NOT_REPEATABLE}" in out
    assert f"of {3 * len(EPISODES)} plays differ from chat" in out


async def test_the_command_where_nothing_can_be_played(open_world: OpenWorld) -> None:
    world = await open_world(max_context_tokens=100)
    with pytest.raises(
        GatewayError, match="cannot begin the episode 'tools': This model's maximum context length is 100"
    ):
        await asyncio.to_thread(main, [world.url, "--admin-key", ADMIN_KEY])


async def test_the_command_with_a_wrong_key(open_world: OpenWorld) -> None:
    player = await open_player(open_world)
    with pytest.raises(GatewayError, match="401"):
        await asyncio.to_thread(main, [player.url, "--admin-key", "sk-another"])
