"""Where the engine's time goes: 1. whatever the clocks say, no activity is negative and all add up to the wall time;
2. a push comes before the model, and the model before requests, rollouts and the bound; 3. the model's time is shared
between training and evaluation by tokens; 4. a clock that starts anew costs nothing.
"""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.observe.clock import EngineReading, engine_seconds

seconds = st.floats(0.0, 1e7)
readings = st.builds(
    EngineReading,
    **{one.name: st.integers(0, 10**9) if one.name.endswith("_tokens") else seconds for one in fields(EngineReading)},
)


@given(since=readings, until=readings)
def test_all_activities_add_up_to_the_wall_time(since: EngineReading, until: EngineReading) -> None:
    spent = engine_seconds(since, until)
    assert sum(spent.values()) == pytest.approx(max(0.0, until.wall_s - since.wall_s), abs=1e-6)
    assert min(spent.values()) >= 0.0


def test_each_activity_gets_what_those_before_it_leave() -> None:
    until = EngineReading(
        wall_s=100.0,
        starting_s=5.0,
        paused_s=10.0,
        busy_s=40.0,
        in_flight_s=60.0,
        rolling_s=80.0,
        producing_s=90.0,
        generated_tokens=100,
        evaluated_tokens=25,
    )
    assert engine_seconds(EngineReading(), until) == {
        "starting": 5.0,
        "paused_for_push": 10.0,
        "generating": 30.0,
        "evaluating": 10.0,
        "waiting_for_gateway": 10.0,  # in flight, but for the push and the model
        "waiting_for_agents": 20.0,  # rolling, but for what was in flight
        "waiting_for_admission": 10.0,
        "other": 5.0,
    }


def test_more_evaluated_than_generated_is_all_of_it() -> None:
    """An answer counts when its rollout ends, tokens when they are sampled: the two may fall on two sides of a row."""
    until = EngineReading(wall_s=10.0, busy_s=4.0, generated_tokens=10, evaluated_tokens=30)
    assert engine_seconds(EngineReading(), until)["evaluating"] == 4.0


def test_a_clock_that_starts_anew_costs_nothing() -> None:
    since = EngineReading(wall_s=10.0, busy_s=8.0, in_flight_s=8.0, rolling_s=8.0)
    spent = engine_seconds(since, replace(since, wall_s=12.0, busy_s=1.0))
    assert (spent["generating"], spent["other"]) == (0.0, 2.0)
