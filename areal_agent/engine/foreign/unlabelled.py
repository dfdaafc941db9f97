"""Weights that nobody has labelled: those that a server of SGLang or vLLM was started with. Knows no server.

Before the first push of a trainer elsewhere they are what serves, and count as the first version, 0:0. Where this
process pushes they are a stranger's: it gives every server a label before it samples.
"""

from collections.abc import Sequence
from typing import Any

from areal_agent.engine.fields import as_object
from areal_agent.types import JsonObject, WeightVersion

UNLABELLED = "default"
"""What both say."""

FIRST = str(WeightVersion())


def label_spans(spans: Sequence[Any]) -> list[JsonObject]:
    """Of an answer, as the server tells them.

    >>> label_spans([{"version": "default", "start": 0, "end": 2}, {"version": "1:0", "start": 2, "end": 3}])
    [{'version': '0:0', 'start': 0, 'end': 2}, {'version': '1:0', 'start': 2, 'end': 3}]
    """
    return [_label(as_object(span, "a span of weight_versions"), "version") for span in spans]


def label_meta(meta: JsonObject) -> JsonObject:
    """Of SGLang's `meta_info`: the label of the moment, and the spans."""
    told = _label(meta, "weight_version")
    spans = told.get("weight_versions")
    return {**told, "weight_versions": label_spans(spans)} if isinstance(spans, list) else told


def _label(fields: JsonObject, name: str) -> JsonObject:
    return {**fields, name: FIRST} if fields.get(name) == UNLABELLED else fields
