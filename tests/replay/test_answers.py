"""Recorded answers to calls with images: 1. an image is known by its digest, though all of a size have the same tokens;
2. with `bridges_tools` another image in a tool's result is what a tool said."""

import pytest

from areal_agent.errors import RequestError
from areal_agent.replay.answers import RecordedAnswers
from areal_agent.testing import plain_renderer
from areal_agent.types import GenerateRequest, ImageSpan, PromptImage, SamplingParams, Turn
from tests import histories

SEEN, SHOWN, OTHER = ("a" * 64, "b" * 64, "c" * 64)
PAD = 7  # any id


def ids(text: str) -> tuple[int, ...]:
    return tuple(plain_renderer().ids_of(text))


def turns() -> tuple[Turn, Turn]:
    """A question about an image, and a tool's result that has one."""
    asked = (*ids("user: "), PAD, PAD, *ids(" What? tool: "))
    image = ImageSpan(digest=SEEN, start=len(ids("user: ")), end=len(ids("user: ")) + 2)
    first = histories.turn("t1", histories.completion("c1", (0,)), new_prompt_ids=asked, images=(image,))
    said = [{"type": "text", "text": "done"}, {"type": "image_url", "image_url": {"url": f"sha256:{SHOWN}"}}]
    result = (*ids("<done"), PAD, PAD, *ids(">"))
    shown = ImageSpan(digest=SHOWN, start=len(ids("<done")), end=len(ids("<done")) + 2)
    second = histories.turn(
        "t2", histories.completion("c2", (0, 0)), parent="c1", fork_at=len(asked), new_prompt_ids=result,
        images=(shown,), request_delta=({"role": "tool", "content": said},),
    )  # fmt: skip
    return first, second


def call(*path: Turn, digests: tuple[str, ...]) -> GenerateRequest:
    """The request of the last turn, with these images."""
    spans: tuple[ImageSpan, ...] = ()
    for turn in path:
        spans = turn.images_of_prompt(spans)
    images = tuple(
        PromptImage(span=ImageSpan(digest=digest, start=span.start, end=span.end), data=b"")
        for span, digest in zip(spans, digests, strict=True)
    )
    prompt = tuple(token_id for turn in path for token_id in turn.new_prompt_ids)
    return GenerateRequest(request_id="r", input_ids=prompt, sampling=SamplingParams(), images=images)


async def test_an_image_is_known_by_its_digest() -> None:
    first, second = turns()
    answers = RecordedAnswers((first, second), plain_renderer())
    with pytest.raises(RequestError, match="this call is not a recorded one"):
        await answers.generate(call(first, digests=(OTHER,)))
    [difference] = answers.differences
    assert difference.turn == 1
    lines = [f"-user: [image {SEEN[:12]}] What? tool: ", f"+user: [image {OTHER[:12]}] What? tool: "]
    assert difference.text.splitlines()[-2:] == lines
    assert len((await answers.generate(call(first, digests=(SEEN,)))).token_ids) == 1
    assert len((await answers.generate(call(first, second, digests=(SEEN, SHOWN)))).token_ids) == 2
    assert answers.not_made == ()


async def test_another_image_of_a_tool_is_what_it_said() -> None:
    first, second = turns()
    answers = RecordedAnswers((first, second), plain_renderer(), bridges_tools=True)
    await answers.generate(call(first, digests=(SEEN,)))
    assert len((await answers.generate(call(first, second, digests=(SEEN, OTHER)))).token_ids) == 2
    [difference] = answers.differences
    assert difference.is_bridged
    assert f"+<done[image {OTHER[:12]}]>" in difference.text
