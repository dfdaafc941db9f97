"""How a model writes its answers: detected in its chat template, read with `parse` or `reader`, written with `format`.

Code outside this package starts here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

from areal_agent.errors import RequestError
from areal_agent.tokens.formats.base import Family, ParsedAnswer, ToolCall
from areal_agent.tokens.formats.deepseek import DeepSeek
from areal_agent.tokens.formats.detection import (
    ANSWER,
    PROBE,
    PROBE_TOOLS,
    REASONING,
    Manner,
    answer_with_reasoning,
    probes,
)
from areal_agent.tokens.formats.harmony import FINAL, Harmony, HarmonyReader
from areal_agent.tokens.formats.hermes import GRANITE, PHI, Hermes
from areal_agent.tokens.formats.kimi import Kimi
from areal_agent.tokens.formats.literals import FUNCTION_GEMMA, GEMMA_4, LFM_2, LLAMA_4
from areal_agent.tokens.formats.llama3 import Llama3
from areal_agent.tokens.formats.mistral import Mistral
from areal_agent.tokens.formats.reader import AnswerReader
from areal_agent.tokens.formats.thinking import TAGS, ReasoningFormat, Thinking, detect_reasoning
from areal_agent.tokens.formats.values import ParameterTypes
from areal_agent.tokens.formats.xml import DSML_V4, DSML_V32, GLM, GLM_47, MINIMAX, QWEN_CODER, SEED
from areal_agent.tokens.template import ChatTemplate
from areal_agent.types import JsonObject


class ToolFormat(StrEnum):
    """The ways in which models write tool calls. Formats of one family read the same and write differently."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    QWEN = "qwen"  # the same, with each tag on a line of its own
    QWEN_CODER = "qwen_coder"  # <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
    LLAMA3_JSON = "llama3_json"  # {"name": ..., "parameters": {...}}
    MISTRAL = "mistral"  # [TOOL_CALLS] [{"name": ..., "arguments": {...}}]
    MISTRAL_V11 = "mistral_v11"  # [TOOL_CALLS]name[ARGS]{...}
    DEEPSEEK = "deepseek"  # function, name and fenced arguments between tags: V3, R1
    DEEPSEEK_V31 = "deepseek_v31"  # name and arguments between tags
    DEEPSEEK_V32 = "deepseek_v32"  # DSML: a tag for each argument, in a block `function_calls`
    DEEPSEEK_V4 = "deepseek_v4"  # DSML in a block `tool_calls`
    FUNCTION_GEMMA = "function_gemma"  # <start_function_call>call:name{key:<escape>text<escape>}<end_function_call>
    GEMMA_4 = "gemma_4"  # <|tool_call>call:name{key:<|"|>text<|"|>,number:1}<tool_call|>
    GLM = "glm"  # <tool_call>name <arg_key>key</arg_key> <arg_value>value</arg_value> </tool_call>: 4.5, 4.6
    GLM_47 = "glm_47"  # the same, without line ends
    HARMONY = "harmony"  # a message to functions.name in the channel `commentary`: gpt-oss
    KIMI_K2 = "kimi_k2"  # functions.name:0 and arguments between tags
    LFM_2 = "lfm_2"  # <|tool_call_start|>[name(key="value")]<|tool_call_end|>
    LLAMA_4 = "llama_4"  # [name(key="value")]
    MINIMAX = "minimax"  # <minimax:tool_call><invoke name="name"><parameter name="key">value</parameter>...
    PHI_4_MINI = "phi_4_mini"  # functools[{"name": ..., "arguments": {...}}]
    GRANITE_3 = "granite_3"  # <|tool_call|>[{"name": ..., "arguments": {...}}]
    SEED = "seed"  # as qwen_coder, within <seed:tool_call>
    NONE = "none"  # no text is taken for a call


HERMES_NEWLINES: Mapping[ToolFormat, str] = {ToolFormat.HERMES: "", ToolFormat.QWEN: "\n"}
"""What the formats write within a call that can be added to a template without calls (`tools_template`)."""

