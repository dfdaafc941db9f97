"""The JSON body of a request, within the bounds of its gateway. It knows no field of it.

Reading decoded JSON strictly: what is wrong is a `RequestError` that names the parameter and the value received.

Null means left out, as with OpenAI. Knows nothing of what the fields mean.

What bounds a gateway: sizes, numbers and times.
"""

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn, TypeVar, cast

import orjson
from aiohttp import web

from areal_agent.command import nearest
from areal_agent.errors import RequestError
from areal_agent.gateway.growing_body import GrowingBody
from areal_agent.tokens.canonical import MAX_DEPTH, is_deeper
from areal_agent.types import MAX_REWARD, JsonObject

E = TypeVar("E", bound=StrEnum)


def refuse(param: str, value: object, must: str) -> NoReturn:
    """Raise the 400 that says what `param` must be."""
    raise RequestError(f"{param} is {value!r:.200}; it must be {must}", param=param, code="invalid_value")


def refuse_unknown(body: JsonObject, known: Iterable[str], where: str = "") -> None:
    """Raise for the first key that is not known and not null."""
    known = frozenset(known)
    for key in body.keys() - known:
        if body[key] is not None:
            raise RequestError(
                f"unknown parameter {where + key!r}; {nearest(key, known)}",
                param=where + key,
                code="unknown_parameter",
            )


def as_object(value: object, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(param, value, "a JSON object")
    return cast("dict[str, Any]", value)


def as_shallow_object(value: object, param: str) -> dict[str, Any]:
    """An object whose inside is nobody's business here, but which others will have to write and read."""
    if is_deeper(value):
        raise RequestError(f"{param} is nested more than {MAX_DEPTH} levels deep", param=param, code="invalid_value")
    return as_object(value, param)


def as_list(value: object, param: str) -> list[Any]:
    if not isinstance(value, list):
        refuse(param, value, "a list")
    return cast("list[Any]", value)


def as_text(value: object, param: str) -> str:
    if not isinstance(value, str):
        refuse(param, value, "a string")
    return value


def as_name(value: object, param: str) -> str:
    """A short string that is not empty."""
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        refuse(param, value, "a string of 1 to 256 characters")
    return value


def as_flag(value: object, param: str) -> bool:
    """True or false; null is false."""
    if value is not None and not isinstance(value, bool):
        refuse(param, value, "true or false")
    return value is True


def as_reward(value: object, param: str) -> float:
    """A number that a trainer can add up; true and false are 1 and 0."""
    if not isinstance(value, int | float) or not -MAX_REWARD <= value <= MAX_REWARD:
        remedy = "; scale it down" if isinstance(value, int | float) else ""
        refuse(param, value, f"a number from {-MAX_REWARD:g} to {MAX_REWARD:g}, or a boolean{remedy}")
    return float(value)


def as_bounded_number(value: object, param: str, *, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        refuse(param, value, f"a number from {low:g} to {high:g}")
    return float(value)


def as_integer(value: object, param: str, *, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        refuse(param, value, f"an integer from {low} to {high}")
    return value


def as_member(kind: type[E], value: object, param: str) -> E:
    if not isinstance(value, str) or value not in list(kind):
        refuse(param, value, f"one of {', '.join(kind)}")
    return kind(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The bounds of one gateway.

    >>> Limits(max_sessions=2).session_timeout_s is None
    True
    """

    max_body_bytes: int = 32 * 2**20
    max_sessions: int = 8192  # open at once
    max_calls_per_session: int = 128  # in flight
    session_timeout_s: float | None = None  # a session without a call for so long ends as `timeout`; None: never
    idle_timeout_s: float = 75.0  # a connection that sends no whole request head for so long is closed
    body_timeout_s: float = 60.0  # from the head of a request to the end of its body
    keep_alive_s: float = 3.0  # a stream that has been silent for so long says that it is alive
    stall_timeout_s: float = 60.0  # a client that takes nothing of its answer for so long is hung up on


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
