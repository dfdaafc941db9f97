"""The address of an engine and its kind, as another process needs them to use the engine.

The kind comes from a config, or the server is asked for it.
"""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from areal_agent.engine.client import HttpEngine
from areal_agent.engine.fleet.fleet import Fleet
from areal_agent.engine.fleet.member import MemberEngine, Patience
from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.foreign.weight_folders import WeightFolders
from areal_agent.engine.pushes import size_of_folder
from areal_agent.engine.sglang.server import SglangServer
from areal_agent.engine.transport import Transport, load_timeout_s
from areal_agent.engine.vllm.server import MODELS, VllmServer
from areal_agent.engine.wire import control
from areal_agent.engine.wire.fields import WireError, as_object, get
from areal_agent.errors import EngineRejected, EngineUnreachable
from areal_agent.section import Section
from areal_agent.types import JsonObject

Backend = Literal["embedded", "sglang", "vllm"]

_OF_SGLANG = "max_req_input_len"  # only in SGLang's `/server_info`
_OF_THE_WIRE = "model_path"  # in the `/server_info` of every server on the common wire


KEY_VARIABLE = "AREAL_AGENT_ENGINE_KEY"


def key_of_environment() -> str | None:
    """Return the key of engines that the environment names."""
    return os.environ.get(KEY_VARIABLE) or None


async def find_backend(url: str) -> Backend:
    """Ask a running server for its kind. Raises EngineUnreachable if no server of these kinds is there."""
    transport = Transport(url, key=key_of_environment(), keeps_connections=False)
    try:
        told = await _fields(transport, control.SERVER_INFO)
        if _OF_SGLANG in told:
            return "sglang"
        if _OF_THE_WIRE in told:
            return "embedded"
        if "vllm" in _owners(await _fields(transport, MODELS)):
            return "vllm"
    finally:
        await transport.aclose()
    raise EngineUnreachable(
        f"neither {control.SERVER_INFO} nor {MODELS} shows that the server at {url} is an engine; give the URL "
        "of a server of areal_agent.engine, SGLang or vLLM, without a path"
    )


async def _fields(transport: Transport, path: str) -> JsonObject:
    """Return what a server answers at a path; empty if it has no such path."""
    try:
        answer = await transport.get(path)
    except EngineRejected as error:
        if KEY_VARIABLE in str(error):
            raise
        return {}
    return transport.decoded(lambda body: as_object(body, path), path, answer)


def _owners(told: JsonObject) -> set[Any]:
    """Return the makers of the server that its models name."""
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
    """The limit of prompt and completion together, if it is not that of SGLang's or vLLM's servers."""
    do_others_push: bool = False
    """True if another process pushes: until it does, SGLang's and vLLM's servers have weights without a label."""
    key: str | None = Field(default_factory=key_of_environment, repr=False)
    """The key that the servers demand; by default that of the environment."""
    hung_after_s: float = Patience().hung_after_s
    wait_s: float = Patience().wait_s

    @classmethod
    async def of_server(cls, url: str) -> Self:
        """Return the address of one running server, which is asked for its kind. Raises EngineUnreachable."""
        return cls(backend=await find_backend(url), urls=(url,))

    async def where_others_push(self) -> Self:
        """Return this address for a process that is not told of pushes. Raises EngineError if it does not answer.

        SGLang and vLLM are silent while they load weights, so they count as hung only after the time that a load may
        take. Until the first push their weights have no label of ours.
        """
        if self.backend == "embedded":  # it answers during a load
            return self
        engine = self.client()(self.urls[0])
        try:
            model = Path((await engine.info()).model_path)
        finally:
            await engine.aclose()
        load_s = load_timeout_s(await asyncio.to_thread(size_of_folder, model))
        return self.model_copy(update={"hung_after_s": max(self.hung_after_s, load_s), "do_others_push": True})

    def connect(self) -> Fleet:
        """Create a client of all its servers, not connected yet."""
        return Fleet(
            self.urls,
            self.client(),
            patience=Patience(hung_after_s=self.hung_after_s, wait_s=self.wait_s),
            streams_alone=self.backend != "embedded",
        )

    def client(self) -> Callable[[str], MemberEngine]:
        """Return a function that creates a client of one server by its URL. All of them are given the same weights."""
        if self.backend == "embedded":
            return partial(HttpEngine, key=self.key)
        folders, server = WeightFolders(), VllmServer if self.backend == "vllm" else SglangServer
        return lambda url: ForeignEngine(
            server(url, key=self.key, takes_unlabelled=self.do_others_push),
            folders=folders,
            max_context_tokens=self.max_context_tokens,
        )
