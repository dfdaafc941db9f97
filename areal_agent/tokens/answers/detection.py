"""Which form of tool calls and of reasoning a chat template writes. It looks at the template's text, not at its output.

Rules, the first that fits (Jinja comments do not count):

- `[TOOL_CALLS]`: Mistral; with `[ARGS]` that of version 11
- `<｜tool▁calls▁begin｜>`: DeepSeek; without a code fence that of V3.1
- `<tool_call>`: Hermes; on lines of its own (Qwen) where a newline stands behind the tag
- `<|python_tag|>`, or `"parameters":` where a call's `"name":` is written: Llama 3
- otherwise none: no text is taken for a call

`<think>` or `</think>` anywhere: the model thinks.
"""

import re
from enum import StrEnum

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_THINK_TAG = re.compile("</?think>")
_TAG_ON_ITS_LINE = re.compile(r"<tool_call>(\n|\\n)")


class ToolFormat(StrEnum):
    """How a model writes calls. Formats of one family read the same; they differ in what is written for the model."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    QWEN = "qwen"  # the same, tags on lines of their own
    LLAMA3_JSON = "llama3_json"  # {"name": ..., "parameters": {...}}
    MISTRAL = "mistral"  # [TOOL_CALLS] [{"name": ..., "arguments": {...}}]
    MISTRAL_V11 = "mistral_v11"  # [TOOL_CALLS]name[ARGS]{...}
    DEEPSEEK = "deepseek"  # function, name and fenced arguments between tags: V3, R1
    DEEPSEEK_V31 = "deepseek_v31"  # name and arguments between tags
    NONE = "none"  # no text is taken for a call


class ReasoningFormat(StrEnum):
    """How a model writes what it thinks before it answers."""

    THINK = "think"  # <think>...</think>
    NONE = "none"


def detect_tool_format(chat_template: str) -> ToolFormat:
    """The form in which the template writes the calls of earlier answers."""
    text = _COMMENT.sub("", chat_template)
    if "[TOOL_CALLS]" in text:
        return ToolFormat.MISTRAL_V11 if "[ARGS]" in text else ToolFormat.MISTRAL
    if "<｜tool▁calls▁begin｜>" in text:
        return ToolFormat.DEEPSEEK if "```json" in text else ToolFormat.DEEPSEEK_V31
    if "<tool_call>" in text:
        return ToolFormat.QWEN if _TAG_ON_ITS_LINE.search(text) else ToolFormat.HERMES
    if "<|python_tag|>" in text or ('"name":' in text and '"parameters":' in text):
        return ToolFormat.LLAMA3_JSON
    return ToolFormat.NONE


def detect_reasoning_format(chat_template: str) -> ReasoningFormat:
    """Whether the template knows of thinking."""
    return ReasoningFormat.THINK if _THINK_TAG.search(_COMMENT.sub("", chat_template)) else ReasoningFormat.NONE
