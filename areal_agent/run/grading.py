"""`python -m areal_agent.eval`: grades a model on the held-out tasks of a config, and trains nothing.

    tasks x samples ─▶ rollouts (an attempt more where the sandbox or the engine failed) ─▶ ledger ─▶ scores.py

Every sample has a session of its own, `eval-TASK-SAMPLE`, and a seed that depends on nothing else, so what an
interrupted evaluation has in its ledger is kept, and a checkpoint graded again gives the figure of `summary.json`.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import TypeAdapter

from areal_agent.cluster.local import obtain_model
from areal_agent.cluster.ray_hosts import open_hosts
from areal_agent.config import Config
from areal_agent.errors import ArealAgentError, ConfigError, RolloutsFailing
from areal_agent.files import RunFolder, no_device
from areal_agent.ledger import questions
from areal_agent.ledger.files import reading
from areal_agent.ledger.ledger import Ledger
from areal_agent.observe.progress import Progress
from areal_agent.process import INTERRUPTED_CODE, start_logging
from areal_agent.rollout.local import RolloutExecutor, RunnerSettings
from areal_agent.rollout.producer import eval_seed, run_all
from areal_agent.rollout.relay import open_relayed
from areal_agent.rollout.runner import RolloutSpec
from areal_agent.rollout.workflow import Workflow
from areal_agent.run.inspect_log import write_inspect_log
from areal_agent.run.preflight import Preflight
from areal_agent.run.results import RunStatus
from areal_agent.run.scores import Comparison, Sample, Scores, success_by_task, tags_of
from areal_agent.run.serving import open_serving
from areal_agent.types import JsonObject, SessionPurpose, Status, Task, WeightVersion

Result = TypeVar("Result")
RESULTS = "results.json"
ROWS = "results.parquet"
SAMPLES_NOTE = "samples"
SAMPLES = TypeAdapter(list[Sample])
MAX_ATTEMPTS = 3
RETRIED = (Status.INFRA, Status.ORPHAN, Status.CANCELLED)
"""How a rollout ends that another attempt may end better."""
MAX_SHOWN = 10  # tasks of a comparison
SETTINGS = ("workflow", "tasks", "samples", "temperature", "max_tokens", "success_reward", "seed")
"""What two evaluations should have in common. A comparison names what differs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A sample of a task."""

    task: Task
    number: int  # of the task
    sample: int

    @property
    def session_id(self) -> str:
        """The id of its first attempt; those of later ones end with `-rN`."""
        return f"eval-{self.number:05d}-{self.sample}"

    def spec(self, run_seed: int, attempt: int) -> RolloutSpec:
        attempts = [f"attempt {attempt}"] * (attempt > 0)
        return RolloutSpec(
            session_id=self.session_id + (f"-r{attempt}" if attempt else ""),
            group_id=f"eval-{self.number:05d}",
            task=self.task,
            seed=eval_seed(run_seed, self.task, self.number, self.sample, *attempts),  # of a first attempt as in a run
            purpose=SessionPurpose.EVAL,
        )


def evaluate(file: str, overrides: Sequence[str], num_samples: int = 1, name: str | None = None) -> int:
    """Evaluate as a config says and return the exit code. Raises ArealAgentError."""
    config = Config.load(file, overrides)
    preflight = Preflight.check(config, name=f"{name or Path(file).stem}-eval", trains=False)
    preflight = replace(preflight, folder=RunFolder(preflight.folder.path))  # of its files, no machine reads others
    return _evaluate(preflight, num_samples)


def resume(folder: Path, overrides: Sequence[str]) -> int:
    """Go on with an interrupted evaluation and return the exit code. Raises ArealAgentError."""
    found = RunFolder.reopen(str(folder), None)
    with reading(found.ledger) as snapshot:
        num_samples: int | None = questions.note(snapshot, SAMPLES_NOTE)
    if num_samples is None:
        raise ConfigError(f"--resume {str(folder)!r} is not the folder of an evaluation; name one that `eval` has made")
    preflight = Preflight.check(Config.load(found.config, overrides), resume=str(folder), trains=False)
    return _evaluate(preflight, num_samples)


def _evaluate(preflight: Preflight, num_samples: int) -> int:
    if not preflight.eval_tasks:
        raise ConfigError("eval.num_tasks is 0: there is nothing to evaluate")
    try:
        _report(preflight, num_samples, asyncio.run(_sampled(preflight, num_samples)))
    except KeyboardInterrupt:
        print(f"interrupted; go on with: python -m areal_agent.eval --resume {preflight.folder.path}")
        return INTERRUPTED_CODE
    return 0


def _report(preflight: Preflight, num_samples: int, samples: Sequence[Sample]) -> None:
    """Write what an evaluation leaves, and print its figures. Raises RolloutsFailing where nothing was graded."""
    config, folder = preflight.config, preflight.folder
    success = config.eval.success_reward
    scores = Scores.of(samples, success)
    api, source = config.eval.api, config.eval.tasks or config.tasks
    model = api.model if api else config.model
    summary = {
        "status": "failed" if scores is None else "completed",
        "model": model,
        "success": 0.0 if scores is None else scores.pass_at_1.mean,
        "reward_mean": 0.0 if scores is None else scores.reward_mean,
        "num_tasks": len(preflight.eval_tasks),
        "num_failed": sum(one.reward is None for one in samples),
    }
    if scores is None:
        folder.summary.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
        raise RolloutsFailing(f"every rollout failed; the causes are in {folder.logs / 'main.log'}")
    by_tag = _by_tag(preflight.eval_tasks, samples, success)
    results = {
        "model": model,
        "url": api.url if api else None,
        "has_token_records": api is None,
        "workflow": config.workflow,
        "tasks": source and source.model_dump(mode="json", exclude_defaults=True),
        "samples": num_samples,
        "temperature": config.rollout.temperature,
        "max_tokens": config.rollout.max_tokens,
        "success_reward": success,
        "seed": config.seed,
        "scores": scores.as_json(),
        "by_tag": {tag: one.as_json() for tag, one in by_tag.items()},
        "answers": [asdict(one) for one in samples],
    }
    (folder.path / RESULTS).write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2))
    has_rows = _write_rows(folder.path / ROWS, preflight.eval_tasks, samples, success)
    print("\n".join(scores.lines()))
    for tag, one in by_tag.items():
        print(f"  {tag}: pass@1 {one.pass_at_1}  ({one.num_tasks} tasks)")
    rows = f"{ROWS}, " if has_rows else ""
    log = write_inspect_log(folder, config, preflight.eval_tasks, samples, scores)
    kept = "every call; an API gives no token records" if api else "every token"
    folder.summary.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))  # the last: it says `completed`
    print(f"in {folder.path}: {RESULTS}, {rows}{log.name} for inspect_ai, summary.json, and the ledger with {kept}")


def _write_rows(path: Path, tasks: Sequence[Task], samples: Sequence[Sample], success: float) -> bool:
    """Write a row for each sample, as Parquet. Returns False without the extra `parquet`."""
    try:
        # imported here: an evaluation does without the extra
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        return False
    tags = {task.id: tags_of(task) for task in tasks}
    right = [None if one.reward is None else one.reward >= success for one in samples]
    rows = [asdict(one) | {"is_success": is_right} for one, is_right in zip(samples, right, strict=True)]
    tags_column = pa.array([tags[one.task_id] for one in samples], pa.list_(pa.string()))
    pq.write_table(pa.Table.from_pylist(rows).append_column("tags", tags_column), path)
    return True


def _by_tag(tasks: Sequence[Task], samples: Sequence[Sample], success: float) -> dict[str, Scores]:
    tags = {task.id: tags_of(task) for task in tasks}
    found: dict[str, Scores] = {}
    for tag in sorted({tag for of_task in tags.values() for tag in of_task}):
        scores = Scores.of([one for one in samples if tag in tags[one.task_id]], success)
        if scores is not None:
            found[tag] = scores
    return found


class _Counting:
    """Shows how many samples are done, and what they score so far."""

    def __init__(self, progress: Progress, num_all: int, success: float) -> None:
        self.note = progress.note
        self._progress = progress
        self._num_all = num_all
        self._success = success
        self.num_done = 0
        self._num_graded = self._num_right = 0

    def add(self, sample: Sample) -> None:
        if sample.reward is not None:
            self._num_graded += 1
            self._num_right += sample.reward >= self._success
        self.num_done += 1
        so_far = f", {self._num_right / self._num_graded:.3f} so far" if self._num_graded else ""
        self._progress.phase_progress(self.num_done / self._num_all, f"{self.num_done}/{self._num_all} answers{so_far}")


async def _sampled(preflight: Preflight, num_samples: int) -> tuple[Sample, ...]:
    """Roll out what the ledger lacks. A new folder is given up when the engine does not start."""
    config, folder = preflight.config, preflight.folder
    assert preflight.workflow is not None  # preflight makes sure of it: held-out tasks need a workflow
    progress = Progress(total_steps=config.steps, mode=config.observe.progress)
    counting = _Counting(progress, len(preflight.eval_tasks) * num_samples, config.eval.success_reward)
    status, has_started = RunStatus.INTERRUPTED, preflight.is_resumed
    try:
        folder.make()
        start_logging(folder.logs / "main.log", show=progress.note)
        folder.config.write_text(config.to_yaml())
        async with aclosing(await Ledger.open(folder.ledger, create=not preflight.is_resumed)) as ledger:
            await ledger.begin_incarnation(0)
            await ledger.set_note(SAMPLES_NOTE, num_samples)
            try:
                async with _open_rollouts(preflight, preflight.workflow, ledger, progress) as rollouts:
                    has_started = True
                    progress.phase("evaluating")
                    answering = _answers(preflight, rollouts, ledger, num_samples, counting)
                    samples = await _unless(rollouts.failure(), answering)
                status = RunStatus.COMPLETED
                return samples
            finally:
                await ledger.set_note(questions.STATUS_NOTE, status)
    except BaseException as error:
        refused_at_once = isinstance(error, ConfigError) and not (preflight.is_resumed or counting.num_done)
        if not has_started or refused_at_once:
            folder.give_up(keep_logs=not isinstance(error, ConfigError | asyncio.CancelledError))
        raise
    finally:
        progress.close()


@asynccontextmanager
async def _open_rollouts(
    preflight: Preflight, workflow: Workflow, ledger: Ledger, progress: Progress
) -> AsyncGenerator[RolloutExecutor]:
    """Start what rolls out: before the API that is to be graded, or else with an engine for the model."""
    config, logs = preflight.config, preflight.folder.logs
    if (api := config.eval.api) is not None:
        settings = RunnerSettings(
            model_name=api.model,
            port=config.rollout.gateway_port,
            max_concurrent=config.rollout.max_concurrent,
            rollout=config.rollout,
            sandbox=config.sandbox,
        )
        async with open_relayed(settings, workflow, api=api, journal=ledger.own) as rollouts:
            yield rollouts
        return
    model = await obtain_model(config.model, config.seed, logs, progress)
    progress.phase("starting the engine")
    async with (
        open_hosts(config.cluster, config.engine, config.rollout, shared=[model]) as hosts,
        open_serving(
            config,
            workflow,
            ledger,
            workflow_path=preflight.workflow_path,
            weights=model,
            tokenizer=model,
            version=WeightVersion(),
            logs=logs,
            hosts=hosts,
        ) as serving,
    ):
        yield serving.rollouts


async def _unless(failing: Coroutine[Any, Any, ArealAgentError], work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`; when the failure comes first, cancel `work` and raise that."""
    working, failure = asyncio.ensure_future(work), asyncio.ensure_future(failing)
    try:
        await asyncio.wait({working, failure}, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            raise failure.result()
        return working.result()
    finally:
        working.cancel()
        failure.cancel()
        await asyncio.wait({working, failure})


async def _answers(
    preflight: Preflight, rollouts: RolloutExecutor, ledger: Ledger, num_samples: int, counting: _Counting
) -> tuple[Sample, ...]:
    """Return a sample for each slot, of this process or of an earlier one."""
    config = preflight.config
    slots = {
        one.session_id: one
        for number, task in enumerate(preflight.eval_tasks)
        for one in (Slot(task=task, number=number, sample=sample) for sample in range(num_samples))
    }
    ended = await ledger.ask(questions.eval_endings)
    own = [one for one in ended if "/" not in one]  # not those of other roles
    if kept := sum(ended[one] not in RETRIED for one in own):
        counting.note(f"{kept} answers are kept from before")

    async def answer_of(first: RolloutSpec) -> Sample:
        slot = slots[first.session_id]
        earlier = [one for one in own if one == slot.session_id or one.startswith(f"{slot.session_id}-r")]
        done = next((one for one in earlier if ended[one] not in RETRIED), None)
        attempt = len(earlier)
        while done is None:
            result = await rollouts.run(slot.spec(config.seed, attempt))
            attempt += 1
            if result.status not in RETRIED or attempt >= len(earlier) + MAX_ATTEMPTS:
                done = result.session_id
        sample = Sample.of(*await ledger.ask(questions.rollout, done))
        counting.add(sample)
        return sample

    return await run_all(answer_of, tuple(slot.spec(config.seed, 0) for slot in slots.values()))


def compare(one: Path, other: Path) -> str:
    """Compare two evaluations, paired by task, and return what to print. Raises ConfigError."""
    first, second = _results_in(one), _results_in(other)
    comparison = Comparison.of(first.shares, second.shares)
    if comparison is None:
        raise ConfigError(f"--compare: {str(one)!r} and {str(other)!r} have no task in common; evaluate the same tasks")
    both = (one, first), (other, second)
    lines = [f"{folder}: pass@1 {found.pass_at_1:.3f}  {found.model}" for folder, found in both]
    common = [name for name in first.settings if name in second.settings]
    lines += [
        f"they differ in {name}: {first.settings[name]} / {second.settings[name]}"
        for name in common
        if first.settings[name] != second.settings[name]
    ]
    lines += [
        f"only {comparison.num_tasks} of the {len(found.shares)} tasks in {folder} are compared"
        for folder, found in both
        if len(found.shares) > comparison.num_tasks
    ]
    num_better = sum(after > before for _, before, after in comparison.changed)
    lines += [
        f"difference {comparison.difference}, paired over {comparison.num_tasks} tasks; 95%",
        f"{num_better} tasks better, {len(comparison.changed) - num_better} worse, "
        f"{comparison.num_tasks - len(comparison.changed)} alike",
        *(f"  {task}: {before:.2f} -> {after:.2f}" for task, before, after in comparison.changed[:MAX_SHOWN]),
    ]
    if (more := len(comparison.changed) - MAX_SHOWN) > 0:
        lines.append(f"  ... and {more} more")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Results:
    """What a comparison needs of an evaluation."""

    model: str
    pass_at_1: float
    shares: Mapping[str, float]  # of each task's samples that are a success
    settings: JsonObject


def _results_in(folder: Path) -> _Results:
    try:
        found: dict[str, Any] = orjson.loads(no_device(folder / RESULTS).read_bytes())
        samples = SAMPLES.validate_python(found["answers"])
        return _Results(
            model=str(found["model"]),
            pass_at_1=float(found["scores"]["pass_at_1"]["mean"]),
            shares=success_by_task(samples, float(found["success_reward"])),
            settings={name: found[name] for name in SETTINGS if name in found},
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--compare {str(folder)!r}: its {RESULTS} cannot be read ({error!s:.200}); name the folder of an "
            "evaluation that has ended"
        ) from None
