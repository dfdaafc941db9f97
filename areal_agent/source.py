"""The seam between a run and where its batches come from. It knows no trainer and no weights.

::

    own_rollouts     tasks ─▶ Producer ─▶ Serving (engine, gateway, workflows) ─▶ Producer ─▶ batch
    online_rollouts  agents elsewhere ─▶ gateway elsewhere ── lease ─▶ batch
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal_agent.engine.served import ServedEngine
from areal_agent.errors import ArealAgentError
from areal_agent.eval_report import EvalAnswer, EvalReport
from areal_agent.rollout.executor import RolloutStats
from areal_agent.types import JsonObject, RolloutBatch, Task, WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceCounts:
    """Where the rollouts are now, in answers, and what has happened to them."""

    running: int
    finished: int
    statuses: Mapping[str, int]
    drops: Mapping[str, int]


class Source(Protocol):
    """Gives batches to a run. `engine` is where the weights have to go."""

    @property
    def engine(self) -> ServedEngine: ...

    async def produce(self) -> None:
        """Let rollouts be made, until cancelled."""
        ...

    async def take(self, step: int) -> RolloutBatch:
        """The batch for train step `step`, leased: whole groups within the staleness bound."""
        ...

    async def roll_out(self, step: int, tasks: Sequence[Task]) -> RolloutBatch:
        """Exactly these tasks, now. Raises ConfigError where somebody else decides on the tasks."""
        ...

    def drained(self) -> AbstractAsyncContextManager[None]:
        """Entering waits for the rollouts under way to end; inside, none begins."""
        ...

    def memory_lent(self) -> AbstractAsyncContextManager[None]:
        """Inside, the engine needs no memory for keys and values, where the config has it so."""
        ...

    async def publish(self, version: WeightVersion) -> None:
        """This version serves: the bound moves."""
        ...

    async def state(self, step: int) -> JsonObject:
        """What the checkpoint of `step` has to hold of this side: it is given back when a run goes on from there."""
        ...

    async def commit(self, step: int, checkpoint: Path) -> None:
        """A checkpoint is safe: what was leased up to its step is trained."""
        ...

    async def settle(self, *, is_completed: bool) -> None:
        """At the end of a run: leave nothing in between."""
        ...

    async def evaluate(
        self, tasks: tuple[Task, ...], group_id: str, on_answer: Callable[[EvalAnswer], None], max_concurrent: int
    ) -> EvalReport:
        """Roll out every task once, at most `max_concurrent` at a time."""
        ...

    async def stats(self) -> RolloutStats: ...

    async def count_tokens(self) -> tuple[int, int] | None:
        """Tokens sampled for training and tokens trained, if the ledger is the run's own."""
        ...

    def counts(self) -> SourceCounts: ...

    def process_ids(self) -> Mapping[str, int]:
        """Of the processes on this machine that belong to it, by name."""
        ...

    def failures(self) -> Mapping[str, Awaitable[ArealAgentError]]:
        """By the name of a part: waits until it has failed; why."""
        ...
