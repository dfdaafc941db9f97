"""A running text, reasoning or content, and the white space at its ends. It knows nothing of what stands around it."""


class Prose:
    """Text that leaves as it comes. White space waits until more follows, for at an end it may belong to nobody.

    >>> prose = Prose(keeps_edges=False)
    >>> prose.add(" a "), prose.add("b "), prose.end()
    ('a', ' b', '')
    """

    def __init__(self, *, keeps_edges: bool) -> None:
        self.keeps_edges = keeps_edges
        self._space = ""
        self._said: list[str] = []

    @property
    def text(self) -> str:
        """All that has left."""
        return "".join(self._said)

    def add(self, text: str) -> str:
        """More has come; returns what leaves with it."""
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if not self._said and not self.keeps_edges:
            body = body.lstrip()
        return self._say(body)

    def end(self) -> str:
        """No more will come; returns what leaves last."""
        return self._say(self._space if self.keeps_edges else "")

    def _say(self, text: str) -> str:
        if text:
            self._said.append(text)
        return text
