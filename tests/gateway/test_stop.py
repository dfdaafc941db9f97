"""Stop texts:

- the first to be completed ends the text; of several completed together, the longest
- only a possible beginning of a stop text is held back, and it is released at the end
- the result is the same however the text is cut into pieces (property)
"""

from hypothesis import given
from hypothesis import strategies as st

from areal_agent.gateway.draft import StopFinder


def through(stops: list[str], pieces: list[str]) -> tuple[str, str]:
    finder = StopFinder(stops)
    out = "".join(map(finder.feed, pieces))
    return out + finder.finish(), finder.stop_text


def test_the_first_to_be_complete_ends_the_text() -> None:
    assert through(["bcd", "c"], ["abcd"]) == ("ab", "c")
    assert through(["bc", "abc"], ["xabc"]) == ("x", "abc")


def test_only_a_possible_beginning_is_held_back() -> None:
    finder = StopFinder(["\n\n"])
    assert [finder.feed("a\n"), finder.feed("b"), finder.feed("\n")] == ["a", "\nb", ""]
    assert finder.finish() == "\n"


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
    pieces=st.lists(st.text("abc", max_size=3), max_size=6),
)
def test_pieces_do_not_matter(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    assert through(stops, pieces) == through(stops, list(text))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    out, stop_text = through(stops, pieces)
    assert text.startswith(out)
    if ends:
        assert out + stop_text == text[: min(ends)]
        assert stop_text == max((stop for stop in stops if text[: min(ends)].endswith(stop)), key=len)
    else:
        assert out == text
