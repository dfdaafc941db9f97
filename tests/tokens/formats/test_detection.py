"""Detecting the format that a chat template writes:

- each family is known by what it writes for the calls of earlier answers
- comments and the schemas of tools do not count
- a template without tools has no format of calls, and no call can be forced
- thinking is known by its tags
"""

import pytest

from areal_agent.errors import RequestError
from areal_agent.tokens.formats.answer_format import AnswerFormat, ReasoningFormat, ToolFormat
from areal_agent.tokens.formats.base import ToolCall


@pytest.mark.parametrize(
    ("template", "tool_format"),
    [
        ("""{{- '<tool_call>{"name": ' + call.name | tojson }}""", ToolFormat.HERMES),
        (r"""{{- '\n<tool_call>\n{"name": "' }}""", ToolFormat.QWEN),
        ("""Return <tool_call>\n{"name": <name>}""", ToolFormat.QWEN),
        ("""{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson }}""", ToolFormat.LLAMA3_JSON),
        ("""{{- '<|python_tag|>' + call.name + '.call(' }}""", ToolFormat.LLAMA3_JSON),
        ("""{{- '[TOOL_CALLS] [' }}{{- call.function | tojson }}""", ToolFormat.MISTRAL),
        ("""{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}""", ToolFormat.MISTRAL_V11),
        (r"""{{- '<｜tool▁calls▁begin｜>' + call.type + '\n```json\n' }}""", ToolFormat.DEEPSEEK),
        ("""{{- '<｜tool▁calls▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}""", ToolFormat.DEEPSEEK_V31),
        ("""{#- no <tool_call> here -#}{{- message.content }}""", ToolFormat.NONE),
        ("""{"name": "x"}{{- message.content }}""", ToolFormat.NONE),
    ],
)
def test_the_calls_of_a_template(template: str, tool_format: ToolFormat) -> None:
    assert AnswerFormat.detect(template).tool_format is tool_format


@pytest.mark.parametrize(
    ("template", "reasoning_format"),
    [
        ("""{{- message.content.split('</think>')[-1] }}""", ReasoningFormat.THINK),
        (r"""{{- 'assistant\n<think>\n' }}""", ReasoningFormat.THINK),
        ("""{# </think> #}{{- message.content }}""", ReasoningFormat.NONE),
    ],
)
def test_the_reasoning_of_a_template(template: str, reasoning_format: ReasoningFormat) -> None:
    assert AnswerFormat.detect(template).reasoning_format is reasoning_format


def test_without_a_form_no_call_is_forced_or_written() -> None:
    plain = AnswerFormat.detect("{{- message.content }}")
    with pytest.raises(RequestError, match="leave tool_choice out") as caught:
        plain.opening(None)
    assert caught.value.param == "tool_choice"
    with pytest.raises(ValueError, match="choose another format"):
        plain.format("", [ToolCall(name="f", arguments={})])
