"""How models write the reasoning before an answer."""

import re
from dataclasses import dataclass, replace
from enum import StrEnum


class ReasoningFormat(StrEnum):
    """The ways in which models write the reasoning before an answer."""

    THINK = "think"  # <think>...</think>
    SEED = "seed"  # <seed:think>...</seed:think>
    GEMMA = "gemma"  # <|channel>thought ... <channel|>
    HARMONY = "harmony"  # a message in the channel `analysis`
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Thinking:
    """The texts around reasoning: those by which it is read, and those which are written with white space.

    >>> TAGS[ReasoningFormat.THINK].write("hm", "Yes.")
    '<think>\\nhm\\n</think>\\n\\nYes.'
    """

    begin: str
    end: str
    inner: str = ""  # written on either side of the reasoning
    outer: str = ""  # written after it
    is_inline: bool = False  # templates also read it inside the content

    @property
    def opening(self) -> str:
        """The text with which reasoning begins."""
        return self.begin + self.inner

    def as_in(self, text: str, reasoning: str, following: str) -> "Thinking":
        """Return the same tags with the white space that a template writes around `reasoning`, and before what follows.

        >>> TAGS[ReasoningFormat.THINK].as_in("<think>hm</think>Yes.", "hm", "Yes.").write("so", "No.")
        '<think>so</think>No.'
        """
        space = re.search(
            rf"{re.escape(self.begin)}(\s*){re.escape(reasoning)}\s*{re.escape(self.end)}(\s*){re.escape(following)}",
            text,
        )
        return self if space is None else replace(self, inner=space[1], outer=space[2])

    def write(self, reasoning: str, text: str) -> str:
        """Write reasoning and what follows it."""
        return self.opening + reasoning + self.inner + self.end + self.outer + text

    def is_open(self, text: str) -> bool:
        """Return whether the text that follows `text` is reasoning.

        >>> TAGS[ReasoningFormat.THINK].is_open("<think>"), TAGS[ReasoningFormat.THINK].is_open("<think> </think>")
        (True, False)
        """
        return self.begin in text.rpartition(self.end)[2]

    def lead(self, text: str) -> str:
        """Return what an answer begins with in the place of reasoning that was left out: white space, empty tags."""
        found = re.match(rf"\s*(({re.escape(self.begin)}\s*)?{re.escape(self.end)}\s*)?", text)
        return found[0] if found else ""

    def opened(self) -> re.Pattern[str]:
        """Return a pattern for the reasoning that a template opens, or leaves empty, at the end of a prompt."""
        begin, end = re.escape(self.begin), re.escape(self.end)
        return re.compile(rf"{begin}\s*({end}\s*)?\Z")


TAGS = {
    ReasoningFormat.THINK: Thinking(begin="<think>", end="</think>", inner="\n", outer="\n\n", is_inline=True),
    ReasoningFormat.SEED: Thinking(begin="<seed:think>", end="</seed:think>", outer="\n"),
    ReasoningFormat.GEMMA: Thinking(begin="<|channel>thought", end="<channel|>", inner="\n"),
    ReasoningFormat.HARMONY: Thinking(begin="<|channel|>analysis<|message|>", end="<|end|><|start|>assistant"),
}


def detect_reasoning(template: str) -> ReasoningFormat:
    """Return the format whose tags a chat template has, comments left out."""
    text = re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)
    found = (one for one, tags in TAGS.items() if tags.begin in text or (tags.is_inline and tags.end in text))
    return next(found, ReasoningFormat.NONE)
