"""Where time goes, on virtual clocks.

- The current activity gets the time, the rest is `other`; the inner or the latest of several counts; one that raises
  ends. Seconds add up to the wall time.
- A log's spans are those in which something was under way. The union of several sources counts once, in whatever
  pieces and order they report; what all have reported is dropped, and a source that left holds up nothing.
- The engine's activities are never negative and add up to the wall time. A push comes before the model, the model
  before requests, rollouts and the bound; training and evaluation share the model's time by tokens. A restarted
  clock costs nothing.
"""

from contextlib import ExitStack
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.observe.clock import EngineReading, SpanLog, SpanUnion, TimeAccount, engine_seconds
from tests.gateway.online import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def account(clock: Clock) -> TimeAccount:
    return TimeAccount(now=clock)


def test_an_activity_that_raises_ends(account: TimeAccount, clock: Clock) -> None:
    with pytest.raises(ZeroDivisionError), account.during("training"):
        clock.now_s = 2.0
        raise ZeroDivisionError
    clock.now_s = 3.0
    assert account.seconds() == {"other": 1.0, "training": 2.0}


def test_of_overlapping_activities_the_latest_counts(account: TimeAccount, clock: Clock) -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(account.during("first"))
    clock.now_s = 1.0
    second.enter_context(account.during("second"))
    clock.now_s = 3.0
    first.close()  # it ends while the second goes on
    clock.now_s = 6.0
    second.close()
    clock.now_s = 10.0
    assert account.seconds() == {"other": 4.0, "first": 1.0, "second": 5.0}


@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "look"]), st.sampled_from("abc"), st.integers(0, 9))))
def test_seconds_add_up_to_the_wall_time(events) -> None:
    clock = Clock()
    account = TimeAccount(now=clock)
    under_way: list[ExitStack] = []
    for event, name, seconds in events:
        clock.now_s += seconds
        if event == "begin":
            under_way.append(ExitStack())
            under_way[-1].enter_context(account.during(name))
        elif event == "end" and under_way:
            under_way.pop(0).close()
        assert sum(account.seconds().values()) == clock.now_s


SECONDS = 40


def test_nested_work_is_one_span() -> None:
    clock = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    log = SpanLog(now=lambda: next(clock))
    with log.one(), log.one():
        pass
    assert log.take() == ([(1.0, 4.0)], 5.0)


def test_a_span_under_way_is_cut_and_goes_on() -> None:
    clock = iter([1.0, 2.0, 5.0, 6.0])
    log = SpanLog(now=lambda: next(clock))
    with log.one():
        assert log.take() == ([(1.0, 2.0)], 2.0)
    assert log.take() == ([(2.0, 5.0)], 6.0)


def spans_of(busy: set[int], start: int, end: int) -> list[tuple[float, float]]:
    return [(float(second), second + 1.0) for second in range(start, end) if second in busy]


@given(
    busy=st.lists(st.sets(st.integers(0, SECONDS - 1)), min_size=1, max_size=4),
    reports=st.lists(st.tuples(st.integers(0, 3), st.integers(1, SECONDS)), max_size=12),
)
def test_the_union_is_counted_once(busy: list[set[int]], reports: list[tuple[int, int]]) -> None:
    union = SpanUnion()
    reported = [0] * len(busy)
    for source in range(len(busy)):
        union.join(source, 0.0)
    for source, until in [*reports, *((one, SECONDS) for one in range(len(busy)))]:
        if source < len(busy) and until > reported[source]:
            union.add(source, spans_of(busy[source], reported[source], until), until=float(until))
            reported[source] = until
    assert union.seconds == len(set.union(*busy))


def test_what_all_have_reported_is_not_kept() -> None:
    union = SpanUnion()
    union.join("a", 0.0)
    union.join("b", 0.0)
    for second in range(0, 100, 2):
        union.add("a", [(second, second + 1)], until=second + 2)
        union.add("b", [(second, second + 1)], until=second + 2)
    assert (union.seconds, union._open) == (50.0, [])


def test_a_source_that_left_holds_up_nothing() -> None:
    union = SpanUnion()
    union.join("a", 0.0)
    union.join("b", 0.0)
    union.add("a", [(0.0, 4.0)], until=5.0)
    union.leave("b")
    assert (union.seconds, union._open) == (4.0, [])


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
