"""Where an engine is and of which kind: what another process needs to use it, too."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Self

from areal_agent.engine.backend import Backend, find_backend
from areal_agent.engine.fleet.fleet import Fleet
from areal_agent.engine.fleet.member import MemberEngine
from areal_agent.engine.fleet.patience import Patience
from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.foreign.weight_folders import WeightFolders
from areal_agent.engine.http import HttpEngine
from areal_agent.engine.sglang.server import SglangServer
from areal_agent.engine.transport import load_timeout_s
from areal_agent.engine.vllm.server import VllmServer
from areal_agent.engine.weight_size import size_of_folder
from areal_agent.section import Section


class EngineAddress(Section):
    """One or several servers of one kind, with the same weights."""

    backend: Backend
    urls: tuple[str, ...]
    max_context_tokens: int | None = None
    """Of a prompt and its completion, where the limit of SGLang's or vLLM's servers is not meant."""
    do_others_push: bool = False
    """Before they do, SGLang's and vLLM's servers have weights that nobody has labelled."""
    hung_after_s: float = Patience().hung_after_s
    wait_s: float = Patience().wait_s

    @classmethod
    async def of_server(cls, url: str) -> Self:
        """Of one that runs already, and tells of which kind it is. Raises EngineUnreachable."""
        return cls(backend=await find_backend(url), urls=(url,))

    async def where_others_push(self) -> Self:
        """The same for a process that nobody tells of pushes. Raises EngineError when the server tells nothing.

        SGLang and vLLM are silent while they load weights: that is no hang within the time that their pusher gives it.
        Until the first push they serve weights without a label of ours.
        """
        if self.backend == "embedded":  # it answers meanwhile
            return self
        engine = self.client()(self.urls[0])
        try:
            model = Path((await engine.info()).model_path)
        finally:
            await engine.aclose()
        load_s = load_timeout_s(await asyncio.to_thread(size_of_folder, model))
        return self.model_copy(update={"hung_after_s": max(self.hung_after_s, load_s), "do_others_push": True})

    def connect(self) -> Fleet:
        """A client of all its servers, not connected yet."""
        return Fleet(
            self.urls,
            self.client(),
            patience=Patience(hung_after_s=self.hung_after_s, wait_s=self.wait_s),
            streams_alone=self.backend != "embedded",
        )

    def client(self) -> Callable[[str], MemberEngine]:
        """What makes a client of one server by its URL; those that it makes are given the same weights."""
        if self.backend == "embedded":
            return HttpEngine
        folders, server = WeightFolders(), VllmServer if self.backend == "vllm" else SglangServer
        return lambda url: ForeignEngine(
            server(url, takes_unlabelled=self.do_others_push),
            folders=folders,
            max_context_tokens=self.max_context_tokens,
        )
