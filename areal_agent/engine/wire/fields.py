"""Strict reading of JSON: a field that is missing, unknown or of the wrong type is an error, never a default.

The body of a call is a `Message`, a schema that reads, refuses and writes it. The answers of servers have fields that
nobody needs, so they are read one field at a time. Every error names the field and the value received. This file also
has the parts that several bodies share: failures, and weight versions with the spans of tokens that they sampled.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Self, TypeVar, cast, get_args

import orjson
from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator, ValidationError
from pydantic_core import ErrorDetails

from areal_agent.types import JsonObject, VersionSpan, WeightVersion

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


UNLABELLED = "default"
"""The label that SGLang and vLLM give to weights that nobody labelled: those that they were started with."""


class WireError(ValueError):
    """A body that violates the wire format."""


class Message(BaseModel):
    """A JSON object that is sent to an engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Read a body; an empty one has no fields. Raises WireError for the first fault found."""
        try:
            return cls.model_validate_json(data or b"{}")
        except ValidationError as error:
            raise WireError(_explain(error.errors(include_url=False)[0], cls)) from None

    def encode(self) -> dict[str, Any]:
        """Return the body, without fields that were not given."""
        return self.model_dump(mode="json", exclude_unset=True, exclude_none=True)


def _explain(fault: ErrorDetails, kind: type[Message]) -> str:
    """Say what is wrong with a body of this kind."""
    name, value, what = ".".join(map(str, fault["loc"]))[:80] or "the body", fault["input"], fault["msg"]
    match fault["type"]:
        case "json_invalid":
            return f"{value!r:.80} is not JSON: {fault.get('ctx', {}).get('error')}"
        case "missing":
            return f"{name} is missing"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"{name!r} is unknown; {_taker(fault, kind)}"
        case "model_type" | "dataclass_type":
            return f"{name} is {value!r:.80}; it must be a JSON object"
        case "value_error":
            what = what.removeprefix("Value error, ")
            return f"{name} is {value!r:.80}; {what}" if what.startswith("it must") else what
        case _:
            what = re.sub("^[A-Z][a-z]+ should", "it must", what)
            return f"{name} is {value!r:.80}; {what.partition(' after validation')[0]}"


def _taker(fault: ErrorDetails, kind: type[Message]) -> str:
    """Say which names are taken where an unknown one was found."""
    where = "the body"
    for step in fault["loc"][:-1]:
        inner = kind.model_fields.get(str(step))
        kinds = [] if inner is None else [one for one in get_args(inner.annotation) if isinstance(one, type)]
        found = next((one for one in kinds if issubclass(one, Message)), None)
        if found is None:
            return "leave it out"
        where, kind = str(step), found
    return f"{where} takes {', '.join(sorted(kind.model_fields))}"


def decode_json(data: bytes) -> object:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise WireError(f"{data[:80]!r} is not JSON: {error}") from error


def as_object(value: object, where: str) -> JsonObject:
    if not isinstance(value, dict):
        raise WireError(f"{where} is {value!r:.80}; it must be a JSON object")
    return cast(JsonObject, value)


def get(fields: JsonObject, name: str, kind: type[T]) -> T:
    value = fields.get(name)
    if not isinstance(value, kind):
        found = f"{value!r:.80}" if name in fields else "missing"
        raise WireError(f"{name} is {found}; it must be a {kind.__name__}")
    return value


def as_ids(values: Sequence[Any], name: str) -> tuple[int, ...]:
    if set(map(type, values)) - {int}:  # not isinstance: a boolean is not an id
        wrong = next(value for value in values if type(value) is not int)
        raise WireError(f"{name} holds {wrong!r:.80}; it must hold integers only")
    return tuple(values)


def as_integer(value: object, name: str) -> int:
    if type(value) is not int:
        raise WireError(f"{name} is {value!r:.80}; it must be an integer")
    return value


def as_number(value: object, name: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(cast(float, value)):
        raise WireError(f"{name} is {value!r:.80}; it must be a finite number")
    return float(cast(float, value))


def as_numbers(values: Sequence[Any], name: str) -> tuple[float, ...]:
    """Read each value with `as_number`; floats alone, whose sum shows that they are finite, as they are."""
    if set(map(type, values)) == {float} and math.isfinite(sum(values)):
        return tuple(values)
    return tuple(as_number(value, name) for value in values)


def as_member(kind: type[E], value: object, name: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise WireError(f"{name} is {value!r:.80}; it must be one of {', '.join(kind)}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The reason why a request failed. `status` is HTTP's, even if the answer had begun with 200."""

    message: str
    status: int

    @property
    def is_refusal(self) -> bool:
        """True if the request is wrong, not the engine; an overloaded engine (429) refuses nothing."""
        return 400 <= self.status < 500 and self.status != 429


