"""`python -m areal_agent.plan` reads a run's records, plays it anew, and says what each split of GPUs would bring:

1. its report repeats the run that it was calibrated from, and lists every split; 2. a longer bound and another GPU are
forecast where they help; 3. a plan without a run names its guesses; 4. what it cannot plan from is one line, exit 2.
"""

import asyncio
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_agent.config import Config
from areal_agent.errors import ConfigError
from areal_agent.plan.__main__ import main
from areal_agent.plan.advice import Planner, other_bounds
from areal_agent.plan.calibration import Calibration, of_run
from areal_agent.plan.simulation import Costs, Turn
from tests import histories

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
SETTINGS = ("batch_size=1", "group_size=2", "max_staleness=0")
STEP_S = 15.5
"""1 s to the first turn, 2 s of it, 4 s of a tool, 4 s of the second turn, 0.5 s; training 3, push 1. Saving takes
0.5 s beside the next rollouts."""


def run_folder(folder: Path, num_steps: int) -> Path:
    """Write the records of a synchronous run whose steps are all alike."""
    folder.mkdir()
    config = Config.load(QUICKSTART, SETTINGS)
    (folder / "config.yaml").write_text(config.to_yaml())
    rows = [row(step) for step in range(1, num_steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    asyncio.run(record(folder, num_steps))
    return folder


async def record(folder: Path, num_steps: int) -> None:
    async with histories.open_ledger(folder) as ledger:
        for step in range(num_steps):
            for name in (f"g{step}-0", f"g{step}-1"):
                start = {"group_id": f"g{step}", "started_s": STEP_S * step}
                await ledger.own.open_session(histories.session(name, **start))
                for number, (begun_s, num_tokens) in enumerate(((1.0, 10), (7.0, 20))):
                    answer = histories.completion(f"{name}-c{number}", (step,) * num_tokens)
                    times = {"started_s": start["started_s"] + begun_s}
                    times["ended_s"] = times["started_s"] + 0.2 * num_tokens
                    await ledger.own.append_turn(name, histories.turn(f"{name}-t{number}", answer, **times))
                end_s = STEP_S * step + 11.5
                await ledger.own.close_session(histories.trajectory(name, (), 1.0, ended_s=end_s, **start))


def row(step: int) -> dict[str, Any]:
    trainer = {"waiting_for_rollouts": 11.0, "training": 3.0, "pushing": 1.0, "saving": 0.5}
    return {
        "kind": "step",
        "step": step,
        "time": STEP_S * step,
        "seconds/wall": STEP_S,
        **{f"seconds/trainer/{name}": seconds for name, seconds in trainer.items()},
        "push/stall_s": 0.25,
        "rollouts/trained": 2,
        "engine/mean_running_requests": 0.75,
    }


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def planned(*given: object) -> str:
        monkeypatch.setattr(sys, "argv", ["plan", "--config", QUICKSTART, *map(str, given), *SETTINGS])
        assert main() == 0
        return capsys.readouterr().out

    return planned


def test_it_repeats_the_run_and_lists_the_splits(tmp_path: Path, plan: Callable[..., str]) -> None:
    run = run_folder(tmp_path / "run", 5)
    told = plan("--gpus", 3, "--from", run).splitlines()
    assert told[0] == f"{run}: 5 steps, 232 an hour; the model makes 232 (+0%) of it"
    assert told[1].startswith("rollouts: 2.0 turns of 15 tokens, with tool waits of 4.00 s on average")
    assert told[2].endswith("; 0.8 requests at once on average")
    assert told[3].startswith("the trainer: 3.00 s a step, 1.00 s a push, 0.50 s between")
    assert [line.split()[:2] for line in told[6:8]] == [["1", "2"], ["2", "1"]]
    assert told[-4].startswith("best: 2 for rollout, 1 for training")  # both siblings then sample alone
    assert [line.split(":")[0].strip() for line in told[-3:-1]] == ["with max_staleness=1", "with max_staleness=2"]
    assert told[-1].startswith("  with one GPU more (2 for rollout, 2 for training)")


def test_another_config_is_told_of(tmp_path: Path, plan: Callable[..., str]) -> None:
    run = run_folder(tmp_path / "run", 4)
    told = plan("--gpus", 2, "--from", run, "rollout.max_tokens=128", "workflow=envs.code.workflow:solve")
    assert "that run had another workflow, rollout.max_tokens: its times may not carry over" in told
    assert "that run computed on a CPU" in told


def test_its_own_rollouts_are_what_a_step_waits_for(tmp_path: Path) -> None:
    """Halved tool waits save 2 s of 15.5, sampling 3 and training 1.5; two versions more let all of it overlap."""
    config = Config.load(QUICKSTART, SETTINGS)
    planner = Planner(config, of_run(run_folder(tmp_path / "run", 5), config))
    one = planner.forecast(1, 1)
    assert one.per_hour == pytest.approx(3600 / STEP_S, rel=0.01)
    assert (one.low, one.high) == pytest.approx((one.per_hour / 1.1, one.per_hour * 1.1))  # all steps are alike
    assert one.training == pytest.approx(3 / STEP_S, rel=0.05)
    assert one.bottleneck.startswith("max_staleness (2 more: +")


def costs(**changes: Any) -> Costs:
    group = [[Turn(0.0, 10.0)]] * 2
    return Costs(**{"groups": [group], "token_s": 0.1, "crowd_s": 0.0, "training_s": [8.0]} | changes)


def planner(*settings: str, **changes: Any) -> Planner:
    config = Config.load(QUICKSTART, [*SETTINGS, *settings])
    calibration = Calibration(costs=costs(**changes), told=[], error=0.1, num_ranks=1, batch_answers=2)
    return Planner(config, calibration)


def test_more_ranks_train_faster_by_a_power() -> None:
    """Sampling 1 s, training 8 s on one rank and 8 / 4^0.9 = 2.297 s on four."""
    assert planner().forecast(1, 1).per_hour == pytest.approx(3600 / 9)
    four = planner().forecast(1, 4)
    assert four.per_hour == pytest.approx(3600 / 3.297, rel=1e-3)
    assert four.low == pytest.approx(3600 / (1 + 8 / 4**0.8) / 1.1)
    assert four.high == pytest.approx(3600 / (1 + 8 / 4) * 1.1)


def test_a_shared_gpu_is_slower_while_both_work() -> None:
    """Sampling 8 s beside training 8 s: alone a step takes 8 s, on one GPU 16."""
    both = {"groups": [[[Turn(0.0, 80.0)]] * 2]}
    apart, shared = (planner("max_staleness=4", **both).forecast(*split) for split in ((1, 1), (1, 0)))
    assert shared.is_shared
    assert apart.per_hour == pytest.approx(3600 / 8, rel=0.01)
    assert shared.per_hour == pytest.approx(3600 / 16, rel=0.1)


def test_twice_the_batch_trains_twice_as_long() -> None:
    assert planner("batch_size=2").forecast(1, 1).per_hour == pytest.approx(3600 / 17)


def test_servers_of_several_gpus_are_split_whole() -> None:
    settings = ("engine.backend=sglang", "engine.python=p", "engine.server_args=['--tp-size', '2']")
    assert planner(*settings).splits(6) == [(2, 4), (4, 2)]
    with pytest.raises(ConfigError, match=r"--gpus is 2, but a server takes 2.* give --gpus 3 or more"):
        planner(*settings).splits(2)


def test_other_bounds_are_half_and_double() -> None:
    assert [other_bounds(bound) for bound in (0, 1, 2, 8)] == [[1, 2], [0, 2], [0, 1, 4], [0, 4, 16]]


def test_without_a_run_it_names_its_guesses(plan: Callable[..., str]) -> None:
    told = plan("--gpus", 2)
    assert told.startswith("guesses, since no run was named with --from:")
    assert re.search(r"by the doctor.s tables: 1\.\d million parameters", told)
    assert "a rollout is one turn of 32 tokens, half of rollout.max_tokens, without tools" in told
    assert "best: 1 for rollout, 1 for training" in told


def test_what_cannot_be_planned_from_is_refused(tmp_path: Path, plan: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="--gpus is 0; give at least 1"):
        plan("--gpus", 0)
    with pytest.raises(ConfigError, match="there is no run folder"):
        plan("--gpus", 2, "--from", tmp_path / "none")
    short = run_folder(tmp_path / "short", 3)
    with pytest.raises(ConfigError, match=r"has 3 train steps, and a plan needs at least 4 to average; let that run"):
        plan("--gpus", 2, "--from", short)
    (short / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"has no metrics.jsonl, so it is not the folder of a training run"):
        plan("--gpus", 2, "--from", short)
    whole = run_folder(tmp_path / "whole", 4)
    (whole / "ledger.sqlite").unlink()
    asyncio.run(record(whole, 0))
    with pytest.raises(ConfigError, match="has no turns of rollouts"):
        plan("--gpus", 2, "--from", whole)
