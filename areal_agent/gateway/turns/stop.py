"""Finds stop texts in text that comes in pieces. It knows no tokens."""

from collections.abc import Sequence


class StopFinder:
    """Lets text through up to the first stop text, which ends it.

    The stop text that is complete first counts, of several that end together the longest: so what comes out does not
    depend on how the text was cut into pieces. Only a possible beginning of a stop text is held back.

    >>> finder = StopFinder(["END"])
    >>> finder.feed("to the E"), finder.feed("ND of"), finder.has_stopped
    ('to the ', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.has_stopped = False

    def feed(self, text: str) -> str:
        """The text that may leave."""
        if self.has_stopped or not text:
            return ""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.has_stopped = True
            self._held = ""
            return text[: min(found)[1]]
        num_free = len(text) - self._num_open(text)
        self._held = text[num_free:]
        return text[:num_free]

    def finish(self) -> str:
        """What was held back: no stop text came of it."""
        held, self._held = self._held, ""
        return held

    def _num_open(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a stop text."""
        for num_open in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-num_open:]) for stop in self._stops):
                return num_open
        return 0
