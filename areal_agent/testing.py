"""Tests of workflows: `play` runs one rollout as in training, with a model whose answers are scripted.

Gateway, socket, client and sandboxes are the real ones. A user's test needs no more than pytest::

    def test_a_right_answer() -> None:
        trajectory = play(solve, {"question": "What is 2 + 2?", "answer": "4"}, "It is 4.")
        assert (trajectory.rewards.final, trajectory.error) == (1.0, None)
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from areal_agent.engine.fake import FakeEngine
from areal_agent.errors import ConfigError, LedgerError
from areal_agent.gateway.app import Gateway
from areal_agent.images import ImageFolder
from areal_agent.ledger.ledger import Ledger
from areal_agent.models.recipe import END, train_tokenizer
from areal_agent.protocols import Journal
from areal_agent.rollout.config import OtherModel
from areal_agent.rollout.context import SharedResources
from areal_agent.rollout.models import OtherModels
from areal_agent.rollout.runner import RolloutRunner, RolloutSpec, open_clients
from areal_agent.rollout.workflow import load_workflow
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import SessionPurpose, SessionRecord, Task, Trajectory, Turn

ADMIN_KEY = "sk-admin"
SANDBOX: Mapping[str, Any] = {"backend": "embedded", "min_isolation": "none"}
NOBODY: Mapping[str, Sequence[str]] = {}
SESSION_ID = "s"


def play(
    workflow: object,
    task: Mapping[str, Any],
    *answers: str,
    sandbox: Mapping[str, Any] = SANDBOX,
    others: Mapping[str, Sequence[str]] = NOBODY,
    ledger: Path | None = None,
) -> Trajectory:
    """Run `workflow` on `task` with a model that gives these answers in turn; return what the ledger would keep.

    `workflow` is anything that a config may name. What it raises is the trajectory's `status` and `error`. An answer
    may be made by `tool_call`. `others` are the answers of other models, by the names that `rollout.client(NAME)` has
    for them. A model that is asked more often than it has answers fails; answers that are left over are not missed, so
    assert on `turns`. A rollout that takes more than 60 s ends as `timeout`. With `ledger` all is written to a new
    ledger at that path, as in training; `areal_agent.ledger.verify.verify` proves it.

    Raises ConfigError for arguments that cannot be played, LedgerError where the ledger cannot be made, and
    RuntimeError in a running event loop: `await asyncio.to_thread(play, ...)` there.
    """
    return play_roles(workflow, task, *answers, sandbox=sandbox, others=others, ledger=ledger)[""]


def play_roles(
    workflow: object,
    task: Mapping[str, Any],
    *answers: str,
    sandbox: Mapping[str, Any] = SANDBOX,
    others: Mapping[str, Sequence[str]] = NOBODY,
    ledger: Path | None = None,
) -> dict[str, Trajectory]:
    """Do the same; return what the ledger would keep of each role by its name, of the rollout itself by "".

    The answers are given in the order of the calls, whichever role makes them.
    """
    _require_playable(task, answers, others, ledger)

    async def played() -> dict[str, Trajectory]:
        texts, renderer = [answer + END for answer in answers], plain_renderer()
        async with _open_journal(ledger) as journal:
            await run_scripted(
                workflow, task, texts, renderer=renderer, journal=journal, sandbox=sandbox, others=others
            )
        return {one.role: one for one in journal.closed}

    return asyncio.run(played())


def _require_playable(
    task: object, answers: Sequence[object], others: Mapping[str, object], ledger: Path | None
) -> None:
    """Raise what `play` says of its arguments."""
    if asyncio._get_running_loop() is not None:
        raise RuntimeError("play runs an event loop of its own, and one runs here; await asyncio.to_thread(play, ...)")
    if not isinstance(task, Mapping):
        raise ConfigError(f"the task is {task!r:.80}; give a mapping, as a line of a .jsonl file has it")
    for name, texts in {"": answers, **others}.items():
        whose = f"others[{name!r}]" if name else "the answers"
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise ConfigError(f"{whose}: {texts!r:.80} is no list of texts; give one, ['yes']")
        if odd := [one for one in texts if not isinstance(one, str)]:
            raise ConfigError(f"{whose}: {odd[0]!r:.80} is no text; give one text for each call")
    if ledger is not None and Path(ledger).exists():
        raise LedgerError(f"{ledger} exists, and play writes a new ledger; name a file that does not exist yet")


def tool_call(name: str, /, **arguments: object) -> str:
    """Return a tool call as the tiny model writes it.

    >>> tool_call("python", code="print(1)")
    '<tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call>'
    """
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def scripted_models(others: Mapping[str, Sequence[str]]) -> OtherModels:
    """Return other models that give these answers in turn, and then fail."""
    left = {name: iter(answers) for name, answers in others.items()}

    def answer(request: httpx.Request) -> httpx.Response:
        name = request.url.host
        text = next(left[name], None)
        if text is None:
            return httpx.Response(400, json={"error": {"message": f"{name} has no more answers"}})
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        body = {"id": "c", "object": "chat.completion", "created": 0, "model": name, "choices": [choice]}
        return httpx.Response(200, json=body)

    models = {name: OtherModel(url=f"http://{name}/v1", model=name) for name in others}
    return OtherModels(models, httpx.MockTransport(answer))


class MemoryJournal:
    """Keeps trajectories in memory, and everything in a ledger, too, if there is one."""

    def __init__(self, ledger: Journal | None = None) -> None:
        self.closed: list[Trajectory] = []
        self._ledger = ledger

    async def open_session(self, session: SessionRecord) -> None:
        if self._ledger is not None:
            await self._ledger.open_session(session)

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        if self._ledger is not None:
            await self._ledger.append_turn(session_id, turn)

    async def close_session(self, trajectory: Trajectory) -> None:
        if self._ledger is not None:
            await self._ledger.close_session(trajectory)
        self.closed.append(trajectory)


@asynccontextmanager
async def _open_journal(path: Path | None) -> AsyncGenerator[MemoryJournal]:
    if path is None:
        yield MemoryJournal()
        return
    ledger = await Ledger.open(path, create=True)
    try:
        yield MemoryJournal(ledger.own)
    finally:
        await ledger.aclose()


@cache
def plain_renderer() -> Renderer:
    """Return the tiny model's chat template with a tokenizer of single bytes."""
    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer([], vocab_size=512).save_pretrained(folder)
        return Renderer.load(Path(folder))


