"""The same episodes through three protocols (`areal_agent.conformance`), with an engine that answers with parallel calls,
reasoning and broken calls:

- each episode through each protocol gives the records that it gives through chat completions
- what episodes are made for does happen: calls, forced calls, branches, repeats, partial streams
- another history, and every fact that differs, is found and told in plain words
- the command: a line for each play, the fields of one protocol, exit code 0; 1 where something differs
"""

import asyncio
from copy import deepcopy
from typing import Any

import pytest

from areal_agent import conformance
from areal_agent.conformance import DATA, DIALECTS, Dialect, Play, Player, difference
from areal_agent.types import GenerateRequest

from .conftest import ADMIN_KEY, OpenWorld, WatchedEngine, World

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
CASES = [(name, 0) for name in EPISODES] + [("tools", 2), ("reasoning", 3)]
CHAT = DIALECTS[0]
OTHERS = {dialect.name: dialect for dialect in DIALECTS[1:]}


async def open_player(open_world: OpenWorld, first: int = 0) -> Player:
    """Open a gateway whose answers depend on the prompt's depth alone, from one of ANSWERS on."""

    def script(request: GenerateRequest) -> list[int]:
        text = world.renderer.detokenizer.text_of(request.input_ids)
        answer = ANSWERS[(first + text.count("assistant\n") - 1) % len(ANSWERS)]
        return world.ids(FORCED if text.endswith("<tool_call>") else answer)

    # A token at each turn of the event loop, so that a client can hang up in mid-stream.
    engine = WatchedEngine(script, clock=asyncio.get_running_loop(), token_s=0.0)
    world = await open_world(engine=engine, max_context_tokens=4000)
    return Player(world.http, world.url, ADMIN_KEY, seed=1, max_tokens=200)


@pytest.mark.parametrize("dialect", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize(("name", "first"), CASES)
async def test_it_records_what_chat_records(open_world: OpenWorld, name: str, first: int, dialect: Dialect) -> None:
    player = await open_player(open_world, first)
    reference = await player.play(EPISODES[name], CHAT)
    play = await player.play(EPISODES[name], dialect)
    print(play, play.cut, [r and (r["end"], r["fork reason"]) for r in play.records])
    assert difference(play, reference) is None
