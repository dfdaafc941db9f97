"""`/v1/chat/completions`: the body of a request.

Every parameter of OpenAI's is honoured, or refused by name when its value asks for something: none is dropped.
`max_tokens` beyond the room in the context is cut to it, where OpenAI refuses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from areal_agent.errors import RequestError
from areal_agent.gateway.endpoints.conversation import read_message
from areal_agent.gateway.endpoints.known_tools import Tools
from areal_agent.gateway.endpoints.response_format import read_response_format
from areal_agent.gateway.endpoints.strict_tools import Accepts
from areal_agent.gateway.endpoints.tool_choice import ToolChoice, ToolUse
from areal_agent.gateway.fields import as_flag, as_integer, as_list, as_text, refuse
from areal_agent.gateway.turns.order import HARMLESS_FIELDS, MAX_TOP_LOGPROBS, ORDER_FIELDS, Order, refuse_unsupported
from areal_agent.gateway.turns.question import Question
from areal_agent.gateway.turns.reading import ChatReading
from areal_agent.tokens.answers.reader import THINK_END
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.tree import Forest, Opening, Prompt
from areal_agent.types import JsonObject

_HONOURED = ORDER_FIELDS | {
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "top_logprobs",
}
_KNOWN = _HONOURED | HARMLESS_FIELDS
_NO_TOOLS = Tools(definitions=(), accepts=None)

_UNSUPPORTED: Mapping[str, Sequence[object]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Not supported: the values beside null with which they ask for nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A checked body. `messages` are as the agent wrote them: those that are new are checked in their place."""

    model: str
    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject]
    tool_choice: ToolChoice
    accepts: Accepts | None  # what a call must be, where a tool is strict
    json_schema: str | None
    order: Order

    id_prefix = "chatcmpl"
    prompt_param = "messages"

    @classmethod
    def read(cls, body: JsonObject, read_tools: Callable[[object], Tools] = Tools.read) -> Self:
        """Check a decoded body; raises RequestError naming the parameter that cannot be honoured."""
        refuse_unsupported(body, _KNOWN, _UNSUPPORTED)
        tools = _NO_TOOLS if body.get("tools") is None else read_tools(body["tools"])
        tool_choice = ToolChoice.read(body, tools.definitions)
        json_schema = read_response_format(body.get("response_format"))
        if json_schema is not None and tools.definitions and tool_choice.may_call:
            raise RequestError(
                "response_format holds the whole answer to JSON, so it could call no tool; send it without tools, or "
                "with tool_choice 'none'",
                param="response_format",
                code="unsupported_parameter",
            )
        return cls(
            model=as_text(body.get("model"), "model"),
            messages=_read_messages(body.get("messages")),
            tools=tools.definitions,
            tool_choice=tool_choice,
            accepts=tools.accepts,
            json_schema=json_schema,
            order=Order.read(body, num_top_logprobs=_read_logprobs(body)),
        )

    @property
    def is_single_call(self) -> bool:
        return self.tool_choice.is_single

    def questions(self) -> tuple[Question]:
        return (self,)

    def place(self, forest: Forest, renderer: Renderer) -> Prompt:
        return forest.plan(self.messages, self.tools, normalise=read_message, opening=self._opening(renderer))

    def reading(self, renderer: Renderer, prompt: Prompt) -> ChatReading:
        return ChatReading(
            answer_format=renderer.answer_format,
            may_call_tools=self.tool_choice.may_call,
            is_thinking=prompt.is_thinking or THINK_END in prompt.opening,
            opening=prompt.opening,
            only_tool=self.tool_choice.name,
            accepts=self.accepts,
        )

    def _opening(self, renderer: Renderer) -> Opening | None:
        if self.tool_choice.use is not ToolUse.REQUIRED:
            return None
        return partial(renderer.answer_format.opening, self.tool_choice.name)


def _read_messages(value: object) -> list[JsonObject]:
    messages = as_list(value, "messages")
    if not messages:
        refuse("messages", value, "a list of at least one message")
    return messages


def _read_logprobs(body: JsonObject) -> int | None:
    """How many of the likeliest tokens to tell at each position; None when no log-probabilities are asked for."""
    has_logprobs, num_top = as_flag(body.get("logprobs"), "logprobs"), body.get("top_logprobs")
    if num_top is None:
        return 0 if has_logprobs else None
    num_top = as_integer(num_top, "top_logprobs", low=0, high=MAX_TOP_LOGPROBS)
    if num_top and not has_logprobs:
        refuse("top_logprobs", num_top, "sent together with logprobs=true")
    return num_top if has_logprobs else None
