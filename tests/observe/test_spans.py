"""Busy time over several processes.

1. a log's spans are those in which something was under way, whatever is taken when; 2. the union of several sources is
counted once, in whatever pieces and order they report; 3. what all sources have reported is not kept; 4. a source that
never reports again holds up nothing once it has left.
"""

from hypothesis import given
from hypothesis import strategies as st

from areal_agent.observe.clock import SpanLog, SpanUnion

SECONDS = 40


def test_nested_work_is_one_span() -> None:
    clock = iter([1.0, 4.0, 5.0])
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
