"""Where an engine is and of which kind: what another process needs to use it, too.

Which kind of server an engine is: a config names it, or the server tells. It knows no client of any.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

from areal_agent.engine import wire
from areal_agent.engine.client import HttpEngine
from areal_agent.engine.fleet.fleet import Fleet
from areal_agent.engine.fleet.member import MemberEngine, Patience
from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.foreign.weight_folders import WeightFolders
from areal_agent.engine.pushes import size_of_folder
from areal_agent.engine.sglang.server import SglangServer
from areal_agent.engine.transport import Transport, load_timeout_s
from areal_agent.engine.vllm.server import MODELS, VllmServer
from areal_agent.engine.wire.fields import WireError, as_object, get
from areal_agent.errors import EngineRejected, EngineUnreachable
from areal_agent.section import Section
from areal_agent.types import JsonObject

Backend = Literal["embedded", "sglang", "vllm"]

_OF_SGLANG = "max_req_input_len"  # in its `/server_info` alone
_OF_THE_WIRE = "model_path"  # in that of every server on the common wire


async def find_backend(url: str) -> Backend:
    """Ask a server that runs. Raises EngineUnreachable when none is there, or none of these."""
    transport = Transport(url, keeps_connections=False)
    try:
        told = await _fields(transport, wire.SERVER_INFO)
        if _OF_SGLANG in told:
            return "sglang"
        if _OF_THE_WIRE in told:
            return "embedded"
        if "vllm" in _owners(await _fields(transport, MODELS)):
            return "vllm"
    finally:
        await transport.aclose()
    raise EngineUnreachable(
        f"what listens at {url} says neither in {wire.SERVER_INFO} nor in {MODELS} that it is an engine; give the URL "
        "of a server of areal_agent.engine, SGLang or vLLM, without a path"
    )


async def _fields(transport: Transport, path: str) -> JsonObject:
    """What a server says there; nothing where it has no such page."""
    try:
        answer = await transport.get(path)
    except EngineRejected:
        return {}
    return transport.decoded(lambda body: as_object(body, path), path, answer)


def _owners(told: JsonObject) -> set[Any]:
    """Who made the server, as each of its models says."""
    try:
        cards: list[Any] = get(told, "data", list)
        return {as_object(card, "an entry of data").get("owned_by") for card in cards}
    except WireError:
        return set()


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
