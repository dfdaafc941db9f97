"""Several roles of one rollout, over a real gateway and a scripted engine.

1. each role has a session, a seed, a conversation and a reward of its own, as the page on workflows says;
2. a name opens one role; bad names, and names after the end, are refused;
3. roles end as their rollout does; a reward may be missing for one of them; one that never called the model is no error
   where another did;
4. a role that is being opened when the rollout is cancelled ends with it; one that cannot be opened is `infra`;
5. advantages are within the role, and a group is flat if every role is; other roles' rewards are metrics of their own;
6. rollouts are counted, not roles; the groups of an interrupted run go on with all their roles, each trained once.
7. the ledger finds the roles of a rollout by its name; those of a lost rollout are dropped.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from areal_agent import Reject, Role, RolloutBatch, Status, Task, Trajectory, TrajectoryGroup
from areal_agent.algorithms.advantages import token_advantages
from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.config import Config
from areal_agent.engine.fake import FakeEngine
from areal_agent.errors import LedgerError
from areal_agent.ledger import questions
from areal_agent.ledger.verify import verify
from areal_agent.observe.metrics import describe_batch
from areal_agent.rollout.local import EndedRollout
from areal_agent.rollout.producer import DynamicSampling
from areal_agent.rollout.runner import RolloutRunner, RolloutSpec
from areal_agent.run.serving import Serving
from areal_agent.testing import SANDBOX, MemoryJournal, open_scripted, plain_renderer, play_roles
from areal_agent.tokens.records import token_records
from areal_agent.types import SessionPurpose, SessionRecord
from tests.histories import begin_rollout, end_rollout, open_ledger, trajectory
from tests.rollout.test_producer import GROUP_SIZE, Script, make_producer, producing, roll_out

PAGE = Path(__file__).parents[2] / "docs/workflows.md"


async def ask(role: Role) -> str:
    reply = await role.client.chat.completions.create(model="model", messages=[{"role": "user", "content": "hi"}])
    return reply.id


@pytest.mark.parametrize(
    ("said", "rewards"),
    [(["3+4", "7"], (0.0, 1.0)), (["3+4", "8"], (1.0, 0.0)), (["99+1"], (-1.0, None))],
    ids=["right", "wrong", "nothing to solve"],
)
def test_the_page_on_workflows_has_a_proposer_and_a_solver(said: list[str], rewards: Sequence[float | None]) -> None:
    names: dict[str, Any] = {}
    exec(PAGE.read_text().partition("## Several roles")[2].partition("```python")[2].partition("```")[0], names)
    ended = play_roles(names["solve"], {"limit": 10}, *said)
    assert (ended["proposer"].rewards.final, ended[""].rewards.final) == rewards
    assert [len(ended[role].turns) for role in ("proposer", "")] == [1, len(said) - 1]
    assert ended[""].status is (Status.COMPLETED if len(said) == 2 else Status.REJECTED)
    assert (ended["proposer"].session_id, ended["proposer"].group_id) == ("s/proposer", "g/proposer")


def test_a_name_opens_one_role_with_a_seed_and_a_conversation_of_its_own() -> None:
    async def solve(task: Any, rollout: Any) -> float:
        white, black, again = await asyncio.gather(*(rollout.role(name) for name in ("white", "black", "black")))
        assert black is again and len({one.api_key for one in (rollout, white, black)}) == 3
        for name in ("", "a/b", "a-b", "x" * 65):
            with pytest.raises(ValueError, match="give it a name of letters, digits and _"):
                await rollout.role(name)
        for one in (rollout, white, black):
            await ask(one)
        await asyncio.to_thread(
            black.sync_client.chat.completions.create, model="model", messages=[{"role": "user", "content": "thread"}]
        )
        black.log(role="black")
        black.reward(0.5, name="style")
        left.append(rollout)
        return 1.0

    async def late() -> None:
        with pytest.raises(RuntimeError, match="when the rollout had ended"):
            await left[0].role("late")

    left: list[Any] = []
    ended = play_roles(solve, {}, *"abcd")
    assert ended[""].error is None and {name: len(one.turns) for name, one in ended.items()} == {
        "white": 1, "black": 2, "": 1,
    }  # fmt: skip
    assert len({one.turns[0].sampling.seed for one in ended.values()}) == 3
    assert (ended["black"].logged, ended["black"].rewards.parts) == ({"role": "black"}, {"style": 0.5})
    asyncio.run(late())


@pytest.mark.parametrize(
    ("speakers", "rewarded", "ending", "expected"),
    [
        ("own black", "own black", None, ("completed", "completed")),
        ("own black", "own", None, ("completed", "missing_reward")),
        ("own black", "black", None, ("missing_reward", "completed")),
        ("own", "own black", None, ("completed", "rejected")),
        ("black", "own black", None, ("rejected", "completed")),
        ("", "own black", None, ("error", "rejected")),
        ("own black", "own black", KeyError("x"), ("error", "error")),
        ("own black", "own black", Reject("easy"), ("rejected", "rejected")),
        ("own black", "own black", "another's answer", ("error", "error")),
    ],
)
def test_roles_end_as_their_rollout_does(
    speakers: str, rewarded: str, ending: Exception | str | None, expected: Sequence[str]
) -> None:
    async def solve(task: Any, rollout: Any) -> None:
        roles = {"own": rollout, "black": await rollout.role("black")}
        answers = {name: await ask(roles[name]) for name in speakers.split()}
        for name in rewarded.split():
            roles[name].reward(1.0)
        if isinstance(ending, str):
            roles["black"].reward(1.0, completion=answers["own"])
        elif ending is not None:
            raise ending

    ended = play_roles(solve, {}, "a", "b")
    assert (ended[""].status, ended["black"].status) == expected, ended[""].error


SPEC = RolloutSpec(session_id="s", group_id="g", task=Task(id="t", data={}), seed=0, purpose=SessionPurpose.TRAIN)


class SlowJournal(MemoryJournal):
    """Opens the session of the role `black` once it may, and that of `lost` never."""

    def __init__(self) -> None:
        super().__init__()
        self.is_opening, self.may_open = asyncio.Event(), asyncio.Event()

    async def open_session(self, session: SessionRecord) -> None:
        if session.id == "s/lost":
            raise LedgerError("it cannot be written")
        if session.id == "s/black":
            self.is_opening.set()
            await self.may_open.wait()


@asynccontextmanager
async def opening(role: str) -> AsyncGenerator[tuple[RolloutRunner, SlowJournal]]:
    """What runs a workflow that opens this role."""

    async def solve(task: Any, rollout: Any) -> None:
        await rollout.role(role)

    engine, renderer, journal = FakeEngine([]), plain_renderer(), SlowJournal()
    async with open_scripted(solve, engine, renderer=renderer, journal=journal, sandbox=SANDBOX) as runner:
        yield runner, journal


async def test_a_role_that_cannot_be_opened_is_not_the_workflows_fault() -> None:
    async with opening("lost") as (runner, journal):
        assert await runner.run(SPEC) is Status.INFRA
    assert [one.error for one in journal.closed if "the role 'lost' could not be opened" in str(one.error)]


async def test_a_role_that_is_being_opened_ends_with_a_cancelled_rollout() -> None:
    async with opening("black") as (runner, journal):
        running = asyncio.create_task(runner.run(SPEC))
        await journal.is_opening.wait()
        running.cancel()
        await asyncio.sleep(0)
        journal.may_open.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert {one.session_id: one.status for one in journal.closed} == dict.fromkeys(("s", "s/black"), Status.CANCELLED)


def group_of(**rewards: Sequence[float]) -> list[Trajectory]:
    """One group with a session a role (`own` is the rollouts' own) and reward; each has two sampled tokens."""
    ends = {role: "" if role == "own" else f"/{role}" for role in rewards}
    return [
        trajectory(f"g-{number}{ends[role]}", [0, 0], reward, group_id=f"g{ends[role]}")
        for role, of_role in rewards.items()
        for number, reward in enumerate(of_role)
    ]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ({"own": (1.0, 1.0), "black": (-1.0, -1.0)}, {"own": (0.0, 0.0), "black": (0.0, 0.0)}),
        ({"own": (1.0, 1.0), "black": (0.0, 1.0)}, {"own": (0.0, 0.0), "black": (-0.5, 0.5)}),
        ({"own": (1.0, -1.0), "black": (-1.0, 1.0)}, {"own": (1.0, -1.0), "black": (-1.0, 1.0)}),
        ({"own": (3.0, 3.0), "black": (2.0,)}, {"own": (0.0, 0.0), "black": (0.0,)}),
    ],
    ids=["constant by role", "spread in one role", "zero-sum", "a role of one"],
)
def test_advantages_are_within_the_role(rewards: Any, expected: dict[str, Sequence[float]]) -> None:
    group = group_of(**rewards)
    records = [record for one in group for record in token_records(one)]
    advantages = token_advantages(records, AlgorithmConfig(advantage="dr_grpo"))
    assert [one[-2:].tolist() for one in advantages] == [[value] * 2 for of in expected.values() for value in of]
    is_flat = not any(value for of in expected.values() for value in of)
    assert DynamicSampling(max_flat_groups=9).replaces(group) is is_flat


