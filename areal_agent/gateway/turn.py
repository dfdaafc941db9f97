"""One turn from its place in the session to its record: it is sampled, read, and appended to the journal.

An `Exchange` is one request of an agent: one turn, or one for each of its prompts. A `TurnLog` holds the turns of a
session; placing and recording take its lock, sampling does not. An answer streams through the outlet while it is
sampled. When the agent hangs up, the engine stops and what was sampled is recorded: as an answer that ends with the
calls that the agent may have read, so that it can go on from there, or as aborted.
"""

import asyncio
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol, Self

from areal_agent.errors import EngineUnreachable
from areal_agent.gateway.answers import Answer, Choice, Deliveries, EngineCalls, TurnAnswer, Watch, requests_for
from areal_agent.gateway.conversation import Conversation, num_ignored_fields
from areal_agent.gateway.draft import Draft, Outlet, Piece, PlainReader, Reading, cut
from areal_agent.gateway.images import ImageIntake
from areal_agent.gateway.metrics import Counters
from areal_agent.gateway.order import Order, Question
from areal_agent.process import time_of_day_s
from areal_agent.protocols import Journal, Sampler
from areal_agent.tokens.forest import Forest, Prompt
from areal_agent.tokens.formats.base import AnswerDelta, ParsedAnswer
from areal_agent.tokens.prompt import packed
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import (
    Completion,
    Distribution,
    FinishReason,
    GenerateResult,
    JsonObject,
    PromptImage,
    SamplingParams,
    TokenChunk,
    Turn,
    record,
)

ABORT_GRACE_S = 5.0
"""Seconds that an engine may take to answer an abort before its request is given up."""

LONG_REQUEST_BYTES = 100_000
"""A request of this size or more is placed in a thread, so that it does not block the event loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """The objects and limits that all sessions of a gateway share."""

    sampler: Sampler
    renderer: Renderer
    journal: Journal
    counters: Counters
    max_context_tokens: int
    vocab_size: int  # of the model; its tokenizer may know fewer ids
    images: ImageIntake | None = None  # None: the model takes text only
    has_grammar: bool = False  # the engine can constrain answers to a JSON schema
    abort_grace_s: float = ABORT_GRACE_S
    numbers: Random = field(default_factory=lambda: Random(os.urandom(32)))  # makes ids; a story's depend on its seed


class RunnableTurn(Protocol):
    """A turn that has been placed and can be run."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    async def run(self, outlet: Outlet | None) -> TurnAnswer: ...

    def hang_up(self, *, keeps_calls: bool = False) -> None: ...


