"""Detecting the format that a chat template writes:

- a format is known by reading back a call that the template writes; formats of one family by how it is laid out
- comments, prompts that describe calls, and the schemas of tools do not count
- templates that want arguments as text, or null in the place of empty content, get them so
- the models' own templates are known, with their reasoning and their ends of turn
- a template whose calls cannot be read back has no format of calls, and no call can be forced; a given format overrides
- thinking is known by its tags
"""

from typing import Any

import pytest

from areal_agent.errors import RequestError
from areal_agent.tokens.formats.answer_format import AnswerFormat, ToolFormat
from areal_agent.tokens.formats.base import ToolCall
from areal_agent.tokens.formats.detection import Manner
from areal_agent.tokens.formats.thinking import ReasoningFormat
from areal_agent.tokens.template import ChatTemplate
from tests.tokens.conftest import TEMPLATES

CHAT = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {%- set f = call.function %}
        CALL
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
KEYWORDS = "{% for key, value in f.arguments.items() %}{{ key }}={{ value | tojson }}, {% endfor %}{{ '' }}"
HERMES = '{"name": "NAME", "arguments": ARGUMENTS}'
CALLS = {  # those that no template of templates/real writes
    ToolFormat.HERMES: f"<tool_call>{HERMES}</tool_call>",
    ToolFormat.QWEN: f"<tool_call>\n{HERMES}\n</tool_call>",
    ToolFormat.LLAMA3_JSON: HERMES.replace("arguments", "parameters"),
    ToolFormat.MISTRAL: f"[TOOL_CALLS] [{HERMES}]",
    ToolFormat.MISTRAL_V11: "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
    ToolFormat.DEEPSEEK_V31: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ToolFormat.KIMI_K2: "<|tool_calls_section_begin|><|tool_call_begin|>ID<|tool_call_argument_begin|>ARGUMENTS"
    "<|tool_call_end|><|tool_calls_section_end|>",
    ToolFormat.PHI_4_MINI: f"functools[{HERMES}]",
    ToolFormat.GRANITE_3: f"<|tool_call|>[{HERMES}]",
    ToolFormat.LLAMA_4: f"[NAME({KEYWORDS})]",
    ToolFormat.LFM_2: f"<|tool_call_start|>[NAME({KEYWORDS})]<|tool_call_end|>",
}
NAMES = {"NAME": "f.name", "ID": "call.id", "ARGUMENTS": "f.arguments | tojson"}


def template_of(call: str) -> str:
    """Return a template that writes calls so."""
    for name, written in NAMES.items():
        call = call.replace(name, f"{{{{ {written} }}}}{{{{ '' }}}}")
    return CHAT.replace("        CALL\n", f"{{{{ '' }}}}{call}")


def detect(source: str, **given: Any) -> tuple[AnswerFormat, Manner]:
    return AnswerFormat.detect(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}), **given)


@pytest.mark.parametrize("tool_format", CALLS)
def test_the_calls_of_a_template(tool_format: ToolFormat) -> None:
    template = template_of(CALLS[tool_format])
    for source in (template, "{#- <tool_call> -#}" + template, "<tool_call>{ {{- tools | tojson }}" + template):
        found, manner = detect(source)
        assert (found.tool_format, manner) == (tool_format, Manner())


def test_what_a_template_wants_to_be_given() -> None:
    template = template_of("<tool_call>" + HERMES.replace("ARGUMENTS", "{{ f.arguments + '' }}") + "</tool_call>")
    found, manner = detect(template)
    assert (found.tool_format, manner) == (ToolFormat.HERMES, Manner(has_text_arguments=True))
    found, manner = detect(
        template.replace("in message.tool_calls or []", "in message.tool_calls if message.content is none")
    )
    assert (found.tool_format, manner) == (ToolFormat.HERMES, Manner(has_text_arguments=True, is_content_null=True))


