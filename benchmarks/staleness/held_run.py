"""One run of the quickstart whose rollouts are as old as the bound lets them be, and its outcome."""

import asyncio
import time
from dataclasses import dataclass

from areal_agent.config import Config
from areal_agent.observe.metrics import read_metrics, step_rows
from areal_agent.run import Run
from areal_agent.types import RolloutBatch

POLL_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a run. `tokens_per_s` are trained tokens, from its first batch to its last push."""

    success: float
    steps: int
    is_cut_short: bool
    tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    wall_s: float


class HeldRun(Run):
    """A run that takes a batch only when `max_staleness` further batches wait, the most that the bound lets wait.

    So it trains as if it never waited for agents or engine. On the quickstart and two cores it does wait, and its
    rollouts would be some two versions old, whatever the bound.
    """

    async def prepare_batch(self) -> RolloutBatch:
        await self._metrics.begin_steps(self.version)
        if self._producing is None:
            self._producing = self._spawn(self.source.produce(), "admit loop")
        config = self.config
        with self._metrics.during("waiting_for_rollouts"):
            num_held = config.max_staleness * config.batch_size * config.group_size
            while self.source.counts().finished < num_held:  # noqa: ASYNC110 (a source has no event for it)
                await asyncio.sleep(POLL_S)
        return await super().prepare_batch()


async def measure(config: Config, limit_s: float) -> Outcome:
    """Train and grade. A run that takes longer than `limit_s` is cut short and graded as it is then."""
    started_s = time.monotonic()
    run = HeldRun(config)
    first_batch_s = loop_s = 0.0
    is_cut_short = False
    async with run:
        try:
            async with asyncio.timeout(limit_s):
                while run.step < config.steps:
                    batch = await run.prepare_batch()
                    first_batch_s = first_batch_s or time.monotonic()
                    await run.train_step(batch)
                    await run.push()
                    loop_s = time.monotonic() - first_batch_s
        except TimeoutError:
            is_cut_short = True
        await run.stop_producing()
        if run.version.step < run.step:
            await run.push()
        success = (await run.evaluate("after")).success or 0.0
        await run.settle(is_completed=True)
    rows = step_rows(read_metrics(run.folder.metrics))
    return Outcome(
        success=success,
        steps=run.step,
        is_cut_short=is_cut_short,
        tokens_per_s=sum(row["tokens/trained"] for row in rows) / max(loop_s, 1e-9),
        staleness_mean=sum(row["staleness/mean"] for row in rows) / max(len(rows), 1),
        staleness_max=max((row["staleness/max"] for row in rows), default=0),
        wall_s=time.monotonic() - started_s,
    )