class Exchange:
    """A request whose turns have been placed but not yet sampled."""

    def __init__(
        self, *, answer_id: str, model: str, created_s: float, order: Order, turns: Sequence[RunnableTurn]
    ) -> None:
        self.answer_id = answer_id
        self.model = model
        self.created_s = int(created_s)
        self.order = order
        self.is_hung_up = False
        self._turns = turns

    @property
    def num_choices(self) -> int:
        return len(self._turns) * self.order.num_choices

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The tokens of the first prompt."""
        return self._turns[0].prompt_ids

    async def run(self, outlet: Outlet | None = None) -> Answer:
        """Sample all turns concurrently and stream through `outlet`. When one fails, the others are ended."""
        if len(self._turns) == 1:
            return Answer(turns=(await self._turns[0].run(outlet),))
        tasks = [asyncio.create_task(turn.run(outlet)) for turn in self._turns]
        ended, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if running:
            self._stop()  # not cancelled, so that what they have is recorded
            await asyncio.wait(running)
        failures = [error for task in (*ended, *running) if (error := task.exception()) is not None]
        if failures:
            raise failures[0]
        return Answer(turns=[task.result() for task in tasks])

    def hang_up(self, *, keeps_calls: bool = False) -> None:
        """Stop sampling, since nobody waits for the answer: what has been sampled is recorded as aborted.

        With `keeps_calls`, an answer with a whole call is recorded as one that ends there.
        """
        self.is_hung_up = True
        self._stop(keeps_calls=keeps_calls)

    def _stop(self, *, keeps_calls: bool = False) -> None:
        for turn in self._turns:
            turn.hang_up(keeps_calls=keeps_calls)


@record
class _Numbers:
    """The per-token numbers of one completion."""

    token_ids: "array[int]"
    logprobs: "array[float]"


@record
class PackedTurn:
    """A recorded turn with its numbers in arrays: an eighth of the memory, without loss.

    `turn` and its completions are kept without their numbers.

    >>> PackedTurn.of(turn, new_prompt_ids, sampled).unpacked() == turn    # doctest: +SKIP
    True
    """

    turn: Turn
    new_prompt_ids: "array[int]"
    numbers: tuple[_Numbers, ...]  # one for each completion

    @classmethod
    def of(cls, turn: Turn, new_prompt_ids: "array[int]", sampled: Sequence["array[int]"]) -> Self:
        """Pack a turn. `new_prompt_ids` and `sampled` (one per completion) are its ids as arrays; they are shared."""
        bare = tuple(replace(one, token_ids=(), logprobs=()) for one in turn.completions)
        return cls(
            turn=replace(turn, new_prompt_ids=(), completions=bare),
            new_prompt_ids=new_prompt_ids,
            numbers=tuple(
                _Numbers(token_ids=token_ids, logprobs=array("d", completion.logprobs))
                for token_ids, completion in zip(sampled, turn.completions, strict=True)
            ),
        )

    def unpacked(self) -> Turn:
        completions = tuple(
            replace(bare, token_ids=tuple(one.token_ids), logprobs=tuple(one.logprobs))
            for bare, one in zip(self.turn.completions, self.numbers, strict=True)
        )
        return replace(self.turn, new_prompt_ids=tuple(self.new_prompt_ids), completions=completions)


class TurnLog:
    """The turns of one session."""

    def __init__(self, session_id: str, services: Services) -> None:
        self._turns: list[PackedTurn] = []
        self.completion_ids: set[str] = set()
        self._kept: dict[str, tuple[Prompt, JsonObject]] = {}  # by completion id: its prompt and its message
        self._session_id = session_id
        self._services = services
        self._forest = Forest(services.renderer)
        self._lock = asyncio.Lock()  # guards the forest

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def turns(self) -> tuple[Turn, ...]:
        """Return all turns that are in the journal."""
        return tuple(packed.unpacked() for packed in self._turns)

    async def place(self, question: Question, *, num_bytes: int) -> Prompt:
        """Place a prompt among the turns. `num_bytes` is the rough size of the request."""
        async with self._lock:
            if num_bytes < LONG_REQUEST_BYTES:
                return question.place(self._forest, self._services.renderer)
            return await asyncio.to_thread(question.place, self._forest, self._services.renderer)

    async def prompt_ids(self, conversation: Conversation, *, num_bytes: int) -> Sequence[int]:
        """Return the ids of a prompt that will not be recorded."""

        def path() -> Sequence[int]:
            renderer = self._services.renderer
            return renderer.shown(conversation.place(self._forest, renderer, is_counted=False).path())[0]

        async with self._lock:
            return path() if num_bytes < LONG_REQUEST_BYTES else await asyncio.to_thread(path)

    def keep(self, choice: Choice, prompt: Prompt) -> None:
        """Keep an answer, so that a later request can name it instead of repeating the conversation."""
        self._kept[choice.completion.id] = prompt, choice.message

    def conversation_after(self, completion_id: str) -> list[JsonObject] | None:
        """Return all messages up to and including a kept answer; None if it was not kept."""
        kept = self._kept.get(completion_id)
        return None if kept is None else [*kept[0].messages(), kept[1]]

    async def record(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        completions: Sequence[Completion],
        choices: Sequence[Choice],
        started_s: float,
    ) -> None:
        """Add a turn to the session's forest and to the journal. An aborted turn has no choices to continue.

        Do not cancel this: the turn could then be in the forest but not in the journal.
        """
        sampled = [packed(completion.token_ids) for completion in completions]
        replies = [choice.reply(token_ids) for choice, token_ids in zip(choices, sampled, strict=False)]
        async with self._lock:
            fork_reason = self._forest.record(prompt, replies)
        new_ids, images = self._services.renderer.shown(prompt.new_ids)
        turn = Turn(
            id=_turn_id(completions[0].id),
            parent=prompt.parent.completion_id if prompt.parent else None,
            fork_at=prompt.fork_at,
            new_prompt_ids=tuple(new_ids),
            completions=tuple(completions),
            request_delta=tuple(prompt.new_messages),
            sampling=sampling,
            started_s=started_s,
            ended_s=time_of_day_s(),
            fork_reason=fork_reason,
            images=images,
        )
        self._count(turn, choices)
        self._services.counters.ignored_message_fields += num_ignored_fields(prompt.delta)
        await self._services.journal.append_turn(self._session_id, turn)
        self._turns.append(PackedTurn.of(turn, new_ids, sampled))
        self.completion_ids.update(completion.id for completion in completions)

    async def close(self) -> None:
        """Audit every conversation by rendering it whole once more, then forget them: nothing will continue them."""
        async with self._lock:
            self._services.counters.history_mismatches += await asyncio.to_thread(self._forest.audit)
            self._forest = Forest(self._services.renderer)
            self._kept.clear()

    def _count(self, turn: Turn, choices: Sequence[Choice]) -> None:
        counters = self._services.counters
        counters.turns += 1
        counters.malformed_tool_calls += sum(choice.parsed.num_malformed for choice in choices)
        counters.altered_completions += sum(one.distribution is Distribution.ALTERED for one in turn.completions)
        if turn.fork_reason:
            counters.forks[turn.fork_reason] += 1


def _turn_id(completion_id: str) -> str:
    """Derive a turn's id from its first completion's: another random number would cost a system call.

    >>> _turn_id("chatcmpl-7f"), _turn_id("chatcmpl-7f-2"), _turn_id("resp_7f")
    ('turn-7f', 'turn-7f-2', 'turn-7f')
    """
    return f"turn-{completion_id.replace('_', '-', 1).partition('-')[2]}"


@record
class TurnPlan:
    """A placed turn's prompt, and how to sample it and read its answers."""

    prompt: Prompt
    prompt_ids: Sequence[int]  # as the model has them
    images: tuple[PromptImage, ...]
    sampling: SamplingParams
    order: Order
    reading: Reading
    is_single_call: bool
    completion_ids: tuple[str, ...]
    first_index: int  # the index of its first answer among all answers of the request


