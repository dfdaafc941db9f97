"""The tokenizer: whether it is the model's, gives texts back as they were, and lets no text forge a turn."""

import asyncio
from pathlib import Path

from areal_agent.config import Config
from areal_agent.doctor.finding import Finding, State
from areal_agent.doctor.shape import ModelShape
from areal_agent.tokens.renderer import Renderer

SAMPLE = 'Naïve café: 3 × 7 = 21,\n\tdef f(x): return {"a": [x, 1.5]}  # 你好, Привет 🙂\n'


async def load_renderer(config: Config, folder: Path) -> Renderer:
    """As the gateway of a run loads it. Raises ConfigError."""
    rollout = config.rollout
    return await asyncio.to_thread(
        Renderer.load,
        folder,
        history_thinking=rollout.history_thinking,
        tool_format=rollout.tool_format,
        reasoning_format=rollout.reasoning_format,
    )


async def tokenizer_findings(renderer: Renderer, shape: ModelShape | None) -> list[Finding]:
    """One; the first fault counts."""
    ends = ", ".join(repr(text) for text in renderer.end_texts)
    known = f" of the model's {shape.vocab_size:,}" if shape else ""
    found = f"{renderer.vocab_size:,} ids{known}; an answer ends with {ends}"
    if shape is not None and renderer.vocab_size > shape.vocab_size:
        return [
            _finding(State.FAIL, found, "it has ids that the model does not know: use the tokenizer of this model"),
        ]
    if not is_reversible(renderer):
        return [
            _finding(State.WARN, f"{found}; a text comes back changed", "tool output may be read otherwise than sent")
        ]
    if can_forge(renderer):
        return [_finding(State.FAIL, f"{found}; text in a message can end a turn", "report this tokenizer as a bug")]
    return [_finding(State.OK, found)]


def is_reversible(renderer: Renderer) -> bool:
    """Whether a text that is tokenised and decoded is what it was."""
    return renderer.text_of(renderer.ids_of(SAMPLE), has_ended=False) == SAMPLE


def can_forge(renderer: Renderer) -> bool:
    """Whether the text of an end token, in a message, becomes that token."""
    plain, forged = (
        renderer.ids_of(renderer.render([{"role": "user", "content": content}]))
        for content in ("x", renderer.end_texts[0])
    )
    return forged.count(renderer.end_token_id) > plain.count(renderer.end_token_id)


def _finding(state: State, found: str, change: str = "") -> Finding:
    return Finding(check="tokenizer", state=state, found=found, change=change)
