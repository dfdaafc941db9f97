"""One rollout as in training, of any workflow: a served gateway, the runner, the `openai` client, real sandboxes.

What the model says is scripted.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from areal_agent.engine.fake import FakeEngine
from areal_agent.gateway.app import Gateway
from areal_agent.ledger.ledger import Ledger
from areal_agent.models.recipe import render, train_tokenizer
from areal_agent.rollout.context import SharedResources
from areal_agent.rollout.runner import RolloutRunner, RolloutSpec, open_clients
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import JsonObject, SessionPurpose, SessionRecord, Task, Trajectory, Turn

ADMIN_KEY = "sk-admin"
END = "<|im_end|>"

Play = Callable[..., Awaitable[Trajectory]]


class MemoryJournal:
    """Keeps what the ledger would."""

    def __init__(self) -> None:
        self.closed: list[Trajectory] = []

    async def open_session(self, session: SessionRecord) -> None:
        pass

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        pass

    async def close_session(self, trajectory: Trajectory) -> None:
        self.closed.append(trajectory)


def renderer_of(demonstrations: Iterable[Any], folder: Path) -> Renderer:
    """The tokenizer that learns from some demonstrations, and its chat template."""
    train_tokenizer(map(render, islice(demonstrations, 500)), vocab_size=600).save_pretrained(folder)
    return Renderer.load(folder)


@asynccontextmanager
async def open_stage(
    renderer: Renderer, task: JsonObject, *, ledger: Ledger | None = None, max_context_tokens: int = 2000
) -> AsyncIterator[Play]:
    """`await play(workflow, *texts)`: one rollout in which the model says these texts; returns its trajectory."""
    stack = AsyncExitStack()

    async def play(
        workflow: Any,
        *texts: str,
        backend: str = "subprocess",
        wall_s: float = 20.0,
        timeout_s: float = 60.0,
        max_tokens: int = 400,
    ) -> Trajectory:
        journal = MemoryJournal()
        gateway = Gateway(
            sampler=FakeEngine([renderer.ids_of(text) for text in texts]),
            renderer=renderer,
            journal=ledger.own if ledger else journal,
            model_name="model",
            admin_key=ADMIN_KEY,
            max_context_tokens=max_context_tokens,
            vocab_size=renderer.vocab_size,
        )
        served = await gateway.serve()
        stack.push_async_callback(served.aclose)
        runner = RolloutRunner(
            workflow,
            gateway_url=served.base_url,
            admin_key=ADMIN_KEY,
            model="model",
            clients=await stack.enter_async_context(open_clients()),
            shared=await stack.enter_async_context(SharedResources()),
            max_concurrent=1,
            timeout_s=timeout_s,
            session={"sampling": {"max_tokens": max_tokens}},
            sandbox={"backend": backend, "wall_s": wall_s},
        )
        rollout_task = Task(id="t", data=task)
        await runner.run(
            RolloutSpec(session_id="s", group_id="g", task=rollout_task, seed=0, purpose=SessionPurpose.TRAIN)
        )
        return await ledger.trajectory("s") if ledger else journal.closed[0]

    async with stack:
        yield play


def told(trajectory: Trajectory) -> list[str]:
    """What the tools said."""
    messages: list[Any] = [message for turn in trajectory.turns for message in turn.request_delta]
    return [message["content"] for message in messages if message["role"] == "tool"]
