"""A run's folder as replays read it: its saved config, its sessions, and the tasks and workflow that they came from.

Nothing here writes to the folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from areal_agent.config import Config
from areal_agent.errors import ConfigError
from areal_agent.files import RunFolder
from areal_agent.ledger import questions
from areal_agent.ledger.files import Snapshot, ledger_in, reading
from areal_agent.rollout.config import BenchmarkConfig
from areal_agent.rollout.tasks import load_tasks
from areal_agent.rollout.workflow import Workflow, load_workflow
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.transcript import TRANSCRIPT_NOTE, Transcript
from areal_agent.types import SessionPurpose, SessionRecord, Task, Trajectory, Turn, role_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """A recorded session: how it began, its turns in the order of recording, and how it ended."""

    session: SessionRecord
    turns: tuple[Turn, ...]
    trajectory: Trajectory | None  # None: it is still open, or its process died a moment ago


class SavedRun:
    """A run that is read. `workflow_path` replaces the workflow of its config."""

    def __init__(self, folder: RunFolder, config: Config, transcript: Transcript, workflow_path: str | None) -> None:
        self.folder = folder
        self.config = config
        self.transcript = transcript
        self._workflow_path = workflow_path or config.workflow

    @classmethod
    def open(cls, run_dir: Path, *, workflow: str | None = None, tokenizer: Path | None = None) -> Self:
        """Read a run's config and how its sessions are read. Raises ConfigError, LedgerError."""
        ledger = ledger_in(run_dir)
        folder = RunFolder(ledger.parent)
        if not folder.config.is_file():
            raise ConfigError(
                f"{str(folder.path)!r} has no {folder.config.name}, which names the workflow and the tasks of its "
                "sessions; give the folder of a run, not that of a gateway that stands alone"
            )
        config = Config.load(folder.config)
        with reading(ledger) as snapshot:
            transcript = Transcript.of_ledger(questions.note(snapshot, TRANSCRIPT_NOTE), folder.path, tokenizer)
        return cls(folder, config, transcript, workflow)

    @cached_property
    def workflow(self) -> Workflow:
        """The workflow. Raises ConfigError when there is none, or when it cannot be imported."""
        if self._workflow_path is None:
            raise ConfigError(
                f"the config of {str(self.folder.path)!r} names no workflow: it was given from Python, or its agents "
                "were elsewhere; name it with --workflow package.module:name"
            )
        return load_workflow(self._workflow_path)

    @cached_property
    def renderer(self) -> Renderer:
        """The tokenizer and formats of the run's gateway. Raises ConfigError when the tokenizer is gone."""
        if self.transcript.renderer is None:
            raise ConfigError(
                f"the tokenizer of {str(self.folder.path)!r} is not where the run had it, nor in a checkpoint; name "
                "its folder with --tokenizer"
            )
        return self.transcript.renderer

    def episode(self, snapshot: Snapshot, session_id: str) -> Episode:
        """Return a session with at least one turn. Raises ConfigError, with near names where there is none."""
        group_id = questions.group_of(snapshot, session_id)
        if group_id is None:
            near = ", ".join(questions.near_sessions(snapshot, session_id))
            remedy = f"did you mean {near}?" if near else "python -m areal_agent.view RUN_DIR --list has them"
            raise ConfigError(f"the ledger has no session {session_id!r}; {remedy}")
        if self.has_roles(snapshot, session_id, group_id):
            raise ConfigError(
                f"session {session_id!r} is of a rollout with several roles, which cannot be played again: its record "
                "would have to answer them all; name a session of a workflow without rollout.role"
            )
        turns, trajectory = questions.recorded(snapshot, session_id)
        if not turns:
            raise ConfigError(f"session {session_id!r} has no turn: its model was never called; name another session")
        return Episode(session=questions.opened(snapshot, session_id), turns=turns, trajectory=trajectory)

    @staticmethod
    def has_roles(snapshot: Snapshot, session_id: str, group_id: str) -> bool:
        """Return whether a session is of a rollout with several roles, which cannot be played again."""
        return bool(role_of(session_id, group_id) or questions.roles_of(snapshot, session_id))

    def benchmark_of(self, group_id: str) -> BenchmarkConfig | None:
        """Return the benchmark whose evaluation a group is (`eval-LABEL-INCARNATION-NAME`), if it is one."""
        kind, _, name = group_id.partition("-")[2].partition("-")[2].partition("-")
        is_eval = group_id.startswith("eval-") and kind.isdecimal()
        return next((one for one in self.config.eval.benchmarks if is_eval and one.label == name), None)

    def task(self, session: SessionRecord) -> Task:
        """Return the task of a session, from the sources of the config. Raises ConfigError when it is not there."""
        named = self.benchmark_of(session.group_id)
        if named is not None:
            raise ConfigError(
                f"session {session.id!r} is of the benchmark {named.label!r}, which the run's workflow does not play; "
                f"name one of its own tasks, or grade a checkpoint with areal_agent.eval --benchmark {named.name}"
            )
        tasks = self.tasks_to_train if session.purpose is SessionPurpose.TRAIN else self.tasks_held_out
        task = tasks.get(session.task_id)
        if task is None:
            raise ConfigError(
                f"task {session.task_id!r} of session {session.id!r} is not among the tasks that the saved config "
                "names: their source has changed since; bring back the one that the run had"
            )
        return task

    @cached_property
    def tasks_to_train(self) -> Mapping[str, Task]:
        """The tasks of the run's training, by id."""
        assert self.config.tasks is not None  # only runs whose agents are elsewhere have none
        return {task.id: task for task in load_tasks(self.config.tasks, "train", self.config.seed)}

    @cached_property
    def tasks_held_out(self) -> Mapping[str, Task]:
        """The tasks of the run's evaluations, by id."""
        source = self.config.eval.tasks or self.config.tasks
        assert source is not None
        return {task.id: task for task in load_tasks(source, "test", self.config.seed, "eval.tasks")}
