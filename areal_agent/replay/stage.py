"""Where episodes are played again: the workflow of a run behind a gateway whose engine is a record.

::

    workflow ── HTTP ──▶ gateway (one an episode) ── Sampler ──▶ RecordedAnswers ──▶ an engine, after a turn
                            └── Journal ──▶ memory

The gateway is that of a run, so every protocol works, and whatever a call holds is compared. It has the run's images;
others are in a temporary folder. Everything runs in this process, so breakpoints in the workflow work.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from areal_agent.gateway.app import Gateway
from areal_agent.gateway.auth import new_key
from areal_agent.gateway.bodies import Limits
from areal_agent.images import ImageFolder
from areal_agent.protocols import Sampler
from areal_agent.replay.answers import Difference, RecordedAnswers
from areal_agent.replay.saved import Episode, SavedRun
from areal_agent.rollout.context import SharedResources
from areal_agent.rollout.models import OtherModels, open_models
from areal_agent.rollout.producer import run_all
from areal_agent.rollout.runner import Clients, RolloutRunner, RolloutSpec, open_clients
from areal_agent.testing import MemoryJournal
from areal_agent.types import EngineInfo, Rewards, Status, Task, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Play:
    """An episode to play: its first `upto` turns (or all) from the record, later ones from `then`."""

    episode: Episode
    upto: int | None = None
    then: Sampler | None = None
    seed: int | None = None  # None: the recorded one
    task: Task | None = None  # None: the one of the config's sources


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """An episode that was played again. Its rewards name the recorded completions."""

    trajectory: Trajectory
    rewards: Rewards
    differences: tuple[Difference, ...]
    not_made: tuple[int, ...]  # recorded turns, from 1, that the workflow did not ask for
    num_fresh: int

    @property
    def is_as_recorded(self) -> bool:
        """Return whether every recorded call was made, and no other, but for what tools said."""
        return not self.not_made and all(one.is_bridged for one in self.differences)

    @property
    def reward(self) -> float | None:
        """The total reward; None for an episode that did not complete."""
        return self.rewards.total if self.trajectory.status is Status.COMPLETED else None


class Stage:
    """Plays episodes of one run; they share its sandboxes. Made by `open_stage`."""

    def __init__(
        self,
        run: SavedRun,
        *,
        clients: Clients,
        shared: SharedResources,
        models: OtherModels,
        sandbox: Mapping[str, Any],
        timeout_s: float,
        bridges_tools: bool,
        info: EngineInfo | None,
        images: ImageFolder,
    ) -> None:
        self.run = run
        self._clients = clients
        self._shared = shared
        self._models = models
        self._sandbox = sandbox
        self._timeout_s = timeout_s
        self._bridges_tools = bridges_tools
        self._info = info
        self._images = images

    async def play_all(self, plays: Sequence[Play], on_one: Callable[[int], None] = lambda _: None) -> Sequence[Played]:
        """Play episodes, as many at a time as the config allows. `on_one` gets how many are done."""
        slots, num_done = asyncio.Semaphore(self.run.config.rollout.max_concurrent), 0

        async def played(play: Play) -> Played:
            nonlocal num_done
            async with slots:
                one = await self.play(play)
            num_done += 1
            on_one(num_done)
            return one

        return await run_all(played, plays)

    async def play(self, play: Play) -> Played:
        """Play one episode. What the workflow raises is the trajectory's status. Raises ConfigError for a lost task."""
        config, renderer, episode = self.run.config, self.run.renderer, play.episode
        session = episode.session
        task = self.run.task(session) if play.task is None else play.task
        answers = RecordedAnswers(
            episode.turns,
            renderer,
            upto=play.upto,
            then=play.then,
            bridges_tools=self._bridges_tools,
            ending=_ending_of(episode),
        )
        journal, admin_key = MemoryJournal(), new_key()
        gateway = Gateway(
            sampler=answers,
            renderer=renderer,
            journal=journal,
            model_name=config.model,
            admin_key=admin_key,
            max_context_tokens=config.engine.max_context_tokens,
            vocab_size=self._info.vocab_size if self._info else renderer.vocab_size,
            has_grammar=self._info is None or self._info.has_grammar,
            images=self._images,
            limits=Limits(image_sources=config.rollout.image_sources),
        )
        served = await gateway.serve()
        try:
            runner = RolloutRunner(
                self.run.workflow,
                gateway_url=served.base_url,
                admin_key=admin_key,
                model=config.model,
                clients=self._clients,
                shared=self._shared,
                max_concurrent=1,
                timeout_s=self._timeout_s,
                session=config.rollout.session,
                sandbox=self._sandbox,
                models=self._models,
            )
            spec = RolloutSpec(
                session_id=session.id,
                group_id=session.group_id,
                task=task,
                seed=session.seed if play.seed is None else play.seed,
                purpose=session.purpose,
            )
            await runner.run(spec)
        finally:
            await served.aclose()
        played = journal.closed[0]
        by_completion = {
            answers.recorded_id(one) or one: reward for one, reward in played.rewards.by_completion.items()
        }
        return Played(
            trajectory=played,
            rewards=replace(played.rewards, by_completion=by_completion),
            differences=tuple(answers.differences),
            not_made=answers.not_made,
            num_fresh=answers.num_fresh,
        )


def _ending_of(episode: Episode) -> str:
    """Say of a session that was cut off how it ended, for a call beyond its record."""
    ended = episode.trajectory
    if ended is not None and ended.status in (Status.COMPLETED, Status.MISSING_REWARD, Status.REJECTED):
        return ""
    how = "it is still open" if ended is None else f"it ended as {ended.status}"
    last = len(episode.turns)
    return f"; the session is only half written: {how}; --from {last} samples the rest of it"


@asynccontextmanager
async def open_stage(
    run: SavedRun,
    *,
    timeout_s: float,
    sandbox: Mapping[str, Any] | None = None,
    bridges_tools: bool = False,
    info: EngineInfo | None = None,
) -> AsyncGenerator[Stage]:
    """Open what all episodes share: HTTP clients and the workflow's shared resources.

    `info` is of the engine that samples fresh answers. Raises ConfigError when the workflow or the tokenizer is gone.
    """
    _ = run.workflow, run.renderer  # first what may be wrong
    await asyncio.to_thread(run.renderer.vision)  # which may take seconds
    others = open_models(run.config.rollout.models)
    with TemporaryDirectory(prefix="images-") as added:
        images = ImageFolder(Path(added), earlier=ImageFolder(run.folder.images))
        async with open_clients() as clients, SharedResources() as shared, others as models:
            yield Stage(
                run,
                clients=clients,
                shared=shared,
                models=models,
                sandbox=run.config.sandbox.model_dump() if sandbox is None else sandbox,
                timeout_s=timeout_s,
                bridges_tools=bridges_tools,
                info=info,
                images=images,
            )
