"""Prints lines to a terminal, in colour where it has any, and makes the text of models and tools harmless.

No character that moves the cursor, colours, hides or reorders text reaches the terminal: it is written as its escape.
Every line of such text stands behind a bar, also where a long one is wrapped, so none of it can pass for a heading.
"""

from collections.abc import Iterable
from typing import TextIO

from rich.console import Console
from rich.text import Text

KEPT = "\n\t\u00a0\u200c\u200d"
"""Characters that are shown as they are, though Python does not count them as printable: they change no other text."""
LABEL_WIDTH = 10
MAX_CHARS = 4_000
"""The longest text that is shown whole."""


def visible(text: str) -> str:
    r"""Return a text in which every character that a terminal would obey is written as its escape.

    >>> visible("\x1b[31mred \u202eback")
    '\\x1b[31mred \\u202eback'
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in KEPT else one.encode("unicode_escape").decode("ascii") for one in text
    )


def in_line(text: str) -> str:
    """Return a visible text on one line.

    >>> in_line("a\\nb")
    'a\\\\nb'
    """
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


class Screen:
    """Prints to a stream. Only a terminal gets colours and wrapped lines; `NO_COLOR` turns its colours off."""

    def __init__(self, stream: TextIO, *, is_full: bool = False) -> None:
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._is_full = is_full

    def line(self, *parts: str | tuple[str, str]) -> None:
        """Print one line of parts; a part may be a pair of a text and its style."""
        text = Text()
        for part in parts:
            words, style = (part, "") if isinstance(part, str) else part
            text.append(in_line(words), style)
        self._console.print(text)

    def block(self, label: str, text: str, style: str = "") -> None:
        """Print a text of any length and content behind a bar, with a label at its first line."""
        gutter = f"{in_line(label)[:LABEL_WIDTH]:<{LABEL_WIDTH}} │ "
        for line in self._wrapped(self._shortened(visible(text)).split("\n"), len(gutter)):
            self._console.print(Text(gutter, "dim") + Text(line, style))
            gutter = f"{'':<{LABEL_WIDTH}} │ "

    def _shortened(self, text: str) -> str:
        num_left_out = len(text) - MAX_CHARS
        if self._is_full or num_left_out <= 0:
            return text
        half = MAX_CHARS // 2
        return f"{text[:half]}\n[{num_left_out:,} characters are left out: --full shows them]\n{text[-half:]}"

    def _wrapped(self, lines: Iterable[str], num_used: int) -> Iterable[str]:
        if not self._console.is_terminal:
            return lines
        width = max(20, self._console.width - num_used)
        return (
            part.plain for line in lines for part in (Text(line).wrap(self._console, width) if line else [Text("")])
        )
