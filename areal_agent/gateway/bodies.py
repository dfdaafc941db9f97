"""JSON bodies: one pydantic model reads a body, refuses it and describes it in /openapi.json.

::

    class Move(Body):                                 Move.read({"step": 3})          Move(step=3)
        step: Annotated[int, Field(ge=1)]             Move.read({"step": 0})          400, param "step"
        name: Name | None = None                      Move.read({"step": 1, "x": 2})  400, param "x", the nearest name
                                                      Move.model_json_schema()        its part of /openapi.json

As with OpenAI, null means that a field is left out. An invalid body raises one `RequestError` that names the parameter,
the value and the remedy. A validator that knows the full name of its parameter may raise `RequestError` itself.
`BodyReader` reads a request's JSON within the gateway's `Limits`.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, NoReturn, Self, TypeVar, cast

import orjson
from aiohttp import web
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from areal_agent.command import nearest
from areal_agent.errors import RequestError
from areal_agent.tokens.canonical import MAX_DEPTH, is_deeper
from areal_agent.types import JsonObject

T = TypeVar("T")

MAX_COUNT = 2**31 - 1

MAX_KEPT_BYTES = 2**20
"""Nothing of a longer body is kept to decode the next one by."""

GROWING = ("messages", "input")
"""The lists that grow from one body to the next, by protocol."""

_MARK = secrets.token_hex(16).encode()  # no body contains it

JSON_KINDS: Mapping[type, str] = {str: "a string", list: "a list", dict: "an object"}
_SUBJECT = re.compile(r"^(Input|String|List|Dictionary) should\b")
_COUNTED = re.compile(r" after validation, not \d+$")


def refuse(param: str, value: object, must: str) -> NoReturn:
    """Raise the 400 that tells what `param` must be."""
    raise RequestError(f"{param} is {value!r:.200}; it must be {must}", param=param, code="invalid_value")


def wrong(must: str) -> PydanticCustomError:
    """Return the error for a validator to raise that does not know the full name of its parameter."""
    return PydanticCustomError("invalid_value", "it must be {must}", {"must": must})


class Body(BaseModel):
    """A JSON object sent to the gateway. Unknown fields are refused unless a subclass allows them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    ignores_empty: ClassVar[bool] = False
    """If true, unknown fields are ignored as long as they are empty."""

    @classmethod
    def read(cls, value: object, context: object = None) -> Self:
        """Check decoded JSON. Raises RequestError for the first error found. `context` is for the validators."""
        try:
            return cls.model_validate(value, context=context)
        except ValidationError as error:
            raise _request_error(error, value) from None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, value: object) -> object:
        """Drop null fields and refuse unknown names."""
        if not isinstance(value, dict):
            return value
        names, fields = _names(cls), cast("dict[str, object]", value)
        if None in fields.values():
            fields = {name: one for name, one in fields.items() if one is not None}
        if cls.model_config.get("extra") == "forbid" and not fields.keys() <= names:
            if cls.ignores_empty:
                fields = {name: one for name, one in fields.items() if one or name in names}
            name = next((name for name in fields if name not in names), None)
            if name is None:
                return fields
            raise PydanticCustomError(
                "unknown_parameter", "{remedy}", {"name": name, "remedy": _remedy(name, _supported(cls))}
            )
        return fields


class Open(Body):
    """An object that is kept as it came; it may have fields beside the listed ones."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _check_depth(cls, value: object) -> object:
        return require_shallow(value)


def read_as(adapter: TypeAdapter[T], value: object, where: str) -> T:
    """Check decoded JSON that is not a `Body`; `where` is the name of its parameter. Raises RequestError."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise _request_error(error, value, where) from None


# ------------------------------------------------------------------------------------------------ kinds of values


def json_kind(value: object) -> str:
    """Name the JSON kind of a value, which selects the member of a union: "a string", "a list" or "an object"."""
    return JSON_KINDS.get(type(value), type(value).__name__)


def require_shallow(value: T) -> T:
    """Validate values that are kept as they came: they must not be too deep to be written and read again."""
    if is_deeper(value):
        raise PydanticCustomError("too_deep", "too deep")
    return value


class Unsupported:
    """Marks a parameter as not supported, except for the `harmless` values, which ask for nothing."""

    def __init__(self, *harmless: object) -> None:
        self._harmless = harmless

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self._harmless], "description": "Not supported: any other value is refused."}

    def _check(self, value: object) -> object:
        if value not in self._harmless:
            raise PydanticCustomError("unsupported_parameter", "unsupported")
        return value


Name = Annotated[str, Field(min_length=1, max_length=256)]
"""A short text that is not empty."""

Number = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_COUNT)]

ShallowObject = Annotated[
    dict[str, Any], BeforeValidator(require_shallow), Field(description=f"At most {MAX_DEPTH} levels deep.")
]