class PendingTurn:
    """A turn that has been planned and not yet recorded."""

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
        self._num_kept: list[int] = []  # tokens of each answer when the agent hung up, if those with calls are kept
        self._streamed: dict[int, ParsedAnswer] = {}  # by choice index: the parsed answer of a finished draft
        self.prompt_ids = plan.prompt_ids
        self._requests = requests_for(
            self.prompt_ids, plan.sampling, plan.completion_ids, plan.order.num_top_logprobs or 0, plan.images
        )

    async def run(self, outlet: Outlet | None) -> TurnAnswer:
        """Sample, read and record the turn. When this returns, the journal has it.

        Raises EngineError when the engine failed or was told to abort; partial answers are recorded even then.
        """
        started_s = time_of_day_s()
        results = [] if self._is_hung_up else self._up_to_calls(await self._sample(outlet))
        if not results or any(result.finish_reason is FinishReason.ABORT for result in results):
            await self._record_aborted(results, started_s)
            raise EngineUnreachable("the engine aborted the request; is it shutting down?")
        choices = tuple(self._choice(index, result) for index, result in enumerate(results))
        completions = [choice.completion for choice in choices]
        self._deliveries.recorded(self._plan.completion_ids)
        await self._log.record(self._plan.prompt, self._plan.sampling, completions, choices, started_s)
        if self._plan.order.is_kept:
            for choice in choices:
                self._log.keep(choice, self._plan.prompt)
        return TurnAnswer(prompt_ids=self.prompt_ids, choices=choices, num_cached_tokens=results[0].cached_tokens)

    def hang_up(self, *, keeps_calls: bool = False) -> None:
        """Stop sampling, since nobody waits for the answers."""
        if keeps_calls and not self._is_hung_up:
            self._num_kept = [draft.num_through_call for draft in self._drafts]
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
        """Make a draft. Unless the answer streams or ends with its first call, it is parsed only when it is whole."""
        plan = self._plan
        return Draft(
            detokenizer=self._services.renderer.detokenizer,
            reader=plan.reading.reader() if self._is_read else PlainReader(),
            stop_token_ids=plan.sampling.stop_token_ids,
            stops=plan.order.stops,
            is_single_call=plan.is_single_call,
        )

    @property
    def _is_read(self) -> bool:
        """Whether answers are parsed while they are sampled."""
        return self._outlet is not None or self._plan.is_single_call

    def _on_chunk(self, index: int, chunk: TokenChunk) -> None:
        draft = self._drafts[index]
        had_ended = draft.has_ended
        if self._outlet is not None:
            self._outlet.begin()
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

    def _up_to_calls(self, results: list[GenerateResult]) -> list[GenerateResult]:
        """Cut answers after the calls that they had when the agent hung up, if all had any: it may go on from there."""
        if not self._num_kept or not all(
            0 < num <= len(one.token_ids) for num, one in zip(self._num_kept, results, strict=True)
        ):
            return results
        results = [cut(one, num) for num, one in zip(self._num_kept, results, strict=True)]
        for index, one in enumerate(results):
            text = self._services.renderer.detokenizer.text_of(one.token_ids)
            self._streamed[index] = self._plan.reading.reader().finish(text)[1]
        return results

    # ------------------------------------------------------------------------------- reading and recording

    def _choice(self, index: int, result: GenerateResult) -> Choice:
        plan, draft = self._plan, self._drafts[index] if self._drafts else None
        text = self._text_of(result) if draft is None else draft.text
        parsed = self._streamed[index] if self._is_read else plan.reading.reader().finish(text)[1]
        return Choice(
            index=plan.first_index + index,
            completion=self._completion(index, result),
            text=text,
            parsed=parsed,
            rows=draft.rows() if draft and plan.order.num_top_logprobs is not None else (),
            num_reasoning_tokens=self._num_reasoning_tokens(parsed, result),
            stop_text=draft.stop_text if draft else "",
            num_given=plan.reading.num_given,
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
        renderer = self._services.renderer
        return renderer.detokenizer.num_tokens_through(renderer.thinking.end, result.token_ids)

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
        """Record partial answers as aborted: the agent got none of them, so none may be trained on or continued."""
        aborted = [
            self._completion(index, replace(result, finish_reason=FinishReason.ABORT))
            for index, result in enumerate(results)
            if result.token_ids
        ]
        if aborted:
            await self._log.record(self._plan.prompt, self._plan.sampling, aborted, (), started_s)


class TruncatedTurn:
    """A turn without an answer: its prompt fills the context, in a session that wants a clean stop instead of an error,
    or it asks for no token.

    The agent gets an empty answer with finish reason `length`, as if the model had been cut off at once, so its loop
    stops. Nothing was sampled, so no turn is recorded and no completion can be rewarded.
    """

    def __init__(self, *, prompt_ids: Sequence[int], completion_ids: tuple[str, ...], first_index: int) -> None:
        self.prompt_ids = prompt_ids
        self._completion_ids = completion_ids
        self._first_index = first_index

    async def run(self, outlet: Outlet | None) -> TurnAnswer:
        choices = tuple(_empty_choice(self._first_index + i, name) for i, name in enumerate(self._completion_ids))
        return TurnAnswer(prompt_ids=self.prompt_ids, choices=choices, num_cached_tokens=0)

    def hang_up(self, *, keeps_calls: bool = False) -> None:
        """Do nothing: nothing is running."""


def _empty_choice(index: int, completion_id: str) -> Choice:
    completion = Completion(
        id=completion_id,
        token_ids=(),
        logprobs=(),
        versions=(),
        finish_reason=FinishReason.LENGTH,
        distribution=Distribution.EXACT,
    )
    return Choice(index=index, completion=completion, text="", parsed=ParsedAnswer(content=""))