def encode_failure(message: str, status: int) -> dict[str, Any]:
    """Encode the body of every answer that is not a success. Clients of weight updates look at `success`."""
    return {"success": False, "message": message, "error": {"message": message, "code": status}}


def decode_failure(body: object, status: int) -> Failure:
    """Read a failure, in either of SGLang's two shapes; `status` is used if the body has none."""
    fields = cast(dict[str, Any], body) if isinstance(body, dict) else {}
    error = fields.get("error")
    nested = cast(dict[str, Any], error) if isinstance(error, dict) else {"message": error}
    message, code = nested.get("message") or fields.get("message"), nested.get("code")
    return Failure(
        message=message if isinstance(message, str) else f"{body!r}", status=code if type(code) is int else status
    )


def decode_version(value: object) -> WeightVersion:
    """Read a version such as `"0:17"`."""
    if not isinstance(value, str):
        raise WireError(f"weight_version is {value!r:.80}; it must be a string such as '0:17'")
    try:
        return WeightVersion.parse(value)
    except ValueError as error:
        raise WireError(str(error)) from None


Version = Annotated[
    WeightVersion,
    PlainValidator(lambda value: value if isinstance(value, WeightVersion) else decode_version(value)),
    PlainSerializer(str),
]
"""A weight version in a `Message`, written as `"0:17"`."""


def encode_spans(spans: Sequence[VersionSpan], first: int = 0) -> list[dict[str, Any]]:
    """Encode `weight_versions`; token numbers start at `first`."""
    return [{"version": str(span.version), "start": span.start + first, "end": span.end + first} for span in spans]


def decode_spans(entries: Sequence[Any], num_tokens: int, first: int = 0) -> tuple[VersionSpan, ...]:
    """Read `weight_versions`: spans that cover all tokens from `first` on without gap or overlap."""
    spans: list[VersionSpan] = []
    covered = first
    for entry in entries:
        fields = as_object(entry, "a span of weight_versions")
        start, end = as_integer(fields.get("start"), "start"), as_integer(fields.get("end"), "end")
        if start != covered or end < start:
            raise WireError(f"weight_versions has the span [{start}, {end}) where one from {covered} was due")
        spans.append(VersionSpan(version=decode_version(fields.get("version")), start=start, end=end))
        covered = end
    if covered != num_tokens:
        raise WireError(f"weight_versions cover {covered} of {num_tokens} tokens")
    return tuple(spans)


def decode_new_spans(meta: JsonObject, num_before: int, num_after: int) -> tuple[VersionSpan, ...]:
    """Return the spans of the tokens that an event adds, counted from the first of them; empty if it has none.

    The embedded engine sends those spans. SGLang sends the current label, and all spans with its last event. The label
    changes when a swap is over; tokens are sent as they are sampled, and none are sampled during a swap.
    """
    if num_after == num_before:
        return ()
    if meta.get("weight_versions") is None:
        return _labelled(meta.get("weight_version"), num_after - num_before)
    entries: list[Any] = get(meta, "weight_versions", list)
    has_all = bool(entries) and as_object(entries[0], "a span of weight_versions").get("start") == 0
    spans = decode_spans(entries, num_after, first=0 if has_all else num_before)
    return tuple(
        VersionSpan(version=span.version, start=max(span.start - num_before, 0), end=span.end - num_before)
        for span in spans
        if span.end > num_before
    )


def _labelled(label: object, num_tokens: int) -> tuple[VersionSpan, ...]:
    try:
        return (VersionSpan(version=decode_version(label), start=0, end=num_tokens),)
    except WireError:  # weights that nobody has labelled
        return ()
