"""How a model writes its answers: detected in its chat template, read with `parse` or `reader`, written with `format`.

Code outside this package starts here.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from areal_agent.errors import RequestError
from areal_agent.tokens.formats.base import Family, ParsedAnswer, ToolCall
from areal_agent.tokens.formats.deepseek import DeepSeek
from areal_agent.tokens.formats.hermes import Hermes
from areal_agent.tokens.formats.llama3 import Llama3
from areal_agent.tokens.formats.mistral import Mistral
from areal_agent.tokens.formats.reader import THINK_BEGIN, THINK_END, AnswerReader

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_THINK_TAG = re.compile("</?think>")


class ToolFormat(StrEnum):
    """The ways in which models write tool calls. Formats of one family read the same and write differently."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    QWEN = "qwen"  # the same, with each tag on a line of its own
    LLAMA3_JSON = "llama3_json"  # {"name": ..., "parameters": {...}}
    MISTRAL = "mistral"  # [TOOL_CALLS] [{"name": ..., "arguments": {...}}]
    MISTRAL_V11 = "mistral_v11"  # [TOOL_CALLS]name[ARGS]{...}
    DEEPSEEK = "deepseek"  # function, name and fenced arguments between tags: V3, R1
    DEEPSEEK_V31 = "deepseek_v31"  # name and arguments between tags
    NONE = "none"  # no text is taken for a call


_FAMILIES: Mapping[ToolFormat, Family] = {
    ToolFormat.MISTRAL: Mistral(is_list=True),
    ToolFormat.MISTRAL_V11: Mistral(is_list=False),
    ToolFormat.DEEPSEEK: DeepSeek(is_fenced=True),
    ToolFormat.DEEPSEEK_V31: DeepSeek(is_fenced=False),
    ToolFormat.HERMES: Hermes(newline=""),
    ToolFormat.QWEN: Hermes(newline="\n"),
    ToolFormat.LLAMA3_JSON: Llama3(),
}
"""A template is tried against them in this order. Llama is last: other templates, too, write `"parameters":`."""


class ReasoningFormat(StrEnum):
    """The ways in which models write the reasoning before an answer."""

    THINK = "think"  # <think>...</think>
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFormat:
    """The format of a model's tool calls and of its reasoning.

    >>> hermes = AnswerFormat(tool_format=ToolFormat.HERMES, reasoning_format=ReasoningFormat.NONE)
    >>> hermes.parse('Hm. <tool_call>{"name": "f", "arguments": {}}</tool_call>')
    ParsedAnswer(content='Hm.', reasoning=None, tool_calls=(ToolCall(name='f', arguments={}),), num_malformed=0)
    """

    tool_format: ToolFormat
    reasoning_format: ReasoningFormat

    @classmethod
    def detect(
        cls,
        chat_template: str,
        *,
        tool_format: ToolFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
    ) -> Self:
        """Detect the format in which a template writes earlier answers; a given format overrides the detected one.

        Jinja comments are ignored. A model whose template has `<think>` or `</think>` in it thinks.
        """
        text = _COMMENT.sub("", chat_template)
        found = next((one for one, family in _FAMILIES.items() if family.is_written_by(text)), ToolFormat.NONE)
        thinking = ReasoningFormat.THINK if _THINK_TAG.search(text) else ReasoningFormat.NONE
        return cls(tool_format=tool_format or found, reasoning_format=reasoning_format or thinking)

    def parse(
        self,
        text: str,
        *,
        may_call_tools: bool = True,
        is_thinking: bool = False,
        only_tool: str | None = None,
        accepts: Callable[[ToolCall], bool] | None = None,
    ) -> ParsedAnswer:
        """Read a whole answer. The options are those of `reader`."""
        reader = self.reader(
            may_call_tools=may_call_tools, is_thinking=is_thinking, only_tool=only_tool, accepts=accepts
        )
        return reader.finish(text)[1]

    def reader(
        self,
        *,
        may_call_tools: bool = True,
        is_thinking: bool = False,
        only_tool: str | None = None,
        accepts: Callable[[ToolCall], bool] | None = None,
    ) -> AnswerReader:
        """Return a reader of an answer in progress. Malformed calls, and those that `accepts` refuses, become content.

        `is_thinking`: the prompt ends inside the reasoning. `only_tool`: a call of another tool is malformed. White
        space between reasoning and content, and between content and calls, belongs to neither.
        """
        return AnswerReader(
            family=self._family if may_call_tools else None,
            has_thinking=self.reasoning_format is ReasoningFormat.THINK,
            is_thinking=is_thinking,
            only_tool=only_tool,
            accepts=accepts,
        )

    def opening(self, tool_name: str | None, *, is_thinking: bool = False) -> str:
        """Return the text that begins a forced call of this tool (None: of any), ending reasoning that is open first.

        Raises RequestError if the model's format has no calls.
        """
        if self._family is None:
            raise RequestError(
                "tool_choice cannot force a call: the model's chat template writes none; leave tool_choice out, or "
                "serve the model with a template that has tools",
                param="tool_choice",
                code="unsupported_parameter",
            )
        return (f"\n{THINK_END}\n\n" if is_thinking else "") + self._family.opening(tool_name)

    def format(self, content: str, tool_calls: Sequence[ToolCall] = (), *, reasoning: str | None = None) -> str:
        """Write the text that `parse` reads back, for a scripted model. Raises ValueError if it cannot be written.

        >>> hermes = AnswerFormat(tool_format=ToolFormat.HERMES, reasoning_format=ReasoningFormat.NONE)
        >>> hermes.format("", [ToolCall(name="f", arguments={"x": 1})])
        '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
        """
        text = content
        if tool_calls:
            if self._family is None:
                raise ValueError("tool_format 'none' writes no calls; choose another format or give no tool_calls")
            text = self._family.write(content, tool_calls)
        if reasoning is None:
            return text
        if self.reasoning_format is ReasoningFormat.NONE:
            raise ValueError("reasoning_format 'none' writes no reasoning; choose 'think' or give none")
        return f"{THINK_BEGIN}\n{reasoning}\n{THINK_END}\n\n{text}"

    @property
    def _family(self) -> Family | None:
        return _FAMILIES.get(self.tool_format)
