"""The JSON body of a request, within the bounds of its gateway. It knows no field of it."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import orjson
from aiohttp import web

from areal_agent.errors import RequestError
from areal_agent.gateway.growing_body import GrowingBody
from areal_agent.gateway.limits import Limits
from areal_agent.types import JsonObject


class BodyReader:
    """Reads bodies within `limits`. What Content-Type says of a body does not matter: it is JSON if it reads as JSON.

    A key that comes twice is refused where rollouts are controlled: which of two rewards is meant? In an agent's call
    the last one counts, as with every common reader of JSON: to look for it would cost as much as the whole call.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    async def control(self, request: web.Request) -> JsonObject:
        """The object that a control call carries; no body is an empty one."""
        payload = await self._bytes(request)
        body = _object(payload)
        if payload:
            json.loads(payload, object_pairs_hook=_refuse_repeated)
        return body

    async def agent(self, request: web.Request, growing: GrowingBody) -> JsonObject:
        """The object that an agent's call carries, decoded as one of its session's; no body is an empty one."""
        return _object(await self._bytes(request), growing.decode)

    async def _bytes(self, request: web.Request) -> bytes:
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise RequestError(
                f"the body is compressed (Content-Encoding: {encoding:.50}); send it as it is",
                status=415,
                code="compressed_body",
            )
        if (request.content_length or 0) > self._limits.max_body_bytes:
            raise self._too_large()
        try:
            if request.content.is_eof():  # it came with its head, as most do: no need for a clock
                return await request.read()
            async with asyncio.timeout(self._limits.body_timeout_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except TimeoutError:
            raise RequestError(
                f"the body did not arrive within {self._limits.body_timeout_s:g} s; send it faster, or less of it",
                status=408,
                code="body_timeout",
            ) from None

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the body has more than {self._limits.max_body_bytes} bytes, which is all that this gateway reads; "
            "send less",
            status=413,
            code="body_too_large",
        )


def _object(payload: bytes, decode: Callable[[bytes], object] = orjson.loads) -> JsonObject:
    if not payload:
        return {}
    try:
        body = decode(payload)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON ({error}); NaN and Infinity are none either") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body is a JSON {type(body).__name__}; it must be a JSON object")
    return cast("JsonObject", body)


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for name, value in pairs:
        if name in names:
            raise RequestError(
                f"{name!r:.200} comes twice in the body; say it once", param=name[:200], code="invalid_value"
            )
        names[name] = value
    return names
