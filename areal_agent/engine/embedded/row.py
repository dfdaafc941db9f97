"""One request and what it has so far. Knows nothing of models, slots or other rows."""

import secrets
from array import array
from collections.abc import Callable, Set
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from areal_agent.engine.embedded.grammar import Matcher
from areal_agent.engine_types import GenerateRequest, GenerateResult, TopLogprobs
from areal_agent.types import FinishReason, VersionSpan, WeightVersion

TokenSink = Callable[[int, float, TopLogprobs, WeightVersion], None]
"""Gets every token of a streamed request, its log-probability, the likeliest tokens there and the version that sampled
it, in the model thread."""


@dataclass(kw_only=True, slots=True, eq=False)
class Row:
    """A request in flight. Only the model thread touches it; others wait for `answer`."""

    request: GenerateRequest
    prompt_ids: NDArray[np.int32]
    seed: int
    answer: Future[GenerateResult]
    on_token: TokenSink | None = None
    matcher: Matcher | None = None  # of the grammar that holds its answer
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])  # empty when none are asked for
    begun: list[tuple[WeightVersion, int]] = field(default_factory=list[tuple[WeightVersion, int]])  # with which token
    num_computed: int = 0  # tokens whose keys and values are in its slot, while it is prefilled
    num_cached: int | None = None  # of the prompt, when it was prefilled first
    arrived_s: float = 0.0  # by the clock of whoever runs it
    is_mixed: bool = False  # its keys and values are of more than one set of weights
    has_waited_for_sibling: bool = False

    @classmethod
    def of(cls, request: GenerateRequest, on_token: TokenSink | None = None, matcher: Matcher | None = None) -> "Row":
        """A row with nothing sampled; a request without a seed gets one here."""
        answer: Future[GenerateResult] = Future()
        answer.set_running_or_notify_cancel()  # nobody but the model thread ends it
        seed = request.sampling.seed
        return cls(
            request=request,
            prompt_ids=np.frombuffer(array("i", request.input_ids), dtype=np.int32),
            seed=secrets.randbits(63) if seed is None else seed,
            answer=answer,
            on_token=on_token,
            matcher=matcher,
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens."""
        return len(self.prompt_ids) + len(self.token_ids)

    def all_ids(self) -> NDArray[np.int32]:
        """Prompt and sampled ids: what a prefill computes."""
        if not self.token_ids:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, np.frombuffer(array("i", self.token_ids), dtype=np.int32)])

    def append(self, token_id: int, logprob: float, top: TopLogprobs, version: WeightVersion) -> None:
        """Keep one sampled token, stamped with the version that sampled it, and hand it out if it is streamed."""
        if not self.begun or self.begun[-1][0] is not version:  # a swap, perhaps to weights of the same label
            self.begun.append((version, len(self.token_ids)))
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if top:
            self.top_logprobs.append(top)
        if self.on_token is not None:
            self.on_token(token_id, logprob, top, version)

    def finish_reason(self, eos_token_ids: Set[int]) -> FinishReason | None:
        """Why the row ends after its last token, or None when it goes on."""
        sampling = self.request.sampling
        if self.token_ids[-1] in eos_token_ids or self.token_ids[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= sampling.max_tokens else None

    def finish(self, reason: FinishReason) -> None:
        """Answer with what there is."""
        self.answer.set_result(
            GenerateResult(
                token_ids=tuple(self.token_ids),
                logprobs=tuple(self.logprobs),
                versions=self._spans(),
                finish_reason=reason,
                cached_tokens=self.num_cached or 0,
                top_logprobs=tuple(self.top_logprobs),
            )
        )

    def _spans(self) -> tuple[VersionSpan, ...]:
        starts = [start for _, start in self.begun]
        return tuple(
            VersionSpan(version=version, start=start, end=end)
            for (version, start), end in zip(self.begun, [*starts[1:], len(self.token_ids)], strict=False)
        )
