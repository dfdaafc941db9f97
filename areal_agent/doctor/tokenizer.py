"""The tokenizer and the chat template.

The tokenizer must be the model's, restore texts exactly, and let no text forge a turn. The template is tried with three
conversations in a `Forest`, as the gateway holds them: plain, with thinking, with a tool. In each, an answer is
recorded and continued; the check is whether the continuation keeps the tokens that were sampled.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_agent.config import Config
from areal_agent.doctor.findings import Finding, State
from areal_agent.doctor.model import ModelShape
from areal_agent.errors import RequestError
from areal_agent.tokens.forest import Forest, Reply
from areal_agent.tokens.formats.answer_format import ReasoningFormat, ToolFormat
from areal_agent.tokens.formats.base import ToolCall
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.template import HistoryThinking
from areal_agent.types import ForkReason, JsonObject

SAMPLE = 'Naïve café: 3 × 7 = 21,\n\tdef f(x): return {"a": [x, 1.5]}  # 你好, Привет 🙂\n'


async def load_renderer(config: Config, folder: Path) -> Renderer:
    """Load the renderer as the gateway of a run does. Raises ConfigError."""
    rollout = config.rollout
    return await asyncio.to_thread(
        Renderer.load,
        folder,
        history_thinking=rollout.history_thinking,
        tool_format=rollout.tool_format,
        reasoning_format=rollout.reasoning_format,
    )


async def tokenizer_findings(renderer: Renderer, shape: ModelShape | None) -> list[Finding]:
    """Return one finding: the first fault, or none."""
    ends = ", ".join(repr(text) for text in renderer.end_texts)
    known = f" of the model's {shape.vocab_size:,}" if shape else ""
    found = f"{renderer.vocab_size:,} ids{known}; an answer ends with {ends}"
    if shape is not None and renderer.vocab_size > shape.vocab_size:
        return [
            _tokenizer_finding(
                State.FAIL, found, "it has ids that the model does not know: use the tokenizer of this model"
            ),
        ]
    if not is_reversible(renderer):
        return [
            _tokenizer_finding(
                State.WARN, f"{found}; a text comes back changed", "tool output may reach the model changed"
            )
        ]
    if can_forge(renderer):
        return [
            _tokenizer_finding(
                State.FAIL, f"{found}; text in a message can end a turn", "report this tokenizer as a bug"
            )
        ]
    return [_tokenizer_finding(State.OK, found)]


def is_reversible(renderer: Renderer) -> bool:
    """Return whether a text that is tokenised and decoded is unchanged."""
    return renderer.text_of(renderer.ids_of(SAMPLE), has_ended=False) == SAMPLE


def can_forge(renderer: Renderer) -> bool:
    """Return whether the text of an end token in a message becomes that token."""
    plain, forged = (
        renderer.ids_of(renderer.render([{"role": "user", "content": content}]))
        for content in ("x", renderer.end_texts[0])
    )
    return forged.count(renderer.end_token_id) > plain.count(renderer.end_token_id)


def _tokenizer_finding(state: State, found: str, change: str = "") -> Finding:
    return Finding(check="tokenizer", state=state, found=found, change=change)


QUESTION: JsonObject = {"role": "user", "content": "What is 6 times 7?"}
NEXT: JsonObject = {"role": "user", "content": "And 8 times 9?"}
CALL = ToolCall(name="multiply", arguments={"a": 6, "b": 7})
CALL_ID = "call00001"  # nine letters and digits: Mistral's template refuses others
RESULT: JsonObject = {"role": "tool", "content": "42", "tool_call_id": CALL_ID}
TOOLS: tuple[JsonObject, ...] = (
    {
        "type": "function",
        "function": {
            "name": CALL.name,
            "description": "Multiplies two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    },
)
THOUGHT = "Six sevens are forty-two."


async def template_findings(renderer: Renderer, config: Config) -> list[Finding]:
    """Return how the template treats plain conversations, thinking, and tools."""
    findings = [_plain(renderer)]
    if renderer.answer_format.reasoning_format is ReasoningFormat.THINK:
        findings.append(_thinking(renderer, config.rollout.history_thinking))
    return [*findings, _tools(renderer)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """An answer of the model."""

    content: str = ""
    thought: str | None = None
    calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> JsonObject:
        calls = [
            {"id": CALL_ID, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in self.calls
        ]
        message: dict[str, object] = {"role": "assistant", "content": self.content}
        if calls:
            message["tool_calls"] = calls
        return message if self.thought is None else {**message, "reasoning_content": self.thought}

    def text(self, renderer: Renderer, *, is_thinking: bool) -> str:
        """Return the text as the model writes it; where the prompt has opened the thinking, without its opening tag."""
        text = renderer.answer_format.format(self.content, self.calls, reasoning=self.thought)
        return text.partition("<think>\n")[2] if is_thinking else text


def continued(
    renderer: Renderer, said: Said, after: Sequence[JsonObject], tools: Sequence[JsonObject] = ()
) -> ForkReason | None:
    """Ask, record an answer, and continue: None when the answer's tokens stay, else the reason why not.

    Raises RequestError where the template refuses the conversation.
    """
    forest = Forest(renderer)
    asked = forest.plan([QUESTION], tools, normalise=_as_it_is)
    if asked.is_thinking and said.thought is None:
        said = Said(content=said.content, thought=THOUGHT, calls=said.calls)
    ids = (*renderer.ids_of(said.text(renderer, is_thinking=asked.is_thinking)), renderer.end_token_id)
    reply = Reply(completion_id="c1", token_ids=ids, message=said.message, has_thinking=said.thought is not None)
    forest.record(asked, [reply])
    return forest.plan([QUESTION, said.message, *after], tools, normalise=_as_it_is).fork_reason


def _plain(renderer: Renderer) -> Finding:
    reason = continued(renderer, Said(content="It is 42."), [NEXT])
    match reason:
        case None:
            return _template_finding(
                State.OK, "prefix-stable: a turn adds its new tokens, and sampled ones stand as they were"
            )
        case ForkReason.TEMPLATE_STRIPS_THINKING:
            return _template_finding(State.OK, "prefix-stable, but for the thinking that it opens in each answer")
        case _:
            return _template_finding(
                State.WARN,
                f"rewrites what was said before ({reason}): each turn is a root of its own, whose history is computed "
                "and trained on again",
                "use a template that writes each message the same whatever follows it",
            )


def _thinking(renderer: Renderer, history_thinking: HistoryThinking) -> Finding:
    reason = continued(renderer, Said(content="It is 42.", thought=THOUGHT), [NEXT])
    if reason is None:
        kept = "by rollout.history_thinking" if history_thinking is HistoryThinking.KEEP else "by the template itself"
        return _template_finding(State.OK, f"thinking of earlier answers stays in the prompt, {kept}")
    if reason is not ForkReason.TEMPLATE_STRIPS_THINKING:
        return _template_finding(State.WARN, f"a conversation with thinking does not keep its tokens ({reason})")
    return _template_finding(
        State.WARN,
        "strips the thinking of earlier answers: the turn after one that thought is a branch, from where the first "
        "stripped answer begins",
        "this is recorded and trained correctly, at more tokens per turn; rollout.history_thinking=keep leaves "
        "it in, and exports a template that does",
    )


def _tools(renderer: Renderer) -> Finding:
    tool_format = renderer.answer_format.tool_format
    if tool_format is ToolFormat.NONE:
        return _template_finding(
            State.WARN,
            "writes no tool calls: no text of an answer is taken for one",
            "fine for workflows without tools; otherwise use a template with tools, or set rollout.tool_format",
        )
    try:
        reason = continued(renderer, Said(calls=(CALL,)), [RESULT], TOOLS)
    except RequestError as error:
        return _template_finding(
            State.WARN, f"tool calls as {tool_format}; {error}", "fine for workflows without tools"
        )
    if reason is not None:
        return _template_finding(
            State.WARN, f"tool calls as {tool_format}; after a tool's result it rewrites history ({reason})"
        )
    return _template_finding(
        State.OK, f"tool calls as {tool_format}; a tool's result goes on from the call as it was sampled"
    )


def _as_it_is(message: JsonObject, _: int) -> JsonObject:
    return message


def _template_finding(state: State, found: str, change: str = "") -> Finding:
    return Finding(check="template", state=state, found=found, change=change)
