"""Weight versions on the wire, and the spans of tokens that they sampled."""

from collections.abc import Sequence
from typing import Any

from areal_agent.engine.fields import WireError, as_integer, as_object
from areal_agent.types import VersionSpan, WeightVersion


def decode_version(value: object) -> WeightVersion:
    """Read `"0:17"`."""
    if not isinstance(value, str):
        raise WireError(f"weight_version is {value!r:.80}; it must be a string such as '0:17'")
    try:
        return WeightVersion.parse(value)
    except ValueError as error:
        raise WireError(str(error)) from None


def encode_spans(spans: Sequence[VersionSpan]) -> list[dict[str, Any]]:
    """The field `weight_versions`."""
    return [{"version": str(span.version), "start": span.start, "end": span.end} for span in spans]


def decode_spans(entries: Sequence[Any], num_tokens: int) -> tuple[VersionSpan, ...]:
    """Read `weight_versions`: spans that cover all tokens without gap or overlap."""
    spans: list[VersionSpan] = []
    covered = 0
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
