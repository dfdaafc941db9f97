"""From the text that a template writes for earlier answers to the tokens that stand for them.

An answer stands for all its sampled tokens, or, when the template leaves out its thinking, for those behind that. Which
of the two is the template's choice, and shows in the text. Knows nothing of sessions and of how text comes about.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from areal_agent.tokens.prompt import Answer
from areal_agent.tokens.renderer import Ended, Renderer

_LEAD = re.compile(r"\s*(<think>\s*</think>\s*)?")  # what a template may write in the place of thinking


def with_thinking(probe: str, content: str) -> str:
    """An answer's content with `probe` in the place of the thinking.

    No white space stands between them: some templates would write it where they leave the thinking out.
    """
    return f"<think>\n{probe}\n</think>{content}"


def live_thinking(answer: Answer) -> list[Answer]:
    """The answers on the path to `answer`, oldest first, whose thinking stands in it."""
    found: list[Answer] = []
    kept = answer.path_length
    for one in answer.lineage():
        if one.has_thinking and one.path_length <= kept:
            found.append(one)
        kept = min(kept, one.prompt.fork_at)
    return found[::-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """Some answers that follow each other, and what was written from the first one's place on."""

    first: Answer
    fork_at: int  # how many tokens of the path of the last answer stay
    new_ids: list[int]  # what comes behind them, up to the place of the next answer
    opened: str  # what the template opens for that one
    kept_text: str  # what was written before the first one's place
    added_text: str  # and from there on
    has_stripped: bool


def walk_answers(renderer: Renderer, answers: Sequence[Answer], before: str, after: str) -> Walk | None:
    """Read `after`, the text of a conversation with these answers, where `before`, that before the first one, ends.

    None when the old text is no prefix of the new one, or the answers cannot be told apart in it.
    """
    history, opened = renderer.split_opened(before)
    if not after.startswith(history):
        return None
    added, next_opened = renderer.split_opened(after[len(history) :])
    fork_at, new_ids, rest, has_stripped = answers[0].prompt.block_at, list[int](), added, False
    for answer in answers:
        written = renderer.split_at_end(rest)
        if written is None:
            return None
        following, rest = _up_to_next_answer(renderer, written, is_last=answer is answers[-1])
        if not following:
            return None
        if not _is_kept(renderer, answer, written, opened):
            has_stripped = True
            ids = ids_behind_thinking(renderer, answer, written)
        elif answer is answers[0]:
            fork_at, ids = answer.path_length, answer.sampled.tolist()
        else:
            ids = answer.block.tolist()
        bridge = renderer.ids_after(ids, following)
        new_ids += bridge if fork_at == answer.path_length else ids + bridge
    return Walk(
        first=answers[0],
        fork_at=fork_at,
        new_ids=new_ids,
        opened=next_opened,
        kept_text=history,
        added_text=added,
        has_stripped=has_stripped,
    )


def _up_to_next_answer(renderer: Renderer, written: Ended, *, is_last: bool) -> tuple[str, str]:
    """What follows an answer, its end token first, and what begins with the next one; nothing if none is found."""
    if is_last:
        return written.end + written.rest, ""
    header = renderer.answer_header
    before, found, rest = written.rest.partition(header) if header else ("", "", "")
    return (written.end + before + header, rest) if found else ("", "")


def _is_kept(renderer: Renderer, answer: Answer, written: Ended, opened: str) -> bool:
    """Whether the template wrote the whole answer, thinking included, behind what it had `opened` for it."""
    if not written.answer.startswith(opened):
        return False
    return not answer.has_thinking or renderer.probe(answer.number) in written.answer


def ids_behind_thinking(renderer: Renderer, answer: Answer, written: Ended) -> list[int]:
    """The tokens of an answer whose thinking the template left out, without an end token.

    They are the sampled ones, verbatim, where one begins at the first character after the white space that follows
    the thinking; else their text is tokenised anew. Before them comes what the template writes there.
    """
    block = answer.block.tolist()
    if block and block[-1] in renderer.stop_token_ids:
        block.pop()
    lead = _lead(written)
    ids = _behind_last(block, renderer.thinking_end_id)
    if ids is None:
        text = _text_behind_thinking(
            renderer.detokenizer.text_of(block), is_thinking=answer.has_thinking or answer.prompt.is_thinking
        )
        return renderer.ids_of(lead + text)
    text = renderer.detokenizer.text_of(ids)
    for wanted, prefix in ((lead + text.lstrip(), ""), (text.lstrip(), lead)):
        start = _start_of(renderer, ids, wanted)
        if start is not None:
            return renderer.ids_of(prefix) + ids[start:]
    return renderer.ids_of(lead + text.lstrip())


def _lead(written: Ended) -> str:
    lead = _LEAD.match(written.answer)
    return lead[0] if lead else ""


def _behind_last(ids: list[int], token_id: int | None) -> list[int] | None:
    if token_id is None or token_id not in ids:
        return None
    return ids[len(ids) - ids[::-1].index(token_id) :]


def _text_behind_thinking(text: str, *, is_thinking: bool) -> str:
    if "</think>" in text:
        return text.rpartition("</think>")[2].lstrip()
    return "" if is_thinking else text  # cut off while it was thinking


def _start_of(renderer: Renderer, ids: list[int], wanted: str) -> int | None:
    """Where in `ids` the tokens begin whose text is `wanted`, a suffix of their text."""
    for start in range(len(ids) + 1):
        text = renderer.detokenizer.text_of(ids[start:])
        if text == wanted:
            return start
        if len(text) < len(wanted):
            break
    return None
