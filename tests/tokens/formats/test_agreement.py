"""Our readers against the parsers of SGLang and vLLM, on answers in each format, well-formed and odd:

- each answer has the calls that both engines find in it, or one of them where they disagree; `ALONE` lists the others
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from areal_agent.tokens.formats.answer_format import AnswerFormat, ToolFormat
from areal_agent.tokens.formats.base import ToolCall
from areal_agent.tokens.formats.thinking import ReasoningFormat
from tests.engine.servers import python_of

PARSERS = Path(__file__).with_name("engine_parsers.py")
PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "items": {"type": "array"},
    "options": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
NAMES = ("f", "look_up")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in NAMES
]
SAID: dict[str, tuple[str, list[ToolCall]]] = {
    "text": ("", [ToolCall(name="f", arguments={"text": "Zürich"})]),
    "after content": ("I look it up.", [ToolCall(name="look_up", arguments={"text": "a"})]),
    "two calls": ("", [ToolCall(name="f", arguments={"text": "a"}), ToolCall(name="look_up", arguments={"text": "b"})]),
    "numbers": ("", [ToolCall(name="f", arguments={"count": -3, "ratio": 0.5})]),
    "a flag": ("", [ToolCall(name="f", arguments={"flag": True, "text": "true"})]),
    "text like a number": ("", [ToolCall(name="f", arguments={"text": "007"})]),
    "code": ("", [ToolCall(name="f", arguments={"text": 'if a < b:\n    print("a\\n", {1: [2]})'})]),
    "a list": ("", [ToolCall(name="f", arguments={"items": [1, "two", [3.5]]})]),
    "an object": ("", [ToolCall(name="f", arguments={"options": {"a": {"b": ["c", True]}}})]),
    "null": ("", [ToolCall(name="f", arguments={"maybe": None})]),
    "no arguments": ("", [ToolCall(name="f", arguments={})]),
    "an unknown argument": ("", [ToolCall(name="f", arguments={"other": "x"})]),
    "empty text": ("", [ToolCall(name="f", arguments={"text": ""})]),
    "spaces": ("", [ToolCall(name="f", arguments={"text": "  a  "})]),
}
DSML = '<｜DSML｜function_calls><｜DSML｜invoke name="f">BODY</｜DSML｜invoke></｜DSML｜function_calls>'
QWEN = "<tool_call>\n<function=f>\nBODY</function>\n</tool_call>"
GLM = "<tool_call>f\nBODY</tool_call>"
MINIMAX = '<minimax:tool_call>\n<invoke name="f">\nBODY</invoke>\n</minimax:tool_call>'
KIMI = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
ODD: dict[ToolFormat, dict[str, str]] = {
    ToolFormat.QWEN_CODER: {
        "no line ends": "<tool_call><function=f><parameter=text>a</parameter></function></tool_call>",
        "a value not ended": QWEN.replace("BODY", "<parameter=text>\na\n<parameter=count>\n3\n</parameter>\n"),
        "no outer tags": "<function=f>\n<parameter=text>\na\n</parameter>\n</function>",
        "no outer end": QWEN.replace("BODY", "").removesuffix("</tool_call>"),
        "two in a block": QWEN.replace("BODY", "</function>\n<function=look_up>\n"),
        "a capital": QWEN.replace("BODY", "<parameter=flag>\nTrue\n</parameter>\n"),
        "not a number": QWEN.replace("BODY", "<parameter=count>\nthree\n</parameter>\n"),
        "a large number": QWEN.replace("BODY", "<parameter=ratio>\n1e3\n</parameter>\n"),
        "broken JSON": QWEN.replace("BODY", '<parameter=options>\n{"a": \n</parameter>\n'),
        "text after": QWEN.replace("BODY", "") + "\nThat is all.",
        "a tag in the text": QWEN.replace("BODY", "<parameter=text>\n<b>a</b> < c\n</parameter>\n"),
        "twice": QWEN.replace("BODY", "<parameter=text>\na\n</parameter>\n<parameter=text>\nb\n</parameter>\n"),
    },
    ToolFormat.GLM: {
        "line ends in the text": GLM.replace("BODY", "<arg_key>text</arg_key>\n<arg_value>a\nb\n</arg_value>\n"),
        "no line ends": GLM.replace("BODY", "<arg_key>count</arg_key><arg_value>3</arg_value>"),
        "not a number": GLM.replace("BODY", "<arg_key>count</arg_key>\n<arg_value>three</arg_value>\n"),
        "text after": GLM.replace("BODY", "") + "\nThat is all.",
    },
    ToolFormat.MINIMAX: {
        "no line ends": MINIMAX.replace("\n", "").replace("BODY", '<parameter name="text">a</parameter>'),
        "two in a block": MINIMAX.replace("BODY", '</invoke>\n<invoke name="look_up">\n'),
        "not a number": MINIMAX.replace("BODY", '<parameter name="count">three</parameter>\n'),
        "line ends in the text": MINIMAX.replace("BODY", '<parameter name="text">a\nb\n</parameter>\n'),
    },
    ToolFormat.SEED: {
        "line ends": QWEN.replace("tool_call", "seed:tool_call").replace("BODY", "<parameter=text>\na\n</parameter>\n")
    },
    ToolFormat.DEEPSEEK_V32: {
        "JSON": DSML.replace("BODY", '\n{"count": 3}\n'),
        "not JSON": DSML.replace("BODY", '<｜DSML｜parameter name="count" string="false">x</｜DSML｜parameter>'),
        "no kind": DSML.replace("BODY", '<｜DSML｜parameter name="count">3</｜DSML｜parameter>'),
        "text of a number": DSML.replace("BODY", '<｜DSML｜parameter name="text" string="true">3</｜DSML｜parameter>'),
    },
    ToolFormat.KIMI_K2: {
        "no section": KIMI,
        "spaces": KIMI.replace("functions.f:3", " functions.f:3 ").join(
            ("<|tool_calls_section_begin|>\n", "\n<|tool_calls_section_end|>")
        ),
        "a short id": KIMI.replace("functions.", "").join(
            ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
        ),
        "only a count": KIMI.replace("functions.f:3", "3"),
        "not JSON": KIMI.replace("{}", "{count: 3}"),
    },
    ToolFormat.HARMONY: {
        "recipient first": ' to=functions.f<|channel|>commentary json<|message|>{"count": 3}<|call|>',
        "after reasoning": f'{THOUGHT}{TO_F}{{"count": 3}}<|call|>',
        "a built-in tool": "<|channel|>commentary to=python <|constrain|>code<|message|>1 + 1<|call|>",
        "not JSON": f"{TO_F}{{count: 3}}<|call|>",
        "an answer": f"{THOUGHT}<|channel|>final<|message|>to=functions.f",
    },
    ToolFormat.GEMMA_4: {
        "spaces": '<|tool_call>call:f{ text: <|"|>a<|"|>, count: 3 }<tool_call|>',
        "text without quotes": "<|tool_call>call:f{text:Bern}<tool_call|>",
        "braces in text": '<|tool_call>call:f{text:<|"|>{a}, [b]: c<|"|>}<tool_call|>',
    },
    ToolFormat.LLAMA_4: {
        "single quotes": "[f(text='it\\'s')]",
        "tags": '<|python_start|>[f(text="a")]<|python_end|>',
        "constants": '[f(options={"a": None, "b": [True]}, text="x")]',
        "a link": "[see](https://example.org)",
        "positional": '[f("a")]',
    },
    ToolFormat.PHI_4_MINI: {"parameters": 'functools[{"name": "f", "parameters": {"text": "a"}}]'},
}
ALONE = {  # where not all engines that have a parser read what we read, those that do
    (ToolFormat.QWEN_CODER, "no outer tags"): ["vllm"],
    (ToolFormat.GLM, "a flag"): ["vllm"],  # SGLang's makes `True` of the text `true`,
    (ToolFormat.GLM, "null"): ["vllm"],  # and `None` of null
    (ToolFormat.MINIMAX, "line ends in the text"): ["vllm"],  # SGLang's takes one away
    (ToolFormat.DEEPSEEK_V32, "spaces"): ["vllm"],  # SGLang's takes them away
    (ToolFormat.DEEPSEEK_V32, "no kind"): ["vllm"],
    (ToolFormat.DEEPSEEK_V32, "JSON"): ["sglang"],
    (ToolFormat.DEEPSEEK_V4, "spaces"): ["vllm"],
    (ToolFormat.GEMMA_4, "null"): ["vllm"],
    (ToolFormat.GEMMA_4, "a list"): ["sglang"],  # vLLM's makes text of numbers within,
    (ToolFormat.GEMMA_4, "an object"): ["sglang"],  # and of true
    (ToolFormat.LLAMA_4, "numbers"): ["vllm"],  # SGLang's reads no negative ones
    (ToolFormat.LLAMA_4, "after content"): ["sglang"],
    (ToolFormat.HARMONY, "recipient first"): [],  # so writes the model's own template
    **{(ToolFormat.PHI_4_MINI, label): [] for label in ("code", "a list", "an object")},  # vLLM's ends at a bracket
    # vLLM's leaves out values without quotes, and reads those in quotes as JSON.
    **{(ToolFormat.FUNCTION_GEMMA, one): [] for one in ("numbers", "a flag", "a list", "an object", "null")},
}


def cases() -> list[tuple[ToolFormat, str, str]]:
    """Return the format of each answer, what is special about it, and its text."""
    found: list[tuple[ToolFormat, str, str]] = []
    for tool_format in ToolFormat:
        if tool_format is not ToolFormat.NONE:
            write = AnswerFormat(tool_format=tool_format, reasoning_format=ReasoningFormat.NONE).format
            end = "<|call|>" if tool_format is ToolFormat.HARMONY else ""  # for SGLang's parser it is text
            found += [(tool_format, label, write(*said) + end) for label, said in SAID.items()]
            found += [(tool_format, label, text) for label, text in ODD.get(tool_format, {}).items()]
    return found


def ask(engine: str) -> list[Any]:
    """Return the calls that an engine's parsers find in each answer; None where it has no parser."""
    given = {"tools": TOOLS, "cases": [{"format": one[0], "text": one[2]} for one in cases()]}
    done = subprocess.run(
        [python_of(engine), str(PARSERS), engine], input=json.dumps(given), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_each_answer_has_the_calls_that_an_engine_finds() -> None:
    differences: list[str] = []
    for (tool_format, label, text), *theirs in zip(cases(), ask("sglang"), ask("vllm"), strict=True):
        answer = AnswerFormat(tool_format=tool_format, reasoning_format=ReasoningFormat.NONE).parse(text, tools=TOOLS)
        ours = [[call.name, call.arguments] for call in answer.tool_calls]
        by_engine = {
            engine: calls for engine, calls in zip(("sglang", "vllm"), theirs, strict=True) if calls is not None
        }
        agreeing = [engine for engine, calls in by_engine.items() if calls == ours]
        if not by_engine or agreeing != ALONE.get((tool_format, label), list(by_engine)):
            differences.append(f"{tool_format}, {label}: ours {ours}, {by_engine}")
    assert not differences, "\n".join(differences)
