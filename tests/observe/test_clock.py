"""Where time goes, on a virtual clock.

1. what is under way gets the time, the rest is `other`; 2. within another activity the inner one counts; 3. an
activity that raises ends; 4. of activities that overlap without nesting, the one that began last counts; 5. whatever
happens, the seconds add up to the wall time and the shares to 1; 6. before any time has passed there are no shares.
"""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.observe.clock import TimeAccount


class VirtualClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def account(clock: VirtualClock) -> TimeAccount:
    return TimeAccount(now=clock)


def test_what_is_under_way_gets_the_time(account: TimeAccount, clock: VirtualClock) -> None:
    clock.now_s = 1.0
    with account.during("training"):
        clock.now_s = 4.0
        assert account.seconds() == {"other": 1.0, "training": 3.0}
    clock.now_s = 5.0
    assert account.seconds() == {"other": 2.0, "training": 3.0}


def test_the_inner_activity_counts(account: TimeAccount, clock: VirtualClock) -> None:
    with account.during("training"):
        clock.now_s = 1.0
        with account.during("saving"):
            clock.now_s = 3.0
        clock.now_s = 7.0
    assert account.seconds() == {"other": 0.0, "training": 5.0, "saving": 2.0}


def test_an_activity_that_raises_ends(account: TimeAccount, clock: VirtualClock) -> None:
    with pytest.raises(ZeroDivisionError), account.during("training"):
        clock.now_s = 2.0
        raise ZeroDivisionError
    clock.now_s = 3.0
    assert account.seconds() == {"other": 1.0, "training": 2.0}


def test_of_overlapping_activities_the_latest_counts(account: TimeAccount, clock: VirtualClock) -> None:
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
    clock = VirtualClock()
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
        if clock.now_s:
            assert sum(account.shares().values()) == pytest.approx(1.0)


def test_without_time_there_are_no_shares(account: TimeAccount) -> None:
    assert account.shares() == {}
