"""One turn in the making: its prompt is placed; it is sampled, read and recorded.

What an answer gains leaves through the outlet as it is sampled. Who asked may hang up meanwhile: then the engine stops,
and what was sampled is recorded as aborted.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from areal_agent.engine_types import GenerateResult, TokenChunk
from areal_agent.errors import EngineUnreachable
from areal_agent.gateway.services import Services
from areal_agent.gateway.turns.answer import TurnAnswer
from areal_agent.gateway.turns.calls import EngineCalls, Watch, requests_for
from areal_agent.gateway.turns.choice import Choice
from areal_agent.gateway.turns.deliveries import Deliveries
from areal_agent.gateway.turns.draft import Draft
from areal_agent.gateway.turns.order import Order
from areal_agent.gateway.turns.outlet import Outlet, Piece
from areal_agent.gateway.turns.reading import PlainReader, Reading
from areal_agent.gateway.turns.turn_log import TurnLog
from areal_agent.tokens.answers.parsed import AnswerDelta, ParsedAnswer
from areal_agent.tokens.answers.reader import THINK_END
from areal_agent.tokens.tree import Prompt
from areal_agent.types import Completion, FinishReason, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnPlan:
    """What is known of a turn before it is sampled."""

    prompt: Prompt
    sampling: SamplingParams
    order: Order
    reading: Reading
    is_single_call: bool
    completion_ids: tuple[str, ...]
    first_index: int  # the place of its first answer among all of the request


class PendingTurn:
    """A turn between its plan and its record."""

    def __init__(
        self, plan: TurnPlan, *, services: Services, log: TurnLog, calls: EngineCalls, deliveries: Deliveries
    ) -> None:
        self._plan = plan
        self._services = services
        self._log = log
        self._calls = calls
        self._deliveries = deliveries
        self._outlet: Outlet | None = None
        self._is_hung_up = False
        self._drafts: list[Draft] = []
        self._streamed: dict[int, ParsedAnswer] = {}  # by choice: what a finished draft says
        self.prompt_ids = plan.prompt.path()
        self._requests = requests_for(
            self.prompt_ids, plan.sampling, plan.completion_ids, plan.order.num_top_logprobs or 0
        )

    async def run(self, outlet: Outlet | None) -> TurnAnswer:
        """Sample, read, record. When this returns, the journal has the turn.

        Raises EngineError when the engine failed; when it was told to abort, what it had is recorded all the same.
        """
        started_s = time.time()
        results = [] if self._is_hung_up else await self._sample(outlet)
        if not results or any(result.finish_reason is FinishReason.ABORT for result in results):
            await self._record_aborted(results, started_s)
            raise EngineUnreachable("the engine aborted the request; is it shutting down?")
        choices = tuple(self._choice(index, result) for index, result in enumerate(results))
        completions = [choice.completion for choice in choices]
        self._deliveries.recorded(self._plan.completion_ids)
        await self._log.record(self._plan.prompt, self._plan.sampling, completions, choices, started_s)
        return TurnAnswer(prompt_ids=self.prompt_ids, choices=choices, num_cached_tokens=results[0].cached_tokens)

    def hang_up(self) -> None:
        """Nobody waits for the answers any more."""
        self._is_hung_up = True
        for request in self._requests:
            self._calls.abort_soon(request.request_id)

    # ------------------------------------------------------------------------------------------ sampling

    async def _sample(self, outlet: Outlet | None) -> list[GenerateResult]:
        self._outlet = outlet
        order = self._plan.order
        is_watched = outlet is not None or bool(order.stops) or self._plan.is_single_call
        if not is_watched and order.num_top_logprobs is None:
            return await self._calls.sample(self._requests)
        self._drafts = [self._draft() for _ in self._requests]
        watch = Watch(on_chunk=self._on_chunk, on_result=self._on_result)
        results = await self._calls.sample(self._requests, watch if is_watched else None)
        if not is_watched:
            for index, result in enumerate(results):
                self._on_result(index, result)
        return [draft.kept(result) for draft, result in zip(self._drafts, results, strict=True)]

    def _draft(self) -> Draft:
        """What is not streamed is read when it is whole; until then only its end matters."""
        plan = self._plan
        is_streamed = self._outlet is not None
        return Draft(
            detokenizer=self._services.renderer.detokenizer,
            reader=plan.reading.reader(is_streamed=is_streamed)
            if is_streamed or plan.is_single_call
            else PlainReader(),
            stop_token_ids=plan.sampling.stop_token_ids,
            stops=plan.order.stops,
            is_single_call=plan.is_single_call,
        )

    def _on_chunk(self, index: int, chunk: TokenChunk) -> None:
        draft = self._drafts[index]
        had_ended = draft.has_ended
        self._put(index, draft.feed(chunk))
        if draft.has_ended and not had_ended:
            self._calls.abort_soon(self._requests[index].request_id)

    def _on_result(self, index: int, result: GenerateResult) -> None:
        draft = self._drafts[index]
        if result.finish_reason is FinishReason.ABORT and not draft.has_ended:
            return
        deltas, self._streamed[index] = draft.finish(result)
        self._put(index, deltas, is_last=True)

    def _put(self, index: int, deltas: tuple[AnswerDelta, ...], *, is_last: bool = False) -> None:
        if self._outlet is not None and (deltas or is_last):
            gain = self._drafts[index].gain(deltas)
            self._outlet.put(Piece(index=self._plan.first_index + index, gain=gain))

    # ------------------------------------------------------------------------------- reading and recording

    def _choice(self, index: int, result: GenerateResult) -> Choice:
        plan, draft = self._plan, self._drafts[index] if self._drafts else None
        text = self._text_of(result) if draft is None else draft.text
        parsed = plan.reading.parse(text) if self._outlet is None else self._streamed[index]
        return Choice(
            index=plan.first_index + index,
            completion=self._completion(index, result),
            text=text,
            parsed=parsed,
            rows=draft.rows() if draft and plan.order.num_top_logprobs is not None else (),
            num_reasoning_tokens=self._num_reasoning_tokens(parsed, result),
        )

    def _text_of(self, result: GenerateResult) -> str:
        detokenizer, token_ids = self._services.renderer.detokenizer, result.token_ids
        has_end = (
            bool(token_ids)
            and result.finish_reason is FinishReason.STOP
            and (token_ids[-1] in detokenizer.special_ids or token_ids[-1] in self._plan.sampling.stop_token_ids)
        )
        return detokenizer.text_of(token_ids[:-1] if has_end else token_ids)

    def _num_reasoning_tokens(self, parsed: ParsedAnswer, result: GenerateResult) -> int:
        if not parsed.reasoning:
            return 0
        return self._services.renderer.detokenizer.num_tokens_through(THINK_END, result.token_ids)

    def _completion(self, index: int, result: GenerateResult) -> Completion:
        return Completion(
            id=self._plan.completion_ids[index],
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            versions=result.versions,
            finish_reason=result.finish_reason,
            distribution=self._plan.sampling.distribution,
        )

    async def _record_aborted(self, results: Sequence[GenerateResult], started_s: float) -> None:
        """The agent gets none of these answers, so none is to be trained or continued."""
        aborted = [
            self._completion(index, replace(result, finish_reason=FinishReason.ABORT))
            for index, result in enumerate(results)
            if result.token_ids
        ]
        if aborted:
            await self._log.record(self._plan.prompt, self._plan.sampling, aborted, (), started_s)