@pytest.mark.parametrize(
    "written",
    [
        "{{- f.name + '(' + f.arguments | tojson + ')' }}",  # a format that nobody reads
        "{#- <tool_call> -#}",
        "{{- '<tool_call>' + f.name + '</tool_call>' }}",  # arguments are left out
        "{{- raise_exception('no tools') }}",
    ],
)
def test_calls_that_cannot_be_read_back(written: str) -> None:
    described = '{{- \'<tool_call>{"name": <name>, "arguments": <object>}</tool_call>\' }}'
    template = described + CHAT.replace("CALL", written)
    assert detect(template)[0].tool_format is ToolFormat.NONE
    assert detect(template, tool_format=ToolFormat.GLM)[0].tool_format is ToolFormat.GLM


AS_TEXT, AS_NULL = Manner(has_text_arguments=True), Manner(has_text_arguments=True, is_content_null=True)
OWN = {
    "qwen3_coder": (ToolFormat.QWEN_CODER, ReasoningFormat.NONE, Manner()),
    "qwen35": (ToolFormat.QWEN_CODER, ReasoningFormat.THINK, Manner()),
    "nemotron_3": (ToolFormat.QWEN_CODER, ReasoningFormat.THINK, Manner()),
    "step_35": (ToolFormat.QWEN_CODER, ReasoningFormat.THINK, Manner()),
    "glm_45": (ToolFormat.GLM, ReasoningFormat.THINK, Manner()),
    "glm_47": (ToolFormat.GLM_47, ReasoningFormat.THINK, Manner()),
    "gpt_oss": (ToolFormat.HARMONY, ReasoningFormat.HARMONY, Manner()),
    "minimax_m2": (ToolFormat.MINIMAX, ReasoningFormat.THINK, Manner()),
    "gemma_4": (ToolFormat.GEMMA_4, ReasoningFormat.GEMMA, Manner()),
    "kimi_k2": (ToolFormat.KIMI_K2, ReasoningFormat.NONE, Manner()),
    "deepseek_v32": (ToolFormat.DEEPSEEK_V32, ReasoningFormat.THINK, Manner()),
    "deepseek_v4": (ToolFormat.DEEPSEEK_V4, ReasoningFormat.THINK, Manner()),
    "deepseek_r1": (ToolFormat.DEEPSEEK, ReasoningFormat.THINK, AS_TEXT),
    "deepseek_r1_distill": (ToolFormat.DEEPSEEK, ReasoningFormat.THINK, AS_NULL),
    "seed_oss": (ToolFormat.SEED, ReasoningFormat.SEED, Manner()),
}


@pytest.mark.parametrize("name", OWN)
def test_the_models_own_templates(name: str) -> None:
    found, manner = detect((TEMPLATES / "real" / f"{name}.jinja").read_text())
    assert (found.tool_format, found.reasoning_format, manner) == OWN[name]


@pytest.mark.parametrize(
    ("template", "reasoning_format"),
    [
        ("""{{- message.content.split('</think>')[-1] }}""", ReasoningFormat.THINK),
        (r"""{{- 'assistant\n<think>\n' }}""", ReasoningFormat.THINK),
        ("""{{- '<seed:think>' + message.reasoning_content }}""", ReasoningFormat.SEED),
        ("""{# </think> #}{{- message.content }}""", ReasoningFormat.NONE),
    ],
)
def test_the_reasoning_of_a_template(template: str, reasoning_format: ReasoningFormat) -> None:
    assert detect(template)[0].reasoning_format is reasoning_format


def test_without_a_form_no_call_is_forced_or_written() -> None:
    plain, _ = detect("{{- messages[0].content }}")
    with pytest.raises(RequestError, match="leave tool_choice out") as caught:
        plain.opening(None)
    assert caught.value.param == "tool_choice"
    with pytest.raises(ValueError, match="choose another format"):
        plain.format("", [ToolCall(name="f", arguments={})])
