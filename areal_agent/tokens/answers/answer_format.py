"""How a model writes its answers, and both ways between such a text and what it says.

Everything outside this package begins here. The forms themselves stand in files of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from areal_agent.errors import RequestError
from areal_agent.tokens.answers.at_once import read_at_once
from areal_agent.tokens.answers.deepseek import DeepSeek
from areal_agent.tokens.answers.detection import (
    ReasoningFormat,
    ToolFormat,
    detect_reasoning_format,
    detect_tool_format,
)
from areal_agent.tokens.answers.dialect import Dialect
from areal_agent.tokens.answers.hermes import Hermes
from areal_agent.tokens.answers.llama3 import Llama3
from areal_agent.tokens.answers.mistral import Mistral
from areal_agent.tokens.answers.parsed import ParsedAnswer, ToolCall
from areal_agent.tokens.answers.reader import THINK_BEGIN, THINK_END, AnswerReader


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFormat:
    """The form of a model's tool calls and of its reasoning.

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
        """The form that the template itself writes (the rules are in `detection`), but for what is given."""
        return cls(
            tool_format=tool_format or detect_tool_format(chat_template),
            reasoning_format=reasoning_format or detect_reasoning_format(chat_template),
        )

    def parse(
        self,
        text: str,
        *,
        may_call_tools: bool = True,
        is_thinking: bool = False,
        only_tool: str | None = None,
        accepts: Callable[[ToolCall], bool] | None = None,
    ) -> ParsedAnswer:
        """Read a whole answer; a malformed call, and one that `accepts` refuses, stays in its content.

        `is_thinking`: the prompt ends inside the reasoning. `only_tool`: a call of another tool is malformed. White
        space between reasoning and content, and at the ends of the content on the side of a call, belongs to neither.
        """
        if may_call_tools and self.tool_format in (ToolFormat.HERMES, ToolFormat.QWEN):
            answer = read_at_once(
                text,
                has_thinking=self.reasoning_format is ReasoningFormat.THINK,
                is_thinking=is_thinking,
                only_tool=only_tool,
                accepts=accepts or _all,
            )
            if answer:
                return answer
        reader = self.reader(
            may_call_tools=may_call_tools,
            is_thinking=is_thinking,
            are_calls_whole=True,
            only_tool=only_tool,
            accepts=accepts,
        )
        return reader.finish(text)[1]

    def reader(
        self,
        *,
        may_call_tools: bool = True,
        is_thinking: bool = False,
        are_calls_whole: bool = False,
        only_tool: str | None = None,
        accepts: Callable[[ToolCall], bool] | None = None,
    ) -> AnswerReader:
        """Read an answer that is still coming; calls leave as they come, a malformed one perhaps in part.

        With `are_calls_whole` or `accepts` a call leaves when it is whole and accepted; any other stays in the content.
        """
        return AnswerReader(
            dialect=self._dialect() if may_call_tools else None,
            has_thinking=self.reasoning_format is ReasoningFormat.THINK,
            is_thinking=is_thinking,
            are_calls_whole=are_calls_whole or accepts is not None,
            only_tool=only_tool,
            accepts=accepts or _all,
        )

    def opening(self, tool_name: str | None, *, is_thinking: bool = False) -> str:
        """The text that begins a forced call: of this tool, or of any (None). It first ends reasoning that is open.

        Raises RequestError where the model knows no calls.
        """
        dialect = self._dialect()
        if dialect is None:
            raise RequestError(
                "tool_choice cannot force a call: the model's chat template writes none; leave tool_choice out, or "
                "serve the model with a template that has tools",
                param="tool_choice",
                code="unsupported_parameter",
            )
        return (f"\n{THINK_END}\n\n" if is_thinking else "") + dialect.opening(tool_name)

    def format(self, content: str, tool_calls: Sequence[ToolCall] = (), *, reasoning: str | None = None) -> str:
        """The text that `parse` reads back: what a scripted model says. Raises ValueError for what has no form.

        >>> hermes = AnswerFormat(tool_format=ToolFormat.HERMES, reasoning_format=ReasoningFormat.NONE)
        >>> hermes.format("", [ToolCall(name="f", arguments={"x": 1})])
        '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
        """
        text = content
        if tool_calls:
            dialect = self._dialect()
            if dialect is None:
                raise ValueError("tool_format 'none' writes no calls; choose another format or give no tool_calls")
            text = dialect.write(content, tool_calls)
        if reasoning is None:
            return text
        if self.reasoning_format is ReasoningFormat.NONE:
            raise ValueError("reasoning_format 'none' writes no reasoning; choose 'think' or give none")
        return f"{THINK_BEGIN}\n{reasoning}\n{THINK_END}\n\n{text}"

    def _dialect(self) -> Dialect | None:
        match self.tool_format:
            case ToolFormat.HERMES:
                return Hermes(newline="")
            case ToolFormat.QWEN:
                return Hermes(newline="\n")
            case ToolFormat.LLAMA3_JSON:
                return Llama3()
            case ToolFormat.MISTRAL:
                return Mistral(is_list=True)
            case ToolFormat.MISTRAL_V11:
                return Mistral(is_list=False)
            case ToolFormat.DEEPSEEK:
                return DeepSeek(is_fenced=True)
            case ToolFormat.DEEPSEEK_V31:
                return DeepSeek(is_fenced=False)
            case ToolFormat.NONE:
                return None


def _all(call: ToolCall) -> bool:
    del call
    return True
