"""Where an engine is and of which kind: what another process needs to use it, too."""

from collections.abc import Callable
from typing import Literal

from areal_agent.engine.fleet.fleet import Fleet
from areal_agent.engine.fleet.member import MemberEngine
from areal_agent.engine.fleet.patience import Patience
from areal_agent.engine.foreign.weight_folders import WeightFolders
from areal_agent.engine.http import HttpEngine
from areal_agent.engine.sglang.engine import SglangEngine
from areal_agent.engine.vllm.engine import VllmEngine
from areal_agent.section import Section


class EngineAddress(Section):
    """One or several servers of one kind, with the same weights."""

    backend: Literal["embedded", "sglang", "vllm"]
    urls: tuple[str, ...]
    max_context_tokens: int | None = None
    """Of a prompt and its completion, where the limit of SGLang's or vLLM's servers is not meant."""
    hung_after_s: float = Patience().hung_after_s
    wait_s: float = Patience().wait_s

    def connect(self) -> Fleet:
        """A client of all its servers, not connected yet."""
        return Fleet(
            self.urls,
            self._client(),
            patience=Patience(hung_after_s=self.hung_after_s, wait_s=self.wait_s),
            streams_alone=self.backend != "embedded",
        )

    def _client(self) -> Callable[[str], MemberEngine]:
        """What makes a client of one server."""
        if self.backend == "embedded":
            return HttpEngine
        folders, client = WeightFolders(), VllmEngine if self.backend == "vllm" else SglangEngine
        return lambda url: client(url, folders=folders, max_context_tokens=self.max_context_tokens)
