"""Where an engine is and of which kind: what another process needs to use it, too."""

from typing import Literal

from areal_agent.engine.fleet.fleet import Fleet
from areal_agent.engine.fleet.patience import Patience
from areal_agent.engine.foreign.weight_folders import WeightFolders
from areal_agent.engine.http import HttpEngine
from areal_agent.engine.served import ServedEngine
from areal_agent.engine.sglang.engine import SglangEngine
from areal_agent.engine.vllm.engine import VllmEngine
from areal_agent.section import Section


class EngineAddress(Section):
    """One embedded engine, or one or several servers of SGLang or vLLM with the same weights."""

    backend: Literal["embedded", "sglang", "vllm"]
    urls: tuple[str, ...]
    max_context_tokens: int | None = None
    """Of a prompt and its completion, where the servers' own limit is not meant."""
    hung_after_s: float = Patience().hung_after_s
    wait_s: float = Patience().wait_s

    def connect(self) -> ServedEngine:
        """A client of it, not connected yet."""
        if self.backend == "embedded":
            (url,) = self.urls
            return HttpEngine(url)
        return self.fleet()

    def fleet(self) -> Fleet:
        """A client of all its servers, not connected yet."""
        folders, client = WeightFolders(), VllmEngine if self.backend == "vllm" else SglangEngine
        return Fleet(
            self.urls,
            lambda url: client(url, folders=folders, max_context_tokens=self.max_context_tokens),
            patience=Patience(hung_after_s=self.hung_after_s, wait_s=self.wait_s),
        )
