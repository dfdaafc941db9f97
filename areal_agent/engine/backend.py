"""Which kind of server an engine is: a config names it, or the server tells. It knows no client of any."""

from typing import Any, Literal

from areal_agent.engine import wire
from areal_agent.engine.fields import WireError, as_object, get
from areal_agent.engine.transport import Transport
from areal_agent.engine.vllm.info import MODELS
from areal_agent.errors import EngineRejected, EngineUnreachable
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
