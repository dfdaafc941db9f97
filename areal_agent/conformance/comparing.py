"""Compares the text of a prompt with what transformers renders, but for the answers that were sampled in it.

::

    prompt      injected │ sampled │ injected │ sampled │ injected
                   =          ~         =          ~         =
    template    the template's text, in which the answers are written from their echoes

What was injected must stand in the template's text to the letter. What was sampled must read as what the template
writes in its place; white space, the layout of JSON and empty thinking may differ, and the template may leave out text
beside a call, or make it thinking. Where it leaves out thinking, the sampled text begins behind that.
"""

from array import array
from collections.abc import Sequence
from typing import cast

from areal_agent.conformance.templates import Subject
from areal_agent.tokens.prompt import Answer, Prompt
from areal_agent.types import JsonObject

UNSAID = "(unsaid)"
"""Stands for empty thinking, which templates may leave out where they write any other."""


class Spans:
    """The text of a prompt, cut where sampled answers stand in it."""

    def __init__(self, subject: Subject, prompt: Prompt, tools: Sequence[JsonObject]) -> None:
        self._renderer = subject.renderer
        self._ends = {*subject.renderer.end_texts, cast("str", subject.tokenizer.eos_token)}
        self._tools = tools
        self._injected, self._sampled = [""], list[tuple[str, Answer]]()
        for ids, answers, is_sampled in _pieces(prompt):
            text = self._renderer.detokenizer.text_of(ids)
            for answer in answers:
                said = (
                    text if is_sampled else next((form for form in self._forms(answer) if form and form in text), None)
                )
                if said is not None:
                    before, _, text = text.partition(said) if said else ("", "", text)
                    self._add(before, said, answer)
            self._injected[-1] += text
        self.text = self._renderer.detokenizer.text_of(prompt.path())

    def _add(self, before: str, said: str, answer: Answer) -> None:
        self._injected[-1] += before
        if self._sampled and not self._injected[-1]:  # right after another answer
            said = self._sampled.pop()[0] + said
            self._injected.pop()
        self._sampled.append((said, answer))
        self._injected.append("")

    def difference(self, expected: str | None, *, is_whole: bool = True) -> str | None:
        """Return the first difference from the template's text, or None. If it is not whole, more text may follow."""
        if expected is None:
            return "the template refuses the messages"
        if is_whole and expected == self.text:
            return None
        first, *others = self._injected
        if not expected.startswith(first) or (is_whole and not others and first != expected):
            at = next((at for at, (a, b) in enumerate(zip(first, expected, strict=False)) if a != b), len(first))
            return f"after {expected[:at][-40:]!r} comes {first[at:][:200]!r}, the template has {expected[at:][:200]!r}"
        position = len(first)
        for number, ((sampled, answer), following) in enumerate(zip(self._sampled, others, strict=True), 1):
            is_end = is_whole and number == len(others)
            found = len(expected) - len(following) if is_end else expected.find(following, position)
            while found >= position and not self._is_same(sampled, answer, expected[position:found]):
                found = -1 if is_end else expected.find(following, found + 1)
            if found < position or not expected.endswith(following if is_end else ""):
                told = f"after the answer {sampled!r} comes {following[:200]!r}"
                return f"{told}, the template has {expected[position:][:200]!r}"
            position = found + len(following)
        return None

    def _is_same(self, sampled: str, answer: Answer, inserted: str) -> bool:
        """Return whether the template's text of an answer reads as what was sampled."""
        one, other = self._without_end(sampled), self._without_end(inserted)
        bare, bare_other = "".join(one.split()), "".join(other.split())
        is_cut = bool(answer.sampled) and answer.sampled[-1] not in self._renderer.stop_token_ids
        if bare == bare_other or (is_cut and all(word in other for word in one.split())):
            return True
        a, b = (self._renderer.answer_format.parse(text, tools=self._tools) for text in (one, other))
        thought, said, written = (b.reasoning or "").replace(UNSAID, ""), a.content.strip(), b.content.strip()
        return (
            a.tool_calls == b.tool_calls
            and (written == said or (bool(a.tool_calls) and not written))
            and (thought == (a.reasoning or "") or (bool(a.tool_calls) and thought == said))
            and (a.reasoning is None or b.reasoning is not None)
        )

    def _forms(self, answer: Answer) -> list[str]:
        """Return what may stand for an answer in a later prompt: all of it, or what follows its thinking."""
        text, end = self._renderer.detokenizer.text_of(answer.block), self._renderer.thinking.end
        parts = text.split(end)
        after = [end.join(parts[number:]).lstrip() for number in range(1, len(parts))]
        is_cut_off = len(parts) == 1 and (answer.has_thinking or answer.prompt.is_thinking)
        whole = [] if is_cut_off else [text]
        return [form for one in (*whole, *after) for form in (one, self._without_end(one).lstrip())]

    def _without_end(self, text: str) -> str:
        end = next((end for end in self._ends if text.rstrip().endswith(end)), "")
        return text.rstrip().removesuffix(end) if end else text


def _pieces(prompt: Prompt) -> list[tuple["array[int]", list[Answer], bool]]:
    """Return the ids of a path in pieces, with the answers whose tokens are in them: a sampled piece is one answer."""
    pieces = list[tuple["array[int]", list[Answer], bool]]()
    for one in prompt.lineage():
        if one.parent:
            pieces.append((one.parent.block, [one.parent], True))
        length, kept = 0, 0
        while kept < len(pieces) and length + len(pieces[kept][0]) <= one.fork_at:
            length += len(pieces[kept][0])
            kept += 1
        own = one.new_ids if one is prompt else one.new_ids[: len(one.new_ids) - one.num_opened]
        middle = pieces[kept][0][: one.fork_at - length] if kept < len(pieces) else array("i")
        pieces[kept:] = [(middle + own, [answer for _, answers, _ in pieces[kept:] for answer in answers], False)]
    return pieces