Harmless = Annotated[Any, Field(description="Accepted and ignored: it does not affect the answer.")]


# ----------------------------------------------------------------------------------------------------- refusals


@cache
def _names(model: type[Body]) -> frozenset[str]:
    """The fields' names on the wire."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


@cache
def _supported(model: type[Body]) -> frozenset[str]:
    """The names of fields that may ask for something."""
    refused = {
        field.alias or name
        for name, field in model.model_fields.items()
        if any(isinstance(mark, Unsupported) for mark in field.metadata)
    }
    return _names(model) - refused


SAME = ({"messages", "input"}, {"max_tokens", "max_completion_tokens", "max_output_tokens"}, {"stop", "stop_sequences"})
"""Names of one thing in the three protocols."""


def _remedy(name: str, valid: Collection[str]) -> str:
    """Return the remedy for an unknown name: its name in this protocol, else the nearest valid one."""
    here = [other for names in SAME if name in names for other in sorted(names) if other in valid]
    return f"here it is {here[0]!r}" if here else nearest(name, valid)


def _request_error(error: ValidationError, body: object, where: str = "") -> RequestError:
    """Turn the first error that pydantic found into an error for OpenAI's clients."""
    first = error.errors(include_url=False)[0]
    context: dict[str, Any] = first.get("ctx", {})
    param, value, code = _param(first, body, where), f"{first['input']!r:.200}", "invalid_value"
    match first["type"]:
        case "unknown_parameter" as code:
            param = _joined(param, context["name"])
            message = f"unknown parameter {param!r}; {context['remedy']}"
        case "unsupported_parameter" as code:
            message = f"{param}={value} is not supported by this gateway; leave it out"
        case "unsupported_content" as code:
            message = f"{param} {first['msg']}"
        case "too_deep":
            message = f"{param} is nested more than {MAX_DEPTH} levels deep; nest it less"
        case "missing":
            message = f"{param} is missing; it must be given"
        case "union_tag_not_found":
            param = _joined(param, context["discriminator"].strip("'"))
            message = f"{param} is missing; it must be given"
        case "union_tag_invalid" if context["discriminator"].startswith("'"):
            param = _joined(param, context["discriminator"].strip("'"))
            message = f"{param} is {context['tag']!r:.200}; it must be one of {context['expected_tags']}"
            why = "runs no tools itself" if param.startswith("tools[") else "takes text only"
            message += f" (this gateway {why})" if param.startswith("tools[") or ".content[" in param else ""
        case "union_tag_invalid":
            kinds = context["expected_tags"].replace("'", "").replace(", ", " or ")
            message = f"{param} is {value}; it must be {kinds}"
        case "model_type" | "model_attributes_type" | "dict_type":
            message = f"{param or 'the body'} is {value}; it must be a JSON object"
        case _:
            message = f"{param} is {value}; {_COUNTED.sub('', _SUBJECT.sub('it must', first['msg']))}"
    return RequestError(message, param=param or None, code=code)


def _param(error: ErrorDetails, body: object, where: str) -> str:
    """Return the name of the wrong parameter. The tags of unions are steps of its `loc` but are not in the body."""
    param, here, loc = where, body, error["loc"]
    if loc and loc[-1] == "[key]":
        loc = loc[:-2]
    for number, step in enumerate(loc, start=1):
        if error["type"] == "unknown_parameter" and here is error["input"]:
            break
        if isinstance(here, dict) and (step in here or (number == len(loc) and error["type"] == "missing")):
            param, here = _joined(param, str(step)), cast("dict[Any, Any]", here).get(step)
        elif isinstance(here, list) and isinstance(step, int):
            param, here = f"{param}[{step}]", cast("list[Any]", here)[step]
    return param


