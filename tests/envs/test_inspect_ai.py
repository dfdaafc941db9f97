"""inspect_ai tasks, played by the package's own `eval` with a scripted model.

All rollouts run at once. 1. The reward is the first score, and all scores are named parts; every sampled token is
trained; tools are called. 2. What fails outside the model is `infra`, a full context is not; a first score that says
nothing is no reward. 3. A rollout that is cancelled interrupts its sample. 4. The command `inspect eval` needs no more
than a session. 5. What is refused. 6. `results.eval` of an evaluation is a log of the package's.
"""

import asyncio
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import areal_agent
from areal_agent import ConfigError, Rollout, Status, Trajectory
from areal_agent.config import Config
from areal_agent.engine.fake import FakeEngine
from areal_agent.files import RunFolder
from areal_agent.models.recipe import END, train_tokenizer
from areal_agent.run.inspect_log import write_inspect_log
from areal_agent.run.scores import Sample as Graded
from areal_agent.run.scores import Scores
from areal_agent.run.serving import eval_specs
from areal_agent.testing import SANDBOX, open_scripted, play, tool_call
from areal_agent.tokens.records import token_records
from areal_agent.tokens.transcript import TRANSCRIPT_NOTE, TranscriptSettings
from envs.inspect_ai.tasks import load
from envs.inspect_ai.workflow import solve
from tests.envs.doors import CONTEXT, play_all, wait_forever
from tests.histories import open_ledger

pytest.importorskip("inspect_ai")
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.log import list_eval_logs, read_eval_log, read_eval_log_sample_summaries
from inspect_ai.scorer import Score, accuracy, mean, scorer
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

HERE = f"{__name__}:arithmetic"
SAID = {
    "0+1?": ["1"],
    "1+1?": [tool_call("add", a=1, b=1), "It is 2"],
    "2+1?": ["no"],
    "3+1?": ["unclear"],
    "4+1?": ["nothing"],
    "5+1?": ["break"],
    "6+1?": [tool_call("add", a=6, b=1)],
    "7+1?": [tool_call("add", a=7, b=1), "8"],
    "8+1?": [],
    "9+1?": [tool_call("add", a=9, b=1)],
}