async def run_scripted(
    workflow: object,
    task: Mapping[str, Any],
    texts: Sequence[str],
    *,
    renderer: Renderer,
    journal: Journal,
    sandbox: Mapping[str, Any],
    others: Mapping[str, Sequence[str]] = NOBODY,
    timeout_s: float = 60.0,
    max_tokens: int = 10_000,
    max_context_tokens: int = 100_000,
) -> None:
    """Run one rollout, in which the model samples `texts`; it is in `journal` as `SESSION_ID` when this returns."""
    async with open_scripted(
        workflow,
        FakeEngine([renderer.ids_of(text) for text in texts]),
        renderer=renderer,
        journal=journal,
        sandbox=sandbox,
        others=others,
        timeout_s=timeout_s,
        max_tokens=max_tokens,
        max_context_tokens=max_context_tokens,
    ) as runner:
        data = Task(id="t", data=dict(task))
        purpose = SessionPurpose.TRAIN
        await runner.run(RolloutSpec(session_id=SESSION_ID, group_id="g", task=data, seed=0, purpose=purpose))


@asynccontextmanager
async def open_scripted(
    workflow: object,
    engine: FakeEngine,
    *,
    renderer: Renderer,
    journal: Journal,
    sandbox: Mapping[str, Any],
    others: Mapping[str, Sequence[str]] = NOBODY,
    timeout_s: float = 60.0,
    max_tokens: int = 10_000,
    max_context_tokens: int = 100_000,
    max_concurrent: int = 1,
    images: ImageFolder | None = None,
) -> AsyncGenerator[RolloutRunner]:
    """Open what runs rollouts of a workflow against a scripted engine."""
    await asyncio.to_thread(renderer.vision)  # which may take seconds
    gateway = Gateway(
        sampler=engine,
        renderer=renderer,
        journal=journal,
        model_name="model",
        admin_key=ADMIN_KEY,
        max_context_tokens=max_context_tokens,
        vocab_size=renderer.vocab_size,
        images=images,
    )
    served = await gateway.serve()
    try:
        async with open_clients() as clients, SharedResources() as shared:
            yield RolloutRunner(
                load_workflow(workflow),
                gateway_url=served.base_url,
                admin_key=ADMIN_KEY,
                model="model",
                clients=clients,
                shared=shared,
                max_concurrent=max_concurrent,
                timeout_s=timeout_s,
                session={"sampling": {"max_tokens": max_tokens}},
                sandbox=sandbox,
                models=scripted_models(others),
            )
    finally:
        await served.aclose()
