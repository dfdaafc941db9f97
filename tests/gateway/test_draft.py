"""An answer while it is sampled:

- a special token that is not the end is text; the end of the last call, and of its block, is known
- of stop texts, the first to be completed ends the text; of several completed together, the longest (property)
- the gains add up to the answer's text, ids and rows, wherever chunks are cut (property)
- what the engine did not stream is taken from its result; a result that lost tokens stays an abort
"""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.gateway.draft import ChatReading, Draft, Gain, PlainReading, Reading, StopFinder
from areal_agent.tokens.formats.answer_format import AnswerFormat, ToolFormat
from areal_agent.tokens.formats.thinking import ReasoningFormat
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import FinishReason, GenerateResult, TokenChunk, VersionSpan, WeightVersion

HERMES = ChatReading(
    answer_format=AnswerFormat(tool_format=ToolFormat.HERMES, reasoning_format=ReasoningFormat.THINK),
    may_call_tools=True,
    is_thinking=False,
)
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def sampled(ids: list[int], reason: FinishReason = FinishReason.STOP, split: int = 0) -> GenerateResult:
    """Return a result whose first `split` tokens are of another version than the rest."""
    spans = [(0, 0, split), (1, split, len(ids))]
    return GenerateResult(
        token_ids=tuple(ids),
        logprobs=tuple(-float(position) for position in range(len(ids))),
        versions=tuple(
            VersionSpan(version=WeightVersion(step=step), start=start, end=end)
            for step, start, end in spans
            if end > start
        ),
        finish_reason=reason,
    )


def chunk_of(result: GenerateResult, start: int, end: int) -> TokenChunk:
    return TokenChunk(token_ids=result.token_ids[start:end], logprobs=result.logprobs[start:end])


def new_draft(renderer: Renderer, *stops: str, reading: Reading | None = None) -> Draft:
    return Draft(
        detokenizer=renderer.detokenizer,
        reader=(reading or PlainReading()).reader(),
        stop_token_ids=renderer.stop_token_ids,
        stops=stops,
        is_single_call=False,
    )


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT])
def test_a_special_token_that_is_not_the_end_is_text(renderer: Renderer, reason: FinishReason) -> None:
    ids = renderer.ids_of("x<|im_start|>")
    draft = new_draft(renderer)
    result = sampled(ids, reason)
    draft.finish(result)
    assert draft.text == "x<|im_start|>"
    assert len(draft.rows()) == len(ids)


@pytest.mark.parametrize(
    ("tool_format", "call", "ending"),
    [
        (ToolFormat.HERMES, CALL, ""),
        (ToolFormat.MINIMAX, '<minimax:tool_call>\n<invoke name="f">\n</invoke>', "\n</minimax:tool_call>\n"),
    ],
)
def test_the_end_of_the_last_call_is_known(renderer: Renderer, tool_format: ToolFormat, call: str, ending: str) -> None:
    answer_format = AnswerFormat(tool_format=tool_format, reasoning_format=ReasoningFormat.THINK)
    draft = new_draft(renderer, reading=replace(HERMES, answer_format=answer_format))
    said = [renderer.ids_of(text) for text in ("hm ", call, ending, "well, so")]
    result = sampled([token_id for ids in said for token_id in ids])
    cuts: list[int] = []
    for position in range(len(result.token_ids)):
        draft.feed(chunk_of(result, position, position + 1))
        cuts.append(draft.num_through_call)
    through_call, through_block = sum(map(len, said[:2])), sum(map(len, said[:3]))
    assert list(dict.fromkeys(cuts)) == sorted({0, through_call, through_block})


def test_a_result_that_lost_tokens_is_not_cut(renderer: Renderer) -> None:
    whole = sampled(renderer.ids_of("xyz"))
    draft = new_draft(renderer, "y")
    draft.feed(chunk_of(whole, 0, 3))
    lost = sampled([], FinishReason.ABORT)
    assert draft.kept(lost) is lost


@given(
    text=st.text("abQ é🙂", max_size=12),
    stops=st.lists(st.sampled_from(["Q", "ab", " é", "🙂b"]), max_size=2),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_gains_make_the_answer(
    renderer: Renderer, text: str, stops: list[str], cuts: list[int], reason: FinishReason
) -> None:
    ids = renderer.ids_of(text + ("<|im_end|>" if reason is FinishReason.STOP else ""))
    result = sampled(ids, reason)

    def run(ends: list[int]) -> tuple[Draft, list[Gain]]:
        draft = new_draft(renderer, *stops)
        gains = [draft.gain(draft.feed(chunk_of(result, start, end))) for start, end in pairwise(ends)]
        deltas, _ = draft.finish(result)
        return draft, [*gains, draft.gain(deltas)]

    draft, gains = run([0, *sorted(min(cut, len(ids)) for cut in cuts)])
    whole, _ = run([0])
    kept = draft.kept(result)
    assert kept == whole.kept(result)
    assert draft.text == whole.text == "".join(delta.content for gain in gains for delta in gain.deltas)
    assert tuple(token_id for gain in gains for token_id in gain.token_ids) == kept.token_ids
    assert [row for gain in gains for row in gain.rows] == list(draft.rows())
    first_stop = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    assert text.startswith(draft.text)
    assert (first_stop is None) == (draft.text == text)
    told = b"".join(renderer.detokenizer.bytes_of(row.token_id) for row in draft.rows())
    assert told.startswith(draft.text.encode())


def through(stops: list[str], pieces: list[str]) -> tuple[str, str]:
    finder = StopFinder(stops)
    out = "".join(map(finder.feed, pieces))
    return out + finder.finish(), finder.stop_text


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
    pieces=st.lists(st.text("abc", max_size=3), max_size=6),
)
def test_the_first_stop_text_to_be_complete_ends_the_text(stops: list[str], pieces: list[str]) -> None:
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