@tool
def add(fifo: str) -> Any:
    async def execute(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: One number.
            b: The other.
        """
        if a == 6:
            os._exit(1)
        if a == 9:
            await wait_forever(Path(fifo))
        return "long " * CONTEXT if a == 7 else str(a + b)

    return execute


@scorer(metrics=[accuracy()])
def right() -> Any:
    async def score(state: Any, target: Any) -> Score:
        said = state.output.completion
        if said == "break":
            raise RuntimeError("the judge is away")
        values = {"unclear": "unclear", "nothing": math.nan}
        return Score(value=values.get(said, "C" if said.endswith(target.text) else "I"))

    return score


@scorer(metrics={"*": [mean()]})
def lengths() -> Any:
    async def score(state: Any, target: Any) -> Score:
        return Score(value={"chars": len(state.output.completion), "turns": len(state.messages) // 2})

    return score


@task
def arithmetic(size: int = 10, fifo: str = "") -> Any:
    samples = [Sample(input=f"{number}+1?", target=str(number + 1)) for number in range(size)]
    return Task(dataset=samples, solver=[use_tools(add(fifo)), generate()], scorer=[right(), lengths()])


async def command(given: dict[str, Any], rollout: Rollout) -> float:
    """Return the accuracy that `inspect eval` finds."""
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "AREAL_BASE_URL": rollout.base_url, "AREAL_API_KEY": rollout.api_key, "PYTHONPATH": paths}
    options = ["-T", "size=1", "--log-dir", given["folder"], "--log-format", "json", "--display", "none"]
    asked = [f"{Path(__file__).name}@arithmetic", "--model", f"openai-api/areal/{rollout.model}", *options]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "inspect_ai", "eval", *asked), env=env, cwd=Path(__file__).parent
    )
    assert await process.wait() == 0
    (log,) = await asyncio.to_thread(lambda: Path(given["folder"]).glob("*.json"))
    return json.loads(log.read_text())["results"]["scores"][0]["metrics"]["accuracy"]["value"]


@pytest.fixture(scope="module")
def fifo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fifo") / "fifo"
    os.mkfifo(path)
    return path


@pytest.fixture(scope="module")
def played(fifo: Path) -> list[Trajectory]:
    """What became of the samples, in the order of SAID."""
    return asyncio.run(play_all(solve, load("train", 0, HERE, {"fifo": str(fifo)}), SAID, fifo))


def test_scores_are_rewards_and_every_sampled_token_is_trained(played: list[Trajectory]) -> None:
    assert [(one.status, one.error) for one in played[:3]] == [(Status.COMPLETED, None)] * 3
    assert [one.rewards.final for one in played[:3]] == [1.0, 1.0, 0.0]
    assert played[1].rewards.parts == {"right": 1.0, "lengths/chars": 7.0, "lengths/turns": 2.0}
    for one, num_turns in zip(played[:3], (1, 2, 1), strict=True):
        (record,) = token_records(one)
        assert (len(one.turns), int(record.loss_mask.sum())) == (num_turns, one.num_sampled_tokens)


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (3, Status.MISSING_REWARD, "gave no reward"),
        (4, Status.MISSING_REWARD, "gave no reward"),
        (5, Status.INFRA, "the judge is away"),
        (6, Status.INFRA, "died without an answer"),
        (7, Status.COMPLETED, "None"),
        (8, Status.INFRA, "InternalServerError"),
        (9, Status.CANCELLED, "the run ended first"),
    ],
)
def test_how_a_rollout_ends(played: list[Trajectory], number: int, status: Status, said: str) -> None:
    assert (played[number].status, said in str(played[number].error)) == (status, True), played[number].error


def test_a_full_context_is_scored_by_the_package(played: list[Trajectory]) -> None:
    assert (played[7].rewards.final, len(played[7].turns)) == (0.0, 1)


def test_the_command_needs_no_more_than_a_session(tmp_path: Path) -> None:
    trajectory = play(command, {"folder": str(tmp_path)}, "It is 1")
    assert (trajectory.error, trajectory.rewards.final, len(trajectory.turns)) == (None, 1.0, 1)


def test_a_split_has_samples_of_its_own() -> None:
    train, test = (load(split, 0, HERE, {"size": 50}) for split in ("train", "test"))
    assert len(train) + len(test) == 50 and 0 < len(test) < 20


@pytest.mark.parametrize(
    ("name", "args", "error"),
    [
        ("no.such:task", {}, "ModuleNotFoundError.*give MODULE:FUNCTION"),
        (HERE, {"sizes": 1}, "unexpected keyword argument 'sizes'"),
        (f"{__name__}:right", {}, "a function with @task returns"),
    ],
)
def test_what_is_refused(name: str, args: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load("train", 0, name, args)


async def add_it(given: dict[str, Any], rollout: Rollout) -> float:
    """Two turns with a tool, or a failure where the model says so."""
    ask = rollout.client.chat.completions.create
    messages: list[Any] = [{"role": "developer", "content": "Add."}]
    messages += [{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}]
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    message = (await ask(model=rollout.model, messages=messages, tools=tools)).choices[0].message
    if not message.tool_calls:
        raise RuntimeError("no tool is called")
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}]
    said = (await ask(model=rollout.model, messages=messages, tools=tools)).choices[0].message.content or ""
    rollout.log(answer=said)
    rollout.reward(0.25, name="style")
    return float("2" in said)


async def test_an_evaluation_has_a_log_of_the_package(tmp_path: Path) -> None:
    train_tokenizer([], vocab_size=512).save_pretrained(tmp_path / "tokenizer")
    settings = TranscriptSettings(tokenizer=str(tmp_path / "tokenizer"))
    folder = RunFolder(tmp_path / "sums-eval")
    folder.make()
    values = {"model": "m", "workflow": "a:b", "tasks": "c:d", "rollout": {"temperature": 0.5}}
    folder.config.write_text((config := Config.parse(values)).to_yaml())
    tasks = [areal_agent.Task(id=name, data={"answer": 2}) for name in ("sum/0", "sum/1")]
    graded: list[Graded] = []
    async with open_ledger(folder.path) as ledger:
        await ledger.set_note(TRANSCRIPT_NOTE, settings.note())
        renderer = settings.load_renderer()
        texts = [tool_call("add", a=1), "It is 2", tool_call("add", a=1), "3", "no", "no"]
        engine = FakeEngine([renderer.ids_of(text + END) for text in texts])
        async with open_scripted(add_it, engine, renderer=renderer, journal=ledger.own, sandbox=SANDBOX) as runner:
            for spec in eval_specs("eval", tasks[:1], 0, 2) + eval_specs("eval-b", tasks[1:], 0, 2):
                await runner.run(spec)
                graded.append(Graded.of(await ledger.trajectory(spec.session_id)))
    scores = Scores.of(graded, 1.0)
    assert scores is not None
    path = str(write_inspect_log(folder, config, tasks, graded, scores))
    (listed,) = list_eval_logs(str(folder.path))
    assert (listed.name, listed.task) == (Path(path).as_uri(), "sums-eval")
    log = read_eval_log(path)
    assert (log.status, log.eval.model, log.eval.config.epochs, log.eval.model_generate_config.temperature) == (
        *("success", "m", 2, 0.5),
    )
    assert log.results is not None and log.samples is not None
    figures = {(of.name, name): one.value for of in log.results.scores for name, one in of.metrics.items()}
    assert (figures["success", "accuracy"], figures["success", "pass_at_2"], figures["reward", "mean"]) == (
        0.5,
        1.0,
        0.5,
    )
    assert (log.results.total_samples, log.results.completed_samples) == (4, 2)
    right, wrong, failed, _ = sorted(log.samples, key=lambda one: (str(one.id), one.epoch))
    assert [(one.id, one.epoch, one.target) for one in (right, wrong, failed)] == [
        *(("sum/0", 1, "2"), ("sum/0", 2, "2"), ("sum/1", 1, "2")),
    ]
    assert [one.role for one in right.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [one.text for one in right.messages[:2]] == ["Add.", "1+1?"] and len(right.input) == 2
    (call,) = right.messages[2].tool_calls
    assert (call.function, call.arguments, right.messages[3].tool_call_id) == ("add", {"a": 1}, call.id)
    assert (right.output.completion, right.output.stop_reason) == ("It is 2", "stop")
    assert right.scores is not None and wrong.scores is not None
    given = {name: one.value for name, one in right.scores.items()}
    assert given == {"success": "C", "part/style": 0.25, "reward": 1.0}
    assert (right.scores["success"].answer, wrong.scores["success"].value) == ("It is 2", "I")
    assert right.model_usage["m"].output_tokens == graded[0].num_tokens > 0 < right.model_usage["m"].input_tokens
    assert failed.scores == {} and failed.error is not None and "no tool is called" in failed.error.message
    summaries = read_eval_log_sample_summaries(path)
    assert [(one.input, one.message_count) for one in summaries] == [("1+1?", 5), ("1+1?", 5), ("1+1?", 3), ("1+1?", 3)]
    assert [bool(one.error) for one in summaries] == [False, False, True, True]
