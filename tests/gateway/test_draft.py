"""An answer while it is sampled:

- a stop text removes the tokens after the one that completes it, and the text from its beginning
- the text of a token that may be the end waits for the next token; the end token has no text
- an answer with a single call ends with its first call; the end of the last call, and of its block, is known
- the gains add up to the answer's text, ids and rows, wherever chunks are cut (property)
- what the engine did not stream is taken from its result; a result that lost tokens stays an abort
"""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.gateway.draft import ChatReading, Draft, Gain, PlainReading, Reading
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


def new_draft(renderer: Renderer, *stops: str, reading: Reading | None = None, is_single_call: bool = False) -> Draft:
    return Draft(
        detokenizer=renderer.detokenizer,
        reader=(reading or PlainReading()).reader(),
        stop_token_ids=renderer.stop_token_ids,
        stops=stops,
        is_single_call=is_single_call,
    )


def test_a_stop_text_cuts_tokens_and_text(renderer: Renderer) -> None:
    ids = [token_id for letter in "xaQbQyz" for token_id in renderer.ids_of(letter)]
    assert len(ids) == 7
    draft = new_draft(renderer, "QbQ")
    result = sampled(ids, split=4)
    draft.feed(chunk_of(result, 0, 4))
    assert not draft.has_ended
    draft.feed(chunk_of(result, 4, 7))
    assert draft.has_ended
    draft.finish(result)
    kept = draft.kept(result)
    assert draft.text == "xa"
    assert kept.token_ids == tuple(ids[:5])
    assert len(kept.logprobs) == 5
    assert [(span.start, span.end) for span in kept.versions] == [(0, 4), (4, 5)]
    assert kept.finish_reason is FinishReason.STOP
    assert [row.token_id for row in draft.rows()] == ids[:2]


def test_an_end_token_says_nothing(renderer: Renderer) -> None:
    ids = renderer.ids_of("x<|im_end|>")
    draft = new_draft(renderer)
    result = sampled(ids)
    assert "".join(delta.content for delta in draft.feed(chunk_of(result, 0, len(ids)))) == "x"
    deltas, _ = draft.finish(result)
    assert deltas == ()
    assert draft.text == "x"
    assert [row.token_id for row in draft.rows()] == ids[:-1]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT])
def test_a_special_token_that_is_not_the_end_is_text(renderer: Renderer, reason: FinishReason) -> None:
    ids = renderer.ids_of("x<|im_start|>")
    draft = new_draft(renderer)
    result = sampled(ids, reason)
    draft.finish(result)
    assert draft.text == "x<|im_start|>"
    assert len(draft.rows()) == len(ids)


def test_a_single_call_ends_the_answer(renderer: Renderer) -> None:
    first = renderer.ids_of(f"hm {CALL}")
    result = sampled([*first, *renderer.ids_of(f"{CALL}<|im_end|>")])
    draft = new_draft(renderer, reading=HERMES, is_single_call=True)
    _, parsed = draft.finish(result)
    assert draft.kept(result).token_ids == tuple(first)
    assert [call.name for call in parsed.tool_calls] == ["f"]
    assert parsed.content == "hm"


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
