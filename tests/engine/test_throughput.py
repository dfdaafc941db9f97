"""Sampled tokens per second: since the start at first, then since the last reading, and over at least the window; 0
when nothing was sampled or no time has passed.
"""

from areal_agent.engine.embedded.scheduler import WINDOW_S, Throughput


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def rates(*steps: tuple[float, int]) -> list[float]:
    """The rates read after so many seconds each, when so many more tokens were sampled."""
    clock, num_tokens, told = Clock(), 0, list[float]()
    throughput = Throughput(clock)
    for seconds, more in steps:
        clock.now_s += seconds
        num_tokens += more
        told.append(throughput.rate(num_tokens))
    return told


def test_since_the_last_question() -> None:
    assert rates((20, 100), (50, 50), (15, 0)) == [5.0, 1.0, 0.0]


def test_over_the_window_when_asked_often() -> None:
    second = WINDOW_S / 10
    assert rates(*[(second, 10)] * 10)[-1] == 10 / second
    assert rates(*[(second, 10)] * 10, *[(second, 0)] * 5)[-1] == 50 / WINDOW_S


def test_when_no_time_has_passed() -> None:
    assert rates((0, 0), (0, 5)) == [0.0, 0.0]
