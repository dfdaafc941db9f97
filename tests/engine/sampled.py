"""Proves which weights sampled an answer by transformers' own log-probabilities. A helper of tests."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from areal_agent.types import GenerateRequest, GenerateResult, VersionSpan, WeightVersion

TOLERANCE = 1e-4

Truth = Callable[[Path], Any]
"""The type of the fixture `truth`."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model, and the version stamped on its tokens."""

    model: Path
    version: WeightVersion


def assert_sampled_by(weights: Weights, request: GenerateRequest, result: GenerateResult, truth: Truth) -> None:
    """Assert that these weights sampled the whole answer."""
    expected = truth(weights.model).logprobs(request.input_ids, result.token_ids)
    assert result.logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert result.versions == (VersionSpan(version=weights.version, start=0, end=len(result.token_ids)),)


def assert_swapped(old: Weights, new: Weights, request: GenerateRequest, result: GenerateResult, truth: Truth) -> int:
    """Assert that one set of weights sampled the beginning and the other the rest; return where the rest begins."""
    (cut,) = {span.start for span in result.versions} - {0}
    assert result.versions == (
        VersionSpan(version=old.version, start=0, end=cut),
        VersionSpan(version=new.version, start=cut, end=request.sampling.max_tokens),
    )
    before, after = (truth(one.model).logprobs(request.input_ids, result.token_ids) for one in (old, new))
    assert result.logprobs[:cut] == pytest.approx(before[:cut], abs=TOLERANCE)
    assert result.logprobs[cut:] == pytest.approx(after[cut:], abs=TOLERANCE)
    return cut
