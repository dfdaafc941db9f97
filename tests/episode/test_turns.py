"""Recorded turns as tasks of a new run: `areal_agent.replay:turns` and its workflow `go_on`.

1. Failed sessions become tasks that keep their turns but the last; 2. a rollout plays the recorded turns again, and the
new run records fresh answers alone, behind exactly the recorded tokens, sampled as the workflow asks; 3. a turn that
cannot be reached is rejected with the reason; 4. a message can be added, where the workflow begins with its task's
messages; 5. the held-out tasks are the run's own, from their beginning.
"""

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

from areal_agent.config import Config
from areal_agent.ledger import questions
from areal_agent.ledger.files import reading
from areal_agent.ledger.ledger import Ledger
from areal_agent.replay import go_on, turns
from areal_agent.rollout.local import LocalSettings, open_local
from areal_agent.rollout.runner import RolloutSpec
from areal_agent.types import SessionPurpose, Status, Task, Trajectory
from tests.episode.conftest import says
from tests.episode.guessing import ASKS, RIGHT


def failed(run: Path, **args) -> list[Task]:
    return list(turns("train", 0, str(run), below=3.5, **args))


async def rolled_out(run: Path, small_model: Path, task: Task, texts: Sequence[str]) -> Trajectory:
    """Roll the task out in a new run whose model says these texts."""
    config, engine = Config.load(run / "config.yaml"), says(small_model, texts)
    settings = LocalSettings(
        model_name="new",
        tokenizer=small_model,
        port=0,
        max_concurrent=1,
        rollout=config.rollout,
        sandbox=config.sandbox,
    )
    async with aclosing(await Ledger.open(run.parent / "new.sqlite", create=True)) as ledger:
        async with open_local(settings, go_on, engine=engine, info=engine.info(), journal=ledger.own) as rollouts:
            spec = RolloutSpec(session_id="new", group_id="new", task=task, seed=1, purpose=SessionPurpose.TRAIN)
            await rollouts.run(spec)
        return await ledger.trajectory("new")


def test_failed_sessions_keep_their_turns_but_the_last(run: Path) -> None:
    assert [(task.id, task.data["replay"]["turn"]) for task in failed(run)] == [("lost@2", 2)]
    assert [task.id for task in failed(run, turn=-2)] == ["lost@1"]
    assert failed(run, turn=3) == failed(run, turn="compaction") == []


async def test_the_new_run_records_fresh_answers_behind_the_recorded_tokens(run: Path, small_model: Path) -> None:
    (task,) = failed(run, turn=1)
    fresh = await rolled_out(run, small_model, task, [ASKS, RIGHT])
    with reading(run / "ledger.sqlite") as snapshot:
        first, second, *_ = questions.recorded(snapshot, "lost")[0]
    recorded = (*first.new_prompt_ids, *first.completions[0].token_ids, *second.new_prompt_ids)
    assert fresh.turns[0].new_prompt_ids == recorded
    assert [turn.fork_at for turn in fresh.turns] == [0, len(recorded) + len(fresh.turns[0].completions[0].token_ids)]
    last = fresh.turns[1].completions[0].id
    assert (fresh.status, fresh.rewards.final, fresh.rewards.by_completion) == (Status.COMPLETED, 1.0, {last: 5.0})


async def test_what_the_workflow_asks_for_reaches_the_new_run(run: Path, small_model: Path, tmp_path: Path) -> None:
    brief = shutil.copytree(run, tmp_path / "brief")
    config = brief / "config.yaml"
    config.write_text(config.read_text().replace("guessing:solve", "guessing:brief"))
    (task,) = failed(brief, turn=1)
    fresh = await rolled_out(brief, small_model, task, [RIGHT])
    assert fresh.turns[0].sampling.max_tokens == 7


async def test_a_turn_that_cannot_be_reached_is_rejected(run: Path, small_model: Path, hint: Path) -> None:
    (task,) = failed(run)
    await asyncio.to_thread(hint.unlink)
    fresh = await rolled_out(run, small_model, task, [RIGHT])
    assert fresh.status is Status.REJECTED
    assert fresh.error is not None and fresh.error.startswith("turn 2 of session lost was not reached: FileNotFound")


async def test_a_message_is_added(run: Path, small_model: Path) -> None:
    (task,) = failed(run, append="Check your work.")
    fresh = await rolled_out(run, small_model, task, [RIGHT])
    assert [message["content"] for message in fresh.turns[0].request_delta[-2:]] == ["six", "Check your work."]
    assert fresh.rewards.final == 1.0


async def test_the_held_out_tasks_are_the_runs_own(run: Path, small_model: Path) -> None:
    tasks = list(turns("test", 0, str(run)))
    assert [task.id for task in tasks] == ["test-0", "test-1", "test-2"]
    fresh = await rolled_out(run, small_model, tasks[0], [RIGHT])
    assert [message["content"] for message in fresh.turns[0].request_delta] == ["Which number?"]
