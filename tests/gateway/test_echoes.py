"""Answers as client libraries send them back, with the real ledger:

- fields that libraries add are ignored and counted; reasoning may come as `reasoning` or as a part of the content
- a number in another form, a default of the tool's schema written into a call, `\\n` for `\\r\\n`, the text beside
  calls left out, the stop text added again or not (whole and streamed): the answer is continued, the audit finds no
  difference, and `ledger verify` no error
- a field of another message that no library adds and the older form of a call are refused
- an answer that was rewritten is a root of its own, and `/metrics` tells that it was edited
"""

from pathlib import Path
from typing import Any

import pytest

from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify

from .conftest import QUESTION, Agent, OpenAgent
from .test_edge_metrics import scrape

SCHEMA = {"type": "object", "properties": {"x": {"type": "number"}, "all": {"type": "boolean", "default": False}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1.0}}</tool_call><|im_end|>'
RESULT = {"role": "tool", "tool_call_id": "a", "content": "1"}
NEXT = {"role": "user", "content": "go on"}


async def is_continued(agent: Agent, echo: Any, ledger: Ledger, folder: Path) -> bool:
    """Send an answer back, end the session and check its record. Return whether the answer was continued."""
    after = RESULT if echo.get("tool_calls") else NEXT
    status, reply = await agent.post_chat(messages=[*QUESTION, echo, after], tools=TOOLS)
    assert status == 200, reply
    await agent.reward(reward=1)
    await agent.end()
    assert verify(folder / "ledger.sqlite").violations == ()
    assert agent.world.gateway.stats().history_mismatches == 0
    first, second = (await ledger.trajectory(agent.id)).turns
    return second.parent == first.completions[0].id


def echoed(arguments: Any, **fields: Any) -> dict[str, Any]:
    calls = [{"index": 0, "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return {"role": "assistant", "tool_calls": calls, **fields}


@pytest.mark.parametrize(
    ("text", "echo"),
    [
        (CALL, echoed('{"x":1}')),
        (CALL, echoed({"x": 1})),
        (CALL, echoed({"all": False, "x": 1})),
        (CALL, echoed({"x": 1.0}, function_call={"name": "f", "arguments": "{}"})),
        (f"let me see {CALL}", echoed('{"x": 1.0}', content=None)),
        (f"let me see {CALL}", echoed('{"x": 1}', content="let me see")),
        ("a\r\nb<|im_end|>", {"role": "assistant", "content": "a\nb"}),
        (
            "<think>\nhm\r\nso\n</think>\n\nyes<|im_end|>",
            {"role": "assistant", "content": "yes", "reasoning": "hm\nso"},
        ),
        (
            "<think>\nhm\n</think>\n\nno<|im_end|>",
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "no"}]},
        ),
        ("I won't<|im_end|>", {"role": "assistant", "content": [{"type": "refusal", "refusal": "I won't"}]}),
    ],
)
async def test_an_answer_may_come_back_in_another_form(
    open_agent: OpenAgent, ledger: Ledger, tmp_path: Path, text: str, echo: Any
) -> None:
    agent = await open_agent(text, "so<|im_end|>", journal=ledger.own)
    await agent.post_chat(messages=QUESTION, tools=TOOLS)
    assert await is_continued(agent, echo, ledger, tmp_path)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("added", "is_same"), [("", True), ("</code>", True), ("\n</code>\n", False), ("</tool>", False)]
)
async def test_a_stop_text_may_be_added_again(
    open_agent: OpenAgent, ledger: Ledger, tmp_path: Path, added: str, *, is_same: bool, is_streamed: bool
) -> None:
    agent = await open_agent("<code>1</code> and more", "so<|im_end|>", journal=ledger.own)
    reply = await agent.ask(QUESTION, tools=TOOLS, stop=["Observation:", "</code>"], stream=is_streamed)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in reply] if is_streamed else []
    said = "".join(pieces) if is_streamed else reply.choices[0].message.content
    assert said == "<code>1"
    assert await is_continued(agent, {"role": "assistant", "content": said + added}, ledger, tmp_path) is is_same


@pytest.mark.parametrize(
    "fields",
    [
        {"provider_specific_fields": {"refusal": None}},
        {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
        {"annotations": [{"type": "url_citation"}], "refusal": "no", "audio": {"id": "a"}},
        {"id": "msg_1", "cache_control": {"type": "ephemeral"}, "anything": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_fields_that_libraries_add_are_ignored_and_counted(
    open_agent: OpenAgent, ledger: Ledger, tmp_path: Path, fields: Any
) -> None:
    agent = await open_agent("hello<|im_end|>", "so<|im_end|>", journal=ledger.own)
    await agent.ask(QUESTION, tools=TOOLS)
    echo = {"role": "assistant", "content": "hello", "refusal": None, "annotations": [], **fields}
    assert await is_continued(agent, echo, ledger, tmp_path)
    assert (await scrape(agent.world))["ignored_message_fields_total", ()] == len(fields)


async def test_other_messages_may_have_what_libraries_add(open_agent: OpenAgent) -> None:
    agent = await open_agent("hello<|im_end|>")
    added = {"id": "m1", "cache_control": {"type": "ephemeral"}}
    question = {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}
    call: Any = echoed("{}")
    result = {**RESULT, "is_error": True, "status": "error", "artifact": [1]}
    status, reply = await agent.post_chat(messages=[question | added, call, result | added], tools=TOOLS)
    assert status == 200, reply
    assert agent.world.gateway.stats().ignored_message_fields == 7


@pytest.mark.parametrize(
    ("message", "param", "remedy"),
    [
        ({"role": "user", "content": "x", "thinking_blocks": ["hm"]}, "messages[0].thinking_blocks", "valid: "),
        ({"role": "user", "content": "x", "is_error": True}, "messages[0].is_error", "valid: "),
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            "messages[0].function_call",
            "send the call in tool_calls",
        ),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "messages[0].content[0].refusal", "must be given"),
    ],
)
async def test_what_would_be_lost_is_refused(open_agent: OpenAgent, message: Any, param: str, remedy: str) -> None:
    agent = await open_agent()
    status, reply = await agent.post_chat(messages=[message, *QUESTION])
    assert (status, reply["error"]["param"]) == (400, param)
    assert remedy in reply["error"]["message"]


@pytest.mark.parametrize(
    "echo",
    [
        {"role": "assistant", "content": "Calling tools:\n[{'id': 'a', 'function': {'name': 'f'}}]"},
        echoed({"all": True, "x": 1}),
    ],
)
async def test_a_rewritten_answer_is_told(open_agent: OpenAgent, ledger: Ledger, tmp_path: Path, echo: Any) -> None:
    agent = await open_agent(CALL, "so<|im_end|>", journal=ledger.own)
    await agent.post_chat(messages=QUESTION, tools=TOOLS)
    assert not await is_continued(agent, echo, ledger, tmp_path)
    assert (await scrape(agent.world))["forks_total", (("reason", "edited"),)] == 1
