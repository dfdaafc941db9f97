"""The loop of supervised fine-tuning: a step, an evaluation where one is due, the end.

    batches ─▶ fit ─▶ check? ─▶ fit ─▶ ... ─▶ check

The caller gets each step as it is made, and may save a checkpoint with `state`, from which another `Fitting` goes on.
"""

import asyncio
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_agent.cluster.gang import start_rank
from areal_agent.cluster.hosts import Process
from areal_agent.images import ImageFolder
from areal_agent.sft.config import FlatConfig
from areal_agent.trainer.config import TrainerSetup
from areal_agent.trainer.worker import Worker
from areal_agent.types import JsonObject, TokenRecord

LOWEST_RATE = 0.02
"""The lowest learning rate of a decay, as a share of its peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """An evaluation: the log-probabilities of the loss tokens that are held out, in nats, by record."""

    step: int
    logprobs: Sequence[Sequence[float]]

    @property
    def loss(self) -> float:
        """The mean negative log-probability of a token."""
        return -sum(map(math.fsum, self.logprobs)) / sum(map(len, self.logprobs))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """A step that was made, and the evaluation that followed it."""

    step: int
    metrics: Mapping[str, float]  # of `Stepper.fit`
    seconds: float
    check: Check | None


@contextmanager
def loaded(setup: TrainerSetup, logs: Path) -> Generator[Worker]:
    """Load the model of a setup in this process, which is rank 0. Other ranks run beside it, and end on leaving.

    Their output goes to files in `logs`.
    """
    trainer = Worker()
    with asyncio.Runner() as runner:
        others: list[Process] = []

        async def end() -> None:
            await asyncio.gather(*(process.aclose() for process in others))

        def are_alive() -> bool:
            runner.run(asyncio.sleep(0))  # or it would not hear of deaths
            return all(process.is_running for process in others)

        trainer.are_expected = are_alive
        config = setup.trainer
        try:
            for number, call in enumerate(trainer.expect(config.num_ranks), start=1):
                others.append(runner.run(start_rank(number, call, config.num_threads, logs)))
            trainer.call("init", {"setup": setup.model_dump(mode="json")})
            yield trainer
        finally:
            trainer.close()
            runner.run(end())


class Fitting:
    """Trains a model on batches, one a step, until `num_steps` are made; with `flat` until the loss is flat.

    `trainer` has its model. `batches` begin with the step after those that are done; `held_out` may be empty. `images`
    are those that records name, if any do.
    """

    def __init__(
        self,
        trainer: Worker,
        batches: Iterator[Sequence[TokenRecord]],
        held_out: Sequence[TokenRecord],
        *,
        num_steps: int,
        every: int,
        flat: FlatConfig | None = None,
        step: int = 0,
        state: JsonObject | None = None,
        images: ImageFolder | None = None,
    ) -> None:
        self._trainer = trainer
        self._images = images
        self._batches = batches
        self._held_out = held_out
        self._every = every
        self._flat = flat
        self.step = step
        self._latest = num_steps - (flat.decay_steps if flat else 0)  # where the decay starts without a flat loss
        self._progress = _Progress(**state) if state and flat else _Progress()

    @property
    def num_steps(self) -> int:
        """The steps in all, as far as that is known."""
        return self._decay_starts + (self._flat.decay_steps if self._flat else 0)

    @property
    def state(self) -> JsonObject:
        """What another `Fitting` needs to go on from here, besides the trainer's checkpoint."""
        return asdict(self._progress)

    def steps(self) -> Iterator[Fitted]:
        """Make steps, and yield each of them."""
        while self.step < self.num_steps:
            batch = next(self._batches)
            answer = self._call("fit", {"step": self.step + 1, "rate": self._rate()}, batch)
            self.step += 1
            is_due = self.step % self._every == 0 or self.step == self.num_steps
            check = self.check() if is_due and self._held_out else None
            if check is not None:
                self._note(check.loss)
            yield Fitted(step=self.step, metrics=answer["metrics"], seconds=answer["seconds"], check=check)

    def check(self) -> Check:
        """Evaluate the weights as they are."""
        return Check(step=self.step, logprobs=self._call("measure", {}, self._held_out)["logprobs"])

    def _call(self, command: str, arguments: JsonObject, records: Sequence[TokenRecord]) -> JsonObject:
        return self._trainer.call(command, arguments, records, self._images.of(records) if self._images else {})

    def wind_down(self) -> None:
        """Begin the decay of the learning rate now, unless it has begun."""
        self._progress.decay_starts = min(self._decay_starts, self.step)

    @property
    def _decay_starts(self) -> int:
        """The step after which the learning rate falls, as far as that is known."""
        begun = self._progress.decay_starts
        return self._latest if begun is None else min(self._latest, begun)

    def _rate(self) -> float:
        """Return the next step's learning rate as a share of the schedule's."""
        if self._flat is None:
            return 1.0
        num_decayed = max(0, self.step - self._decay_starts)
        return max(LOWEST_RATE, 1.0 - num_decayed / self._flat.decay_steps)

    def _note(self, loss: float) -> None:
        """Begin the decay if the loss has been flat for long enough."""
        progress, flat = self._progress, self._flat
        if flat is None:
            return
        progress.num_flat_checks += 1
        if progress.best_loss is None or loss < (1 - flat.min_fall) * progress.best_loss:
            progress.best_loss, progress.num_flat_checks = loss, 0
        if progress.num_flat_checks >= flat.checks:
            self.wind_down()


@dataclass(kw_only=True, slots=True)
class _Progress:
    """How far a fitting is from its end."""

    decay_starts: int | None = None  # the step at which the loss was flat
    best_loss: float | None = None
    num_flat_checks: int = 0  # in which the loss has not fallen
