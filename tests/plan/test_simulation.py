"""The model, against times worked out by hand, in seconds.

1. requests share a server, wait for a place, and spread over servers; 2. the bound and the slots admit as the producer
does; 3. engine and trainer slow each other down, and a push holds the engines; 4. stragglers are waited for or dropped,
and filtered groups replaced; 5. the fit finds the constants that made the times.
"""

import random
from typing import Any

import numpy as np
import pytest

from areal_agent.ledger.questions import TurnTime
from areal_agent.plan.calibration import costs_of, fit_engine, groups_of
from areal_agent.plan.simulation import Costs, Episode, Layout, Turn, simulate


def ends(*rollouts: Episode, layout: dict[str, Any] | None = None, num_steps: int = 1, **costs: Any) -> list[float]:
    """Play groups of these rollouts, one group a step; 0.1 s a token unless said otherwise. Return the steps' ends."""
    fields = {"groups": [rollouts], "token_s": 0.1, "crowd_s": 0.0, "training_s": [1.0]} | costs
    settings = {"max_staleness": 0, "max_concurrent": 64, "max_running_requests": 64} | (layout or {})
    whole = Layout(**{"batch_size": 1, "group_size": len(rollouts)} | settings)
    return [round(end, 6) for end in simulate(Costs(**fields), whole, num_steps).ends]


ONE_SECOND = (Turn(0.0, 10.0),)


def test_requests_share_a_server() -> None:
    """Two of 10 tokens, each at 1 / (0.1 + 2 * 0.05) = 5 a second."""
    assert ends(ONE_SECOND, ONE_SECOND, crowd_s=0.05) == [3.0]


def test_a_request_that_comes_later_slows_the_first_down() -> None:
    """Alone 5 tokens in the first second, then both at 1 / 0.3: the first ends at 2.5, the other's last 5 take 1 s."""
    assert ends((Turn(0.0, 10.0),), (Turn(1.0, 10.0),), crowd_s=0.1) == [4.5]


def test_a_full_server_makes_requests_wait() -> None:
    assert ends(ONE_SECOND, ONE_SECOND, crowd_s=0.05, layout={"max_running_requests": 1}) == [4.0]


def test_requests_spread_over_servers() -> None:
    assert ends(ONE_SECOND, ONE_SECOND, crowd_s=0.05, layout={"num_servers": 2}) == [2.5]


def test_a_turn_counts_more_tokens_for_its_prompt() -> None:
    assert ends(ONE_SECOND, turn_tokens=5.0) == [2.5]


def test_turns_and_waits_follow_each_other() -> None:
    assert ends((Turn(1.0, 10.0), Turn(4.0, 20.0), Turn(0.5, 0.0))) == [9.5]


FIVE_SECONDS = (Turn(4.0, 10.0),)
THREE = {"training_s": [2.0], "push_s": 1.0}


def test_rollouts_go_on_while_the_trainer_works() -> None:
    """Bound 1: two groups start at once and are ready at 5; the third and fourth start with versions 1 and 2."""
    assert ends(FIVE_SECONDS, layout={"max_staleness": 1}, num_steps=4, **THREE) == [8.0, 11.0, 16.0, 19.0]


def test_a_slot_is_free_when_its_group_ends() -> None:
    """One at a time: groups are ready at 5, 10 and 15."""
    layout = {"max_staleness": 1, "max_concurrent": 1}
    assert ends(FIVE_SECONDS, layout=layout, num_steps=3, **THREE) == [8.0, 13.0, 18.0]


FOUR_SECONDS = (Turn(0.0, 40.0),)
ONE_AT_A_TIME = {"max_staleness": 1, "max_concurrent": 1}


def test_engine_and_trainer_slow_each_other_down() -> None:
    """From 4 to 8 both work at half speed; the second group's last 2 s of work end at 10."""
    slowed = ends(FOUR_SECONDS, layout=ONE_AT_A_TIME, num_steps=2, training_s=[2.0], contention=1.0)
    assert slowed == [8.0, 14.0]


def test_a_push_holds_the_engines() -> None:
    """From 6 to 7 the engine stands still, so that the second group is ready at 9; without the stall at 8."""
    pushed = {"num_steps": 2, "training_s": [2.0], "push_s": 1.0}
    assert ends(FOUR_SECONDS, layout=ONE_AT_A_TIME, stall_s=1.0, **pushed) == [7.0, 12.0]
    assert ends(FOUR_SECONDS, layout=ONE_AT_A_TIME, **pushed) == [7.0, 11.0]