def test_the_rewards_of_other_roles_are_metrics_of_their_own() -> None:
    group = group_of(own=(1.0, 0.0), black=(5.0, 7.0))
    records = [record for one in group for record in token_records(one)]
    whole = TrajectoryGroup(group_id="g", task_id="0", trajectories=tuple(group))
    row = describe_batch(RolloutBatch(step=1, groups=(whole,), records=tuple(records)), 1.0)
    assert {name: row[name] for name in row if name.startswith(("reward/", "rollouts/trained"))} == {
        "reward/mean": 0.5, "reward/std": 0.5, "reward/success": 0.5, "reward/zero_std_groups": 0.0,
        "reward/pass_at_2": 1.0, "reward/role/black/mean": 6.0, "reward/role/black/std": 1.0, "rollouts/trained": 4,
    }  # fmt: skip


class Duels(Script):
    """Groups in which every rollout has a role `black`, with these rewards by the group's number."""

    def __init__(self, black: dict[int, Sequence[float]]) -> None:
        super().__init__()
        self.black = black

    async def run_group(self, group_id: str, task: Task) -> TrajectoryGroup:
        group = await super().run_group(group_id, task)
        others = [
            await roll_out(self.ledger, f"{one.session_id}/black", f"{group_id}/black", [0], Status.COMPLETED, reward)
            for one, reward in zip(group.trajectories, self.black.get(int(group_id[1:]), (0.0, 0.0)), strict=True)
        ]
        return replace(group, trajectories=(*group.trajectories, *others))