def _joined(param: str, name: str) -> str:
    if name.isdecimal():
        return f"{param}[{name}]"
    return f"{param}.{name}" if param else name


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of one gateway.

    >>> Limits(max_sessions=2).session_timeout_s is None
    True
    """

    max_body_bytes: int = 32 * 2**20
    max_images: int = 100  # in one request
    max_image_bytes: int = 20 * 2**20
    max_image_pixels: int = 50_000_000
    max_known_images: int = 2**14  # the newest, of which the size is remembered, and as many URLs
    image_sources: tuple[str, ...] = ()  # from where images are fetched: "example.org", "10.0.0.7:80", "file:///srv/x"
    max_sessions: int = 8192  # open at once
    max_calls_per_session: int = 128  # in flight
    session_timeout_s: float | None = None  # a session without a call for this long ends as `timeout`; None: never
    idle_timeout_s: float = 75.0  # a connection without a complete request head for this long is closed
    body_timeout_s: float = 60.0  # from a request's head to the end of its body
    keep_alive_s: float = 3.0  # a stream that has been silent for this long says that it is alive
    stall_timeout_s: float = 60.0  # a client that reads nothing of its answer for this long is disconnected


class BodyReader:
    """Reads bodies within `limits`. The Content-Type does not matter; a body that parses as JSON is JSON.

    Control calls refuse repeated keys, because two rewards in one body are ambiguous. In an agent's call the last one
    counts, as in most JSON parsers: finding repeated keys would cost as much as the rest of the call.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    async def control(self, request: web.Request) -> JsonObject:
        """Read the object that a control call carries; an empty body is an empty object."""
        payload = await self._bytes(request)
        body = _object(payload)
        if payload:
            json.loads(payload, object_pairs_hook=_refuse_repeated)
        return body

    async def agent(self, request: web.Request, growing: "GrowingBody") -> JsonObject:
        """Read the object that an agent's call carries, as one of its session's; an empty body is an empty object."""
        return _object(await self._bytes(request), growing.decode)

    async def _bytes(self, request: web.Request) -> bytes:
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise RequestError(
                f"the body is compressed (Content-Encoding: {encoding:.50}); send it uncompressed",
                status=415,
                code="compressed_body",
            )
        if (request.content_length or 0) > self._limits.max_body_bytes:
            raise self._too_large()
        try:
            if request.content.is_eof():  # the body came with its head, as most do: no timeout needed
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
            f"the body has more than {self._limits.max_body_bytes} bytes, the limit of this gateway; send less",
            status=413,
            code="body_too_large",
        )


class GrowingBody:
    """Decodes the bodies of one session's calls. Most repeat the one before and add messages: only those are decoded.

    ::

        before   {"model": ..., "messages": [m1, m2        ], "tools": ...}
        now      {"model": ..., "messages": [m1, m2, a2, m3], "tools": ...}
                 └─────────── head ───────────┘└─new──┘└────── tail ─────┘

    It stays because without it a turn of a long conversation costs 20% more (benchmarks/gateway, T128). What it returns
    shares messages with what it returned before: do not change them. `/v1/responses` calls its list `input`.
    """

    def __init__(self) -> None:
        self._body: JsonObject = {}  # the one before
        self._name = ""  # of its list
        self._head: bytes | memoryview = b""  # its JSON up to the end of its last message
        self._tail = b""  # the rest of it

    def decode(self, payload: bytes) -> object:
        """Return the decoded JSON. Raises orjson.JSONDecodeError."""
        if len(payload) > MAX_KEPT_BYTES:
            self.forget()
            return orjson.loads(payload)
        new = self._new_messages(payload)
        if new is None:
            body = orjson.loads(payload)
            name = next((name for name in GROWING if name in body), "") if isinstance(body, dict) else ""
            end = _end_of_list(payload, body, name) if name else 0
        else:
            name = self._name
            body = {**self._body, name: [*self._body[name], *new]}
            end = len(payload) - len(self._tail)
        if end:
            self._body, self._name = body, name
            self._head, self._tail = memoryview(payload)[:end], payload[end:]  # a copy of the head would be a long one
        return body

    def forget(self) -> None:
        """Release the body before; the next one is decoded whole."""
        self._body, self._name, self._head, self._tail = {}, "", b"", b""

    def _new_messages(self, payload: bytes) -> list[Any] | None:
        """Return the messages between head and tail; None if the payload differs from the one before in another way."""
        start, end = len(self._head), len(payload) - len(self._tail)
        if not 0 < start <= end or not payload.startswith(self._head) or not payload.endswith(self._tail):
            return None
        try:
            return orjson.loads(b'[""%b]' % payload[start:end])[1:]  # a list goes on the same after any of its elements
        except orjson.JSONDecodeError:
            return None


def _end_of_list(payload: bytes, body: JsonObject, name: str) -> int:
    """Return the position in a body at which its list `name` ends, or 0 if it is no list or that is not certain."""
    if not isinstance(body[name], list):
        return 0
    names = list(body)
    later = names[names.index(name) + 1 :]
    end = payload.rfind(b"]", 0, payload.rfind(orjson.dumps(later[0])) if later else len(payload))
    try:
        marked = orjson.loads(b'%b,"%b"%b' % (payload[:end], _MARK, payload[end:]))
    except orjson.JSONDecodeError:
        return 0
    return end if marked[name][-1:] == [_MARK.decode()] else 0  # it has become a message, which proves the place


def _object(payload: bytes, decode: Callable[[bytes], object] = orjson.loads) -> JsonObject:
    if not payload:
        return {}
    try:
        body = decode(payload)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON ({error}); JSON has no NaN and no Infinity") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body is a JSON {type(body).__name__}; it must be a JSON object")
    return cast("JsonObject", body)


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for name, value in pairs:
        if name in names:
            raise RequestError(
                f"{name!r:.200} is repeated in the body; give it once", param=name[:200], code="invalid_value"
            )
        names[name] = value
    return names