def test_a_straggler_is_waited_for_or_dropped() -> None:
    """Bound 1. The first group takes 20 s, all others 1 s. Step 2 waits for it; or step 3 finds it too stale."""
    groups = [[(Turn(0.0, 200.0),)], [ONE_SECOND]]
    seed = next(seed for seed in range(100) if draws(seed, groups, 4) == [0, 1, 1, 1])
    costs = Costs(groups=groups, token_s=0.1, crowd_s=0.0, training_s=[3.0])
    layout = Layout(batch_size=1, group_size=1, max_staleness=1, max_concurrent=9, max_running_requests=9)
    waiting = Layout(**{name: getattr(layout, name) for name in layout.__slots__} | {"straggler_wait_s": 120.0})
    assert simulate(costs, waiting, 2, seed).ends[1] == pytest.approx(23.0)
    assert simulate(costs, layout, 2, seed).ends[1] == pytest.approx(8.0)


def draws(seed: int, groups: list[Any], number: int) -> list[int]:
    """Return which groups the simulation draws first: each draw of a group is followed by one for its fate."""
    generator = random.Random(seed)
    drawn: list[int] = []
    for _ in range(number):
        drawn.append(groups.index(generator.choice(groups)))
    return drawn


def test_filtered_groups_are_replaced() -> None:
    """Synchronous, 1 s a group and 1 s a step: every step takes a whole number of groups, and some more than one."""
    times = ends(ONE_SECOND, num_steps=20, kept_share=0.5)
    groups = [round(end - start - 1.0, 6) for start, end in zip([0.0, *times], times, strict=False)]
    assert all(number == int(number) >= 1 for number in groups)
    assert max(groups) > 1


def test_the_fit_finds_what_made_the_times() -> None:
    generator = np.random.default_rng(0)
    tokens = generator.integers(1, 100, 300).astype(float)
    crowd, beside = generator.uniform(1, 64, 300), generator.integers(0, 2, 300).astype(float)
    more = 0.4 * float(tokens.mean())
    seconds = (tokens + more) * (0.01 + 0.002 * crowd) * (1.0 + 0.5 * beside)
    assert fit_engine(tokens, seconds, crowd, beside) == pytest.approx((0.01, 0.002, more, 0.5))


def timed(session: str, start: float, end: float, num_tokens: int = 10, **changes: Any) -> TurnTime:
    fields = {"group_id": "g", "purpose": "train", "session_started_s": 100.0, "session_ended_s": 120.0}
    return TurnTime(
        **{"session_id": session, "started_s": start, "ended_s": end, "num_tokens": num_tokens} | fields | changes
    )


def test_waits_are_the_gaps_between_turns() -> None:
    turns = [
        timed("a", 101.0, 103.0),
        timed("a", 102.0, 104.0, 7),
        timed("a", 110.0, 115.0, 3),
        timed("b", 100.0, 101.0, 5),
    ]
    first = [Turn(1.0, 10.0), Turn(0.0, 7.0), Turn(6.0, 3.0), Turn(5.0, 0.0)]  # the second began within the first
    second = [Turn(0.0, 5.0), Turn(19.0, 0.0)]
    graded = timed("c", 100.0, 101.0, group_id="e", purpose="eval")
    role = timed("b/black", 100.0, 101.0, 5, group_id="g/black")  # of a rollout's other role: a rollout of its own
    assert groups_of([*turns, graded, role]) == [[first, second, second]]


def test_a_step_beside_rollouts_would_be_shorter_alone() -> None:
    """Turns of 10 tokens take 1 s, and 2 s beside a train step: contention 1. Half of the step's 4 s is beside one."""
    rows = [
        {"time": end + 1.0, "seconds/trainer/training": 4.0, "seconds/trainer/pushing": 1.0, "rollouts/trained": 3}
        | {"seconds/trainer/saving": 0.5, "push/stall_s": 0.25, "rollouts/dropped/filtered": 1}
        for end in (108.0, 118.0)
    ]
    alone = [timed("a", start, start + 1.0) for start in (100.0, 101.0, 110.0, 111.0)]
    beside = [timed("b", start, start + 2.0) for start in (105.0, 115.0)]
    costs = costs_of(rows, [*alone, *beside], num_servers=1)
    assert costs.contention == pytest.approx(1.0)
    assert costs.training_s == pytest.approx([4.0 / 1.5] * 2)
    assert (costs.push_s, costs.stall_s, costs.between_s, costs.kept_share) == (1.0, 0.25, 0.5, 0.75)
