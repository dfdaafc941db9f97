"""When deaths are too many: 1. three within a minute of service; 2. not when they are further apart; 3. the time that
starts take does not count, and a death in a start does."""

from areal_agent.cluster.kept_server import DeathCount


class Clock:
    time_s = 0.0

    def __call__(self) -> float:
        return self.time_s


def serve(count: DeathCount, clock: Clock, seconds: float, start_s: float = 0.0) -> bool:
    clock.time_s += start_s
    count.begin()
    clock.time_s += seconds
    return count.end()


def test_three_within_a_minute_are_too_many() -> None:
    count = DeathCount(clock := Clock())
    assert [serve(count, clock, 30.0) for _ in range(3)] == [False, False, True]


def test_three_further_apart_are_not() -> None:
    count = DeathCount(clock := Clock())
    assert [serve(count, clock, 31.0) for _ in range(6)] == [False] * 6


def test_slow_starts_do_not_excuse_deaths() -> None:
    count = DeathCount(clock := Clock())
    assert [serve(count, clock, 1.0, start_s=300.0) for _ in range(3)] == [False, False, True]


def test_deaths_in_a_start_count() -> None:
    count = DeathCount(clock := Clock())
    assert [serve(count, clock, 1.0), count.end(), count.end()] == [False, False, True]