async def test_rollouts_are_counted_and_go_on_after_a_restart(tmp_path: Path) -> None:
    """Group 0 is flat in both roles, group 1 in one."""
    sessions = {f"g000001-{number}{role}" for number in (0, 1) for role in ("", "/black")}
    for num_found in (0, 1):  # the second process finds group 1, whose lease was lost with the first one
        script = Duels({1: (1.0, 0.0)})
        async with producing(tmp_path, script, DynamicSampling(max_flat_groups=99), max_staleness=0) as producer:
            batch = await producer.take(1, 1)
            assert {one.session_id for one in batch.trained} == sessions and len(batch.groups) == 1
            assert producer.admission.consumed == GROUP_SIZE
            assert [dict(producer.counts.statuses), dict(producer.counts.drops)] == (
                [{"completed": 2}, {}] if num_found else [{"completed": 4}, {"filtered": 4}]
            )
            if num_found:
                await script.ledger.commit_checkpoint(1, "checkpoints/step_000001")
            assert not any("/" in name for name in await script.ledger.ask(questions.drawn_groups))
    report = verify(tmp_path / "ledger.sqlite")
    assert report.is_ok and report.counts is not None and report.counts.num_trained == 4


async def test_the_ledger_finds_the_roles_of_a_rollout(tmp_path: Path) -> None:
    async with open_ledger(tmp_path) as ledger:
        for session_id, group_id in (
            ("g1-1", "g1"), ("g1-1/black", "g1/black"), ("g1-1/a", "g1/a"), ("g1-1/other", "g1"), ("g1-10", "g1"),
            ("g1-1.2", "g1"), ("g1-1.2/black", "g1/black"), ("g1-10/black", "g1/black"), ("g1-1-x/black", "g1/black"),
        ):  # fmt: skip
            await begin_rollout(ledger, session_id, group_id)
            await end_rollout(ledger, trajectory(session_id, [0], 1.0, group_id=group_id))
        assert await ledger.ask(questions.roles_of, "g1-1") == ["g1-1/a", "g1-1/black"]
        assert [one.role for one in await ledger.ask(questions.rollout, "g1-1")] == ["", "a", "black"]


class LostOnce:
    """An executor whose first rollout was lost after its role had ended, and was rolled out again."""

    async def run(self, spec: RolloutSpec) -> EndedRollout:
        return EndedRollout(session_id="g1-0.2", status=Status.COMPLETED, lost=("g1-0",))


async def test_roles_of_a_lost_rollout_are_not_compared(tmp_path: Path) -> None:
    async with open_ledger(tmp_path) as ledger:
        await begin_rollout(ledger, "g1-0", "g1")
        await roll_out(ledger, "g1-0/black", "g1/black", [0], Status.COMPLETED, 5.0)
    async with open_ledger(tmp_path) as ledger:
        for session_id, group_id in (("g1-0.2", "g1"), ("g1-0.2/black", "g1/black")):
            await roll_out(ledger, session_id, group_id, [0], Status.COMPLETED, 1.0)
        config = Config.parse(
            {"workflow": "m:f", "tasks": "m:f", "group_size": 1, "algorithm": {"advantage": "reinforce_pp"}}
        )
        serving = Serving(config=config, ledger=ledger, engine=cast(Any, None), rollouts=cast(Any, LostOnce()))
        group = await serving.run_group("g1", Task(id="0", data={}))
        fates = {one.session_id: str(one.fate) for one in group.trajectories if one.fate}
        assert fates == {"g1-0": "dropped(orphan)", "g1-0/black": "dropped(orphan)"}
        ready = await make_producer(ledger, Script(), None)._finished(group)
        assert ready is not None
        assert [one.session_id for one in ready.trainable] == ["g1-0.2", "g1-0.2/black"]


@pytest.mark.parametrize(("role", "is_drawn_again"), [("", True), ("/black", False)])
async def test_a_group_with_a_completed_role_is_not_drawn_again(
    tmp_path: Path, role: str, is_drawn_again: bool
) -> None:
    async with open_ledger(tmp_path) as ledger:
        await begin_rollout(ledger, "g000001-0", "g000001")
        if role:
            await roll_out(ledger, f"g000001-0{role}", f"g000001{role}", [0], Status.COMPLETED, 1.0)
    async with open_ledger(tmp_path) as ledger:  # the rollout is an orphan
        assert await ledger.ask(questions.drawn_groups) == {"g000001": is_drawn_again}
        producer = make_producer(ledger, Script(), None)
        assert await producer.restore(await ledger.ask(questions.waiting)) == int(not is_drawn_again)
