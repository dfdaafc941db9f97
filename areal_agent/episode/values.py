"""The value of a turn: the mean reward of fresh samples that go on after it.

Value k is the mean reward once the answers of the first k turns stand; value 0 is that of the task. The turn with the
largest drop from value k - 1 to value k is the one that lost the episode. The last value is the recorded reward.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

import orjson

from areal_agent.episode.engine import FreshEngine
from areal_agent.errors import ConfigError, unwritable
from areal_agent.replay.saved import Episode
from areal_agent.replay.stage import Play, Played, Stage
from areal_agent.rollout.runner import rollout_seed
from areal_agent.run.scores import Estimate
from areal_agent.types import Status


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnValue:
    """The rewards of fresh samples after a turn; 0: from the beginning."""

    turn: int
    rewards: tuple[float, ...]
    num_failed: int = 0  # samples that did not complete: they have no reward
    num_unrepeated: int = 0  # samples that did not come to the turn, since a call before it was not as recorded
    why: str = ""  # how the first of those differed

    @classmethod
    def of(cls, turn: int, played: Sequence[Played]) -> Self:
        came = [one for one in played if one.num_fresh or one.is_as_recorded]
        lost = [one for one in played if one not in came]
        rewards = tuple(one.reward for one in came if one.reward is not None)
        return cls(
            turn=turn,
            rewards=rewards,
            num_failed=len(came) - len(rewards),
            num_unrepeated=len(lost),
            why=_why(lost[0]) if lost else "",
        )

    @property
    def estimate(self) -> Estimate | None:
        """The mean reward with its 95% interval; None without a reward."""
        if not self.rewards:
            return None
        is_share = min(self.rewards) >= 0.0 and max(self.rewards) <= 1.0
        return Estimate.of_share(self.rewards) if is_share else Estimate.of_mean(self.rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """The values of an episode's turns, in their order, and the engine that they are of."""

    session_id: str
    engine: str
    values: tuple[TurnValue, ...]
    recorded: float | None  # the reward of the session as it was recorded, after its last turn
    num_turns: int

    @property
    def drops(self) -> dict[int, float]:
        """By turn: how much value its answer lost; only where the values before and after it are known."""
        means = {one.turn: one.estimate.mean for one in self.values if one.estimate}
        if self.recorded is not None:
            means[self.num_turns] = self.recorded
        pairs = {turn: (means.get(turn - 1), means.get(turn)) for turn in range(1, self.num_turns + 1)}
        return {turn: a - b for turn, (a, b) in pairs.items() if a is not None and b is not None}

    @property
    def lost_at(self) -> int | None:
        """The turn with the largest drop of value; None where no answer lost any."""
        drops = self.drops
        turn = max(drops, key=drops.__getitem__, default=None)
        return turn if turn is not None and drops[turn] > 0 else None

    def write(self, folder: Path) -> Path:
        """Write them as JSON into `folder`, whole or not at all."""
        rows = [asdict(one) | (asdict(one.estimate) if one.estimate else {"mean": None}) for one in self.values]
        fields: dict[str, Any] = {
            "session_id": self.session_id,
            "engine": self.engine,
            "num_turns": self.num_turns,
            "recorded": self.recorded,
            "lost_at": self.lost_at,
            "values": rows,
        }
        path = folder / f"{Path(self.session_id).name}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}.part")
            part.write_bytes(orjson.dumps(fields, option=orjson.OPT_INDENT_2))
            part.replace(path)
        except OSError as error:
            raise unwritable(path, error) from error
        return path

    def table(self) -> str:
        """Return the table for a terminal."""
        lines = [f"after turn  {'value, 95% interval':<22}  samples"]
        for one in self.values:
            value = "-" if one.estimate is None else str(one.estimate)
            failed = f", {one.num_failed} failed" if one.num_failed else ""
            unrepeated = f", {one.num_unrepeated} did not come to it" if one.num_unrepeated else ""
            lost = "   <- lost here" if one.turn == self.lost_at else ""
            lines.append(f"{one.turn:>10}  {value:<22}  {len(one.rewards)}{failed}{unrepeated}{lost}")
        if self.recorded is not None and len(self.values) > 1:
            lost = "   <- lost here" if self.lost_at == self.num_turns else ""
            lines.append(f"{self.num_turns:>10}  {self.recorded:<22.3f}  as recorded{lost}")
        whys = dict.fromkeys(f"turn {one.turn}: not repeated: {one.why}" for one in self.values if one.why)
        return "\n".join([*lines, *whys])


async def values_of(
    stage: Stage,
    episode: Episode,
    engine: FreshEngine,
    turns: Sequence[int],
    num_samples: int,
    on_sample: Callable[[int], None] = lambda _: None,
) -> Values:
    """Sample `num_samples` times after each of these turns. `on_sample` gets how many are done."""
    seeds = [rollout_seed(episode.session.seed, str(number)) for number in range(num_samples)]
    plays = [Play(episode=episode, upto=turn, then=engine.client, seed=seed) for turn in turns for seed in seeds]
    played = iter(await stage.play_all(plays, on_sample))
    ended = episode.trajectory
    return Values(
        session_id=episode.session.id,
        engine=engine.name,
        values=tuple(TurnValue.of(turn, list(islice(played, num_samples))) for turn in turns),
        recorded=ended.rewards.total if ended is not None and ended.status is Status.COMPLETED else None,
        num_turns=len(episode.turns),
    )


def turns_of(episode: Episode, given: int | None) -> Sequence[int]:
    """Return the turns to sample after: the given one, or all but the last. Raises ConfigError."""
    last = len(episode.turns)
    if given is None:
        return range(last)
    if not 0 <= given <= last:
        raise ConfigError(
            f"--from is {given}, and session {episode.session.id!r} has {last} turns; give the number of answers to "
            f"keep, from 0 to {last}"
        )
    return (given,)


def _why(played: Played) -> str:
    if played.differences:
        return str(played.differences[0])
    return f"the workflow ended before it ({played.trajectory.status}: {played.trajectory.error})"
