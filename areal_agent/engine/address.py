"""Where an engine is and of which kind: what another process needs to use it, too."""

from typing import Literal

from areal_agent.engine.http import HttpEngine
from areal_agent.engine.served import ServedEngine
from areal_agent.engine.sglang.fleet import Fleet
from areal_agent.section import Section


class EngineAddress(Section):
    """One embedded engine, or one or several SGLang servers with the same weights."""

    backend: Literal["embedded", "sglang"]
    urls: tuple[str, ...]
    max_context_tokens: int | None = None
    """Of a prompt and its completion, where the servers' own limit is not meant."""

    def connect(self) -> ServedEngine:
        """A client of it, not connected yet."""
        if self.backend == "embedded":
            (url,) = self.urls
            return HttpEngine(url)
        return Fleet.of(self.urls, max_context_tokens=self.max_context_tokens)