_FAMILIES: Mapping[ToolFormat, Family] = {
    ToolFormat.QWEN_CODER: QWEN_CODER,
    ToolFormat.GLM: GLM,
    ToolFormat.GLM_47: GLM_47,
    ToolFormat.MINIMAX: MINIMAX,
    ToolFormat.SEED: SEED,
    ToolFormat.DEEPSEEK_V32: DSML_V32,
    ToolFormat.DEEPSEEK_V4: DSML_V4,
    ToolFormat.HARMONY: Harmony(),
    ToolFormat.KIMI_K2: Kimi(),
    ToolFormat.GEMMA_4: GEMMA_4,
    ToolFormat.FUNCTION_GEMMA: FUNCTION_GEMMA,
    ToolFormat.PHI_4_MINI: PHI,
    ToolFormat.GRANITE_3: GRANITE,
    ToolFormat.LFM_2: LFM_2,
    ToolFormat.LLAMA_4: LLAMA_4,
    ToolFormat.MISTRAL: Mistral(is_list=True),
    ToolFormat.MISTRAL_V11: Mistral(is_list=False),
    ToolFormat.DEEPSEEK: DeepSeek(is_fenced=True),
    ToolFormat.DEEPSEEK_V31: DeepSeek(is_fenced=False),
    **{one: Hermes(newline=newline) for one, newline in HERMES_NEWLINES.items()},
    ToolFormat.LLAMA3_JSON: Llama3(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFormat:
    """The format of a model's tool calls and of its reasoning.

    >>> hermes = AnswerFormat(tool_format=ToolFormat.HERMES, reasoning_format=ReasoningFormat.NONE)
    >>> hermes.parse('Hm. <tool_call>{"name": "f", "arguments": {}}</tool_call>')
    ParsedAnswer(content='Hm.', reasoning=None, tool_calls=(ToolCall(name='f', arguments={}),), num_malformed=0)
    """

    tool_format: ToolFormat
    reasoning_format: ReasoningFormat
    tags: Thinking | None = field(default=None, compare=False, repr=False)
    """The tags around reasoning as the template writes them, where that is known."""

    @classmethod
    def detect(
        cls,
        template: ChatTemplate,
        *,
        tool_format: ToolFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
    ) -> tuple[Self, Manner]:
        """Detect the format in which a template writes earlier answers, and the form in which it wants their calls.

        A call is rendered, and the format is the one that reads it back; NONE if no format does. A given format
        overrides the detected one. Reasoning is known by the tags in the template, Jinja comments left out.
        """
        reasoning_format = reasoning_format or detect_reasoning(template.source)
        one_of = list(_FAMILIES) if tool_format is None else [tool_format]
        formats = [cls(tool_format=one, reasoning_format=reasoning_format) for one in one_of]
        for text, manner in probes(template):
            found = [one for one in formats if one.parse(text, tools=PROBE_TOOLS).tool_calls == (PROBE,)]
            if found:  # formats of one family read the same
                best = next((one for one in found if one.format("", (PROBE,)).strip() in text), found[0])
                return best._with_tags_of(template), manner
        none = cls(tool_format=tool_format or ToolFormat.NONE, reasoning_format=reasoning_format)
        return none._with_tags_of(template), Manner()

    def _with_tags_of(self, template: ChatTemplate) -> Self:
        if self.thinking is None or self._is_harmony:
            return self
        return replace(self, tags=self.thinking.as_in(answer_with_reasoning(template), REASONING, ANSWER))

    def parse(
        self,
        text: str,
        *,
        may_call_tools: bool = True,
        is_thinking: bool = False,
        only_tool: str | None = None,
        accepts: Callable[[ToolCall], bool] | None = None,
        tools: Sequence[JsonObject] = (),
    ) -> ParsedAnswer:
        """Read a whole answer. The options are those of `reader`."""
        reader = self.reader(
            may_call_tools=may_call_tools, is_thinking=is_thinking, only_tool=only_tool, accepts=accepts, tools=tools
        )
        return reader.finish(text)[1]

    def reader(
        self,
        *,
        may_call_tools: bool = True,
        is_thinking: bool = False,
        only_tool: str | None = None,
        accepts: Callable[[ToolCall], bool] | None = None,
        tools: Sequence[JsonObject] = (),
    ) -> AnswerReader:
        """Return a reader of an answer in progress. Malformed calls, and those that `accepts` refuses, become content.

        `is_thinking`: the prompt ends inside the reasoning. `only_tool`: a call of another tool is malformed. `tools`:
        their schemas give arguments that are written as bare text a type. White space between reasoning and content,
        and between content and calls, belongs to neither.
        """
        return (HarmonyReader if self._is_harmony else AnswerReader)(
            family=self._family if may_call_tools else None,
            thinking=self.thinking,
            is_thinking=is_thinking,
            only_tool=only_tool,
            accepts=accepts,
            types=ParameterTypes(tools),
        )

    def opening(self, tool_name: str | None) -> str:
        """Return the text that begins a forced call of this tool (None: of any).

        Raises RequestError if the model's format has no calls.
        """
        if self._family is None:
            raise RequestError(
                "tool_choice cannot force a call: the model's chat template writes none; leave tool_choice out, or "
                "serve the model with a template that has tools",
                param="tool_choice",
                code="unsupported_parameter",
            )
        return self._family.opening(tool_name)

    def opening_of_text(self, text: str) -> str:
        """Return the text that begins an answer without calls."""
        return (FINAL if self._is_harmony else "") + text

    def format(self, content: str, tool_calls: Sequence[ToolCall] = (), *, reasoning: str | None = None) -> str:
        """Write the text that `parse` reads back, for a scripted model. Raises ValueError if it cannot be written.

        >>> hermes = AnswerFormat(tool_format=ToolFormat.HERMES, reasoning_format=ReasoningFormat.NONE)
        >>> hermes.format("", [ToolCall(name="f", arguments={"x": 1})])
        '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
        """
        text = self.opening_of_text(content)
        if tool_calls:
            if self._family is None:
                raise ValueError("tool_format 'none' writes no calls; choose another format or give no tool_calls")
            text = self._family.write(content, tool_calls)
        if reasoning is None:
            return text
        if self.thinking is None:
            raise ValueError("reasoning_format 'none' writes no reasoning; choose 'think' or give none")
        return self.thinking.write(reasoning, text)

    @property
    def has_calls(self) -> bool:
        """Whether any text is a call."""
        return self._family is not None

    @property
    def thinking(self) -> Thinking | None:
        """The tags around reasoning."""
        return self.tags or TAGS.get(self.reasoning_format)

    @property
    def _is_harmony(self) -> bool:
        return ReasoningFormat.HARMONY is self.reasoning_format or ToolFormat.HARMONY is self.tool_format

    @property
    def _family(self) -> Family | None:
        return _FAMILIES.get(self.tool_format)
