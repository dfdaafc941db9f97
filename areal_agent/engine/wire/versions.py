"""Weight versions on the wire, and the spans of tokens that they sampled."""

from collections.abc import Sequence
from typing import Any

from areal_agent.engine.fields import WireError, as_integer, as_object, get
from areal_agent.types import JsonObject, VersionSpan, WeightVersion


def decode_version(value: object) -> WeightVersion:
    """Read `"0:17"`."""
    if not isinstance(value, str):
        raise WireError(f"weight_version is {value!r:.80}; it must be a string such as '0:17'")
    try:
        return WeightVersion.parse(value)
    except ValueError as error:
        raise WireError(str(error)) from None


def encode_spans(spans: Sequence[VersionSpan], first: int = 0) -> list[dict[str, Any]]:
    """The field `weight_versions`; the spans count from token `first`."""
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
    """The spans of the tokens that an event adds, counted from the first of these; empty when it tells none.

    The embedded engine sends those spans. SGLang sends the label of the moment until its last event, which has all
    spans. That label moves when a swap is over; tokens are sent as they are sampled, and none is during a swap.
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
