"""A run's train steps, made again from its ledger: no engine, no sandbox, no task.

    ledger ─▶ for each step of the living lineage: its batch and its trainer's settings ─▶ trainer ─▶ weights
                                                                                               compared with the run's

`Recording` reads, `Trainers` has the trainer that a step needs, `replay` makes the steps. The run's own folder is only
read. A step's weights follow from the weights before it, its batch in its order, the settings and the generator's
state; their last bits also from versions, processor and threads, which are compared where weights differ.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import numpy as np
from pydantic import ValidationError

from areal_agent.algorithms.credit import reward_parts
from areal_agent.config import Config
from areal_agent.errors import ConfigError, LedgerError, TrainerError
from areal_agent.images import IMAGES, ImageFolder
from areal_agent.ledger import questions
from areal_agent.ledger.encoding import StepRecord, lease_digest
from areal_agent.ledger.files import LedgerFiles, ledger_in
from areal_agent.run.recorded import TrainerRecord
from areal_agent.sft.fitting import loaded
from areal_agent.staleness import without_stale_tokens
from areal_agent.tokens.records import token_records
from areal_agent.trainer.checkpoint import TRAINING, read_checkpoint
from areal_agent.trainer.config import TrainerSetup
from areal_agent.trainer.wire import StepInput, TrainerInfo
from areal_agent.trainer.worker import Worker
from areal_agent.types import TokenRecord, Trajectory

WITHOUT = "an areal_agent that wrote ledgers of version 3 or older made it"
Adapt = Callable[[TrainerRecord], Config]
"""Returns the config with which to make the steps of a trainer: its own, or a variant."""


def own_config(record: TrainerRecord) -> Config:
    """Return the config that the run had."""
    return record.config


class Recording:
    """What a ledger says about the training of its run. Closed at the end of the block.

    `sessions` is the ledger with the rollouts, where that is a gateway's elsewhere.
    """

    def __init__(self, run_dir: Path, sessions: Path | None = None) -> None:
        """Raises ConfigError where there is no ledger, LedgerError where it does not say how steps were made."""
        path = ledger_in(run_dir)
        self.folder = path.parent
        self._open = ExitStack()
        self._files = self._open.enter_context(closing(LedgerFiles(path)))
        self._sessions = self._files
        if sessions is not None:
            self._sessions = self._open.enter_context(closing(LedgerFiles(ledger_in(sessions))))
        self._images = ImageFolder(ledger_in(sessions or run_dir).parent / IMAGES)
        with self._files.snapshot() as snapshot:
            self.steps = questions.step_numbers(snapshot)
            self.trainers = {
                number: _trainer_record(number, fields) for number, fields in questions.trainers(snapshot).items()
            }
        if not self.steps:
            raise LedgerError(
                f"the ledger {path} does not say how any step was made: nothing was trained, or {WITHOUT}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def step(self, number: int) -> StepRecord:
        """Return how a step was made. Raises LedgerError when that is not recorded."""
        with self._files.snapshot() as snapshot:
            return questions.step_record(snapshot, number)

    def trainer(self, step: StepRecord) -> TrainerRecord:
        """Return how the trainer of a step was set up. Raises LedgerError when that is not recorded."""
        if step.process not in self.trainers:
            raise LedgerError(f"the ledger does not say how the trainer of step {step.step} was set up")
        return self.trainers[step.process]

    def given(self, step: StepRecord, config: Config) -> StepInput:
        """Make the input of a step from its sessions, as the run did. Raises LedgerError when one is missing."""
        records: list[TokenRecord] = []
        trajectories = self._trajectories(step)
        for one in trajectories:
            own = token_records(one, config.rollout.loss_rule)
            if config.straggler == "mask":
                own = tuple(without_stale_tokens(record, step.step, config.max_staleness) for record in own)
            records += own
        ends = np.cumsum([int(record.loss_mask.sum()) for record in records])
        return StepInput(
            step=step.step,
            records=records,
            rewards={one.session_id: one.rewards.total for one in trajectories},
            parts={one.session_id: reward_parts(one, config.algorithm) for one in trajectories},
            incarnation=step.incarnation,
            teacher=None if step.teacher is None else np.split(step.teacher, ends)[:-1],
            images=self._images.of(records),
        )

    def altered(self, step: StepRecord) -> Iterator[str]:
        """Yield what shows by itself that the batch of a step is not what was leased for it."""
        for one in self._trajectories(step):
            with self._files.snapshot() as snapshot:
                lease = questions.lease_of(snapshot, one.session_id)
            if lease is not None and lease[0] != lease_digest(one, lease[1]):
                yield f"the tokens, log-probabilities or rewards of session {one.session_id!r} were changed"

    def _trajectories(self, step: StepRecord) -> Sequence[Trajectory]:
        with self._sessions.snapshot() as snapshot:
            return [questions.trajectory(snapshot, session_id) for session_id in step.sessions]


def _trainer_record(number: int, fields: Mapping[str, Any]) -> TrainerRecord:
    try:
        return TrainerRecord.model_validate(fields)
    except ValidationError as error:
        fault = error.errors()[0]
        raise LedgerError(
            f"the settings of process {number} of the run cannot be used: {'.'.join(map(str, fault['loc']))}: "
            f"{fault['msg']}; use the release of areal_agent that wrote them"
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """Where a replay begins: a checkpoint, or the model that the run began with."""

    step: int = 0
    checkpoint: Path | None = None

    @classmethod
    def of(cls, checkpoint: Path | None) -> Self:
        """Raises ConfigError when the folder is no intact checkpoint."""
        if checkpoint is None:
            return cls()
        if not (checkpoint / TRAINING).is_dir():
            raise ConfigError(
                f"--from {str(checkpoint)!r} is not a checkpoint of a run: it has no folder {TRAINING!r}; name one "
                "like RUN_DIR/checkpoints/step_000010"
            )
        try:
            return cls(step=read_checkpoint(checkpoint).step, checkpoint=checkpoint)
        except ValueError as error:
            raise ConfigError(f"--from: {error}; name another checkpoint") from None


class Trainers:
    """The trainer that the next step needs, as a context manager. It starts anew where its settings change."""

    def __init__(self, recording: Recording, begin: Begin, adapt: Adapt = own_config) -> None:
        self._recording = recording
        self._begin = begin
        self._adapt = adapt
        self._loaded = ExitStack()
        self._worker: Worker | None = None
        self._settings: TrainerSetup | None = None

    def __enter__(self) -> Self:
        self._files = TemporaryDirectory(prefix="replay-")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._loaded.close()
        self._files.cleanup()

    @property
    def info(self) -> TrainerInfo:
        assert self._worker is not None, "`for_step` comes first"
        return self._worker.info

    def for_step(self, step: StepRecord) -> Worker:
        """Return the trainer with the weights before `step`. Raises ConfigError when its model cannot be loaded."""
        record = self._recording.trainer(step)
        config = self._adapt(record)
        is_own = config.trainer == record.config.trainer  # on a cluster the run may have had fewer ranks than asked for
        trainer = record.setup.trainer if is_own else config.trainer
        settings = record.setup.model_copy(
            update={
                "algorithm": config.algorithm,
                "trainer": trainer.model_copy(update={"async_save": False}),
                "shared_memory": Path(self._files.name),
                "publishes": False,
                "token_records": None,
                "has_one_gpu": False,
                "shares_gpu": False,
                "model": Path(),
                "resume": False,
            }
        )
        if self._worker is None:
            found = {"model": self._begin.checkpoint, "resume": True} if self._begin.checkpoint else {}
            self._load(settings.model_copy(update=found or {"model": self._model(record, step)}))
        elif settings != self._settings:
            checkpoint = self.save(Path(self._files.name) / "checkpoints", step.step - 1)
            self._loaded.close()
            self._load(settings.model_copy(update={"model": checkpoint, "resume": True}))
        self._settings = settings
        assert self._worker is not None
        return self._worker

    def save(self, directory: Path, step: int) -> Path:
        """Publish the checkpoint of `step`, which was made last, in a folder. Raises TrainerError."""
        assert self._worker is not None, "`for_step` comes first"
        directory.mkdir(parents=True, exist_ok=True)
        arguments = {"directory": str(directory), "step": step, "incarnation": 0, "run_state": {}}
        ended = self._worker.call("save", arguments)
        if "path" not in ended:
            raise TrainerError(f"no checkpoint could be written to {directory}: {ended['fault']}; make room there")
        return Path(ended["path"])

    def _load(self, setup: TrainerSetup) -> None:
        base = setup.base if setup.base is not None and setup.base.is_dir() else self._recording.folder / "model"
        self._worker = self._loaded.enter_context(
            loaded(setup.model_copy(update={"base": base}), Path(self._files.name))
        )

    def _model(self, record: TrainerRecord, step: StepRecord) -> Path:
        """Return the folder of the model that the run began with; a tiny one is in the run's folder, wherever it is."""
        if step.step != 1:
            raise ConfigError(
                f"the ledger says how steps from {step.step} on were made, and {WITHOUT}; begin with the checkpoint of "
                f"step {step.step - 1}: --from CHECKPOINT"
            )
        for folder in (record.setup.model, self._recording.folder / "model"):
            if folder.is_dir():
                return folder
        raise ConfigError(
            f"the model that the run began with is no longer in {str(record.setup.model)!r}; bring it back, or begin "
            "with a checkpoint: --from CHECKPOINT"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Remade:
    """A step that was made again."""

    record: StepRecord
    metrics: Mapping[str, float]
    inputs: Mapping[str, str]
    weights: str
    seconds: float

    @property
    def differs(self) -> bool:
        return (self.weights, dict(self.inputs)) != (self.record.weights, self.record.inputs)


def steps_to_make(recording: Recording, begin: Begin, to: int | None) -> list[int]:
    """Return the numbers of the steps from `begin` to `to`. Raises ConfigError when there are none."""
    first, last = recording.steps[0], recording.steps[-1]
    if to is not None and not first <= to <= last:
        raise ConfigError(f"--to is {to}, and the ledger says how steps {first} to {last} were made; name one of them")
    chosen = [step for step in recording.steps if begin.step < step <= (to or last)]
    if not chosen or (begin.step and chosen[0] != begin.step + 1):
        raise ConfigError(
            f"--from is a checkpoint of step {begin.step}, which no step from {first} to {to or last} follows; name an "
            "earlier one"
        )
    return chosen


def replay(recording: Recording, trainers: Trainers, steps: Sequence[int]) -> Iterator[Remade]:
    """Make steps again, one after the other, with the run's own settings."""
    for number in steps:
        record = recording.step(number)
        worker = trainers.for_step(record)
        made = worker.train_step(recording.given(record, recording.trainer(record).config))
        yield Remade(
            record=record,
            metrics=made["metrics"],
            inputs=made["inputs"],
            weights=made["weights"],
            seconds=made["seconds"],
        )


def fault_of_begin(recording: Recording, begin: Begin, first: StepRecord, info: TrainerInfo) -> str | None:
    """Return why the weights that a replay begins with are not the run's; None when they are."""
    record = recording.trainer(first)
    weights = recording.step(begin.step).weights if begin.step in recording.steps else ""
    if begin.checkpoint is None:
        weights = record.weights
    if weights and info.weights != weights:
        where = begin.checkpoint or record.setup.model
        return f"the weights in {str(where)!r} are not those that the run had after step {begin.step}"
    if info.frozen != record.frozen:
        return (
            "the weights that stay as they are (below adapters, of a reference or a teacher) are not those of the run"
        )
    return None


def causes(recording: Recording, remade: Remade, info: TrainerInfo) -> Iterator[str]:
    """Yield what explains that a step differs: its batch, the settings, or what the last bits depend on."""
    step, record = remade.record, recording.trainer(remade.record)
    inputs = [name for name, digest in step.inputs.items() if remade.inputs.get(name) != digest]
    if inputs:
        found = list(recording.altered(step))
        if not found and "session_id" in inputs:
            found = ["the batch has its sessions in another order, or other sessions"]
        yield from found
        yield f"the trainer was given other values for: {', '.join(inputs)}"
    else:
        yield "the trainer was given the same batch, bit for bit"
    kept = _config_in(recording.folder)
    if kept is not None:
        for key in different_keys(record.config.model_dump(mode="json"), kept.model_dump(mode="json")):
            yield f"the recorded config is not that of config.yaml: {key}"
    there = record.numerics
    for name in sorted({*there, *info.numerics}):
        if there.get(name) != (here := info.numerics.get(name)):
            yield f"{name}: {there.get(name, 'none')} in the run, {here or 'none'} here"
    if info.numerics["device"] == "cuda":
        yield "kernels of GPUs may add numbers up in another order each time"


def _config_in(folder: Path) -> Config | None:
    try:
        return Config.load(folder / "config.yaml")
    except ConfigError:
        return None


def different_keys(one: Any, other: Any, key: str = "") -> Iterator[str]:
    """Yield the keys of nested sections whose values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in {**one, **other}:  # pyright: ignore[reportUnknownVariableType]
            yield from different_keys(one.get(name), other.get(name), f"{key}.{name}".lstrip("."))  # pyright: ignore
    elif one != other:
        yield f"{key} {one!r} instead of {other!r}"
