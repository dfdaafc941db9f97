"""One rollout as in training, of any workflow (`areal_agent.testing`), with an environment's own tokenizer."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from areal_agent.ledger.ledger import Ledger
from areal_agent.models.recipe import END, render, train_tokenizer
from areal_agent.testing import SESSION_ID, MemoryJournal, run_scripted
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import JsonObject, Trajectory

__all__ = ["END", "Play", "open_stage", "renderer_of", "told"]

Play = Callable[..., Awaitable[Trajectory]]


def renderer_of(demonstrations: Iterable[Any], folder: Path) -> Renderer:
    """The tokenizer that learns from some demonstrations, and its chat template."""
    train_tokenizer(map(render, islice(demonstrations, 500)), vocab_size=600).save_pretrained(folder)
    return Renderer.load(folder)


@asynccontextmanager
async def open_stage(
    renderer: Renderer, task: JsonObject, *, ledger: Ledger | None = None, max_context_tokens: int = 2000
) -> AsyncIterator[Play]:
    """`await play(workflow, *texts)`: one rollout in which the model says these texts; returns its trajectory."""

    async def play(
        workflow: Any, *texts: str, backend: str = "subprocess", wall_s: float = 20.0, **options: Any
    ) -> Trajectory:
        journal = MemoryJournal()
        await run_scripted(
            workflow,
            task,
            texts,
            renderer=renderer,
            journal=ledger.own if ledger else journal,
            sandbox={"backend": backend, "wall_s": wall_s},
            **{"max_tokens": 400, "max_context_tokens": max_context_tokens, **options},
        )
        return await ledger.trajectory(SESSION_ID) if ledger else journal.closed[0]

    yield play


def told(trajectory: Trajectory) -> list[str]:
    """What the tools said."""
    messages: list[Any] = [message for turn in trajectory.turns for message in turn.request_delta]
    return [message["content"] for message in messages if message["role"] == "tool"]
