"""One rollout's conversation with the model, from its first turn to its end: the one mutable noun of the gateway.

::

    open ── chat* ──▶ ending (requests in flight are aborted, their partial answers kept) ──▶ ended

A turn is durable before its answer leaves; a session's end is never left half done, whoever hangs up meanwhile.
Knows nothing of HTTP and keys.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b

from areal_agent.errors import EngineUnreachable, RequestError
from areal_agent.gateway.calls import EngineCalls
from areal_agent.gateway.chat import ChatAnswer, ChatRequest, Choice, completion_ids
from areal_agent.gateway.control import EndRequest, RewardRequest
from areal_agent.gateway.sampling import MAX_SEED, SamplingWishes
from areal_agent.gateway.stats import Counters
from areal_agent.protocols import Journal, Sampler
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.tree import Forest, Prompt, Reply
from areal_agent.types import (
    Completion,
    Distribution,
    FinishReason,
    GenerateResult,
    Rewards,
    SamplingParams,
    SessionRecord,
    Status,
    Trajectory,
    Turn,
)

ABORT_GRACE_S = 5.0
"""How long an engine may take to answer an abort before its request is given up."""

LONG_REQUEST_CHARS = 100_000
"""From here on, tokenising leaves the event loop for a thread."""


class SessionState(StrEnum):
    """Where a session is in its life."""

    OPEN = "open"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """What all sessions of a gateway share."""

    sampler: Sampler
    renderer: Renderer
    journal: Journal
    counters: Counters
    max_context_tokens: int
    abort_grace_s: float = ABORT_GRACE_S


class Session:
    """A session. Use it from one event loop."""

    def __init__(
        self,
        record: SessionRecord,
        *,
        defaults: SamplingWishes,
        services: Services,
        on_ended: Callable[["Session"], None],
    ) -> None:
        self.record = record
        self.state = SessionState.OPEN
        self.trajectory: Trajectory | None = None  # once it has ended
        self._defaults = defaults
        self._services = services
        self._on_ended = on_ended
        self._forest = Forest(services.renderer)
        self._turns: list[Turn] = []
        self._completion_ids: set[str] = set()
        self._final_reward: float | None = None
        self._completion_rewards: dict[str, float] = {}
        self._reward_parts: dict[str, float] = {}
        self._calls = EngineCalls(services.sampler, services.counters)
        self._writes: set[asyncio.Task[None]] = set()  # turns on their way into the journal
        self._ending: asyncio.Task[Trajectory] | None = None
        self._num_chats = 0
        self._no_chat = asyncio.Event()
        self._no_chat.set()

    # ---------------------------------------------------------------------------------------------- chat

    async def chat(self, request: ChatRequest) -> ChatAnswer:
        """One turn: place it, sample it, record it. When this returns, the journal has the turn.

        Cancelling it aborts the engine's requests. Raises RequestError for what the agent did wrong, EngineError when
        the engine failed.
        """
        self._require_open()
        with self._chatting():
            started_s = time.time()
            prompt = await self._plan(request)
            sampling = self._sampling(request, prompt)
            results = await self._calls.sample(prompt.token_ids(), sampling, request.num_choices)
            return await self._record(request, prompt, sampling, results, started_s)

    async def _plan(self, request: ChatRequest) -> Prompt:
        num_chars = sum(len(message["content"]) for message in request.messages)
        if num_chars < LONG_REQUEST_CHARS:
            return self._forest.plan(request.messages, request.tools)
        return await asyncio.to_thread(self._forest.plan, request.messages, request.tools)

    def _sampling(self, request: ChatRequest, prompt: Prompt) -> SamplingParams:
        limit = self._services.max_context_tokens
        num_room = limit - prompt.num_tokens
        if num_room < 1:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
                f"{prompt.num_tokens} tokens, which leaves no room for an answer. Please reduce the length of the "
                "messages.",
                param="messages",
                code="context_length_exceeded",
            )
        return request.wishes.over(self._defaults).params(
            num_room=num_room,
            stop_token_ids=self._services.renderer.stop_token_ids,
            seed=self._derived_seed(prompt) if request.seed is None else request.seed,
        )

    def _derived_seed(self, prompt: Prompt) -> int:
        """Depends on the session's seed and the place of the turn alone, not on the order of concurrent calls."""
        key = self.record.seed.to_bytes(8)
        return int.from_bytes(blake2b(prompt.identity, digest_size=8, key=key).digest()) & MAX_SEED

    async def _record(
        self,
        request: ChatRequest,
        prompt: Prompt,
        sampling: SamplingParams,
        results: Sequence[GenerateResult],
        started_s: float,
    ) -> ChatAnswer:
        is_aborted = any(result.finish_reason is FinishReason.ABORT for result in results)
        if is_aborted:  # the agent gets none of its answers, so none is to be trained
            results = [replace(result, finish_reason=FinishReason.ABORT) for result in results if result.token_ids]
        answer_id = f"chatcmpl-{secrets.token_hex(12)}"
        completions = [
            _completion(completion_id, result, sampling.distribution)
            for completion_id, result in zip(completion_ids(answer_id, len(results)), results, strict=True)
        ]
        choices = [] if is_aborted else [self._read_choice(one, request) for one in completions]
        if completions:
            await self._commit(request, prompt, sampling, completions, choices, started_s)
        if is_aborted:
            raise self._aborted()
        return ChatAnswer(
            id=answer_id,
            model=request.model,
            created_s=int(started_s),
            choices=tuple(choices),
            num_prompt_tokens=prompt.num_tokens,
            num_cached_tokens=results[0].cached_tokens,
            num_sampled_tokens=sum(len(result.token_ids) for result in results),
        )

    def _read_choice(self, completion: Completion, request: ChatRequest) -> Choice:
        text = self._services.renderer.text_of(
            completion.token_ids, has_ended=completion.finish_reason is FinishReason.STOP
        )
        return Choice.read(text, completion.finish_reason, may_call_tools=request.may_call_tools)

    async def _commit(
        self,
        request: ChatRequest,
        prompt: Prompt,
        sampling: SamplingParams,
        completions: Sequence[Completion],
        choices: Sequence[Choice],
        started_s: float,
    ) -> None:
        """Make the turn part of the session and of the journal. An aborted turn has no choices to continue."""
        fork_reason = self._forest.record(
            prompt,
            [_reply(completion, choice) for completion, choice in zip(completions, choices, strict=False)],
        )
        turn = Turn(
            id=f"turn-{secrets.token_hex(12)}",
            parent=prompt.parent.completion_id if prompt.parent else None,
            fork_at=prompt.fork_at,
            new_prompt_ids=prompt.new_ids,
            completions=tuple(completions),
            request_delta=request.sent_messages[prompt.num_known_messages :],
            sampling=sampling,
            started_s=started_s,
            ended_s=time.time(),
            fork_reason=fork_reason,
        )
        self._count(turn, choices)
        write = asyncio.create_task(self._write(turn))
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        await asyncio.shield(write)  # who hangs up now does not take the turn out of the journal

    async def _write(self, turn: Turn) -> None:
        await self._services.journal.append_turn(self.record.id, turn)
        self._turns.append(turn)
        self._completion_ids.update(completion.id for completion in turn.completions)

    def _count(self, turn: Turn, choices: Sequence[Choice]) -> None:
        counters = self._services.counters
        counters.turns += 1
        counters.malformed_tool_calls += sum(choice.num_malformed for choice in choices)
        counters.altered_completions += sum(one.distribution is Distribution.ALTERED for one in turn.completions)
        if turn.fork_reason:
            counters.forks[turn.fork_reason] += 1

    # --------------------------------------------------------------------------------- rewards and the end

    def reward(self, request: RewardRequest) -> None:
        """Take a reward; said twice, the later one counts."""
        self._require_open()
        if request.completion_id is not None and request.completion_id not in self._completion_ids:
            raise RequestError(
                f"this session has no completion {request.completion_id!r}; use the id of a chat completion of this "
                "session (with n > 1: that id and '-0', '-1' ...)",
                param="interaction_id",
                code="interaction_not_found",
            )
        if request.name is not None:
            self._reward_parts[request.name] = request.reward
        elif request.completion_id is not None:
            self._completion_rewards[request.completion_id] = request.reward
        else:
            self._final_reward = request.reward

    async def end(self, request: EndRequest) -> Trajectory:
        """Close the session: abort what is in flight, then journal the trajectory.

        A session said to be completed that never called the model, or never got a reward, ends as what it is.
        Cancelling the call does not stop the end.
        """
        self._require_open()
        self.state = SessionState.ENDING
        self._ending = asyncio.create_task(self._end(request))
        return await asyncio.shield(self._ending)

    async def _end(self, request: EndRequest) -> Trajectory:
        await self._drain()
        rewards = Rewards(
            final=self._final_reward, by_completion=dict(self._completion_rewards), parts=dict(self._reward_parts)
        )
        status, error = _outcome(request, rewards, num_turns=len(self._turns))
        trajectory = Trajectory(
            session_id=self.record.id,
            group_id=self.record.group_id,
            task_id=self.record.task_id,
            turns=tuple(self._turns),
            rewards=rewards,
            status=status,
            error=error,
            logged=request.logged,
            started_s=self.record.started_s,
            ended_s=time.time(),
        )
        await self._services.journal.close_session(trajectory)
        self.trajectory = trajectory
        self.state = SessionState.ENDED
        self._forest = Forest(self._services.renderer)  # nothing continues it any more
        self._on_ended(self)
        return trajectory

    async def _drain(self) -> None:
        """End the engine requests in flight and wait until their partial answers are in the journal."""
        await self._calls.abort_all(self._services.abort_grace_s)
        await self._no_chat.wait()
        if self._writes:  # of chats whose agent hung up
            await asyncio.wait(self._writes)

    @contextlib.contextmanager
    def _chatting(self) -> Generator[None]:
        self._num_chats += 1
        self._no_chat.clear()
        try:
            yield
        finally:
            self._num_chats -= 1
            if self._num_chats == 0:
                self._no_chat.set()

    def _require_open(self) -> None:
        if self.state is not SessionState.OPEN:
            raise self._not_open()

    def _not_open(self) -> RequestError:
        return RequestError(
            f"session {self.record.id!r} is {self.state}: it takes no calls any more; start a new one",
            status=409,
            code="session_ended",
        )

    def _aborted(self) -> Exception:
        if self.state is SessionState.OPEN:
            return EngineUnreachable("the engine aborted the request; is it shutting down?")
        return self._not_open()


def _completion(completion_id: str, result: GenerateResult, distribution: Distribution) -> Completion:
    return Completion(
        id=completion_id,
        token_ids=result.token_ids,
        logprobs=result.logprobs,
        versions=result.versions,
        finish_reason=result.finish_reason,
        distribution=distribution,
    )


def _reply(completion: Completion, choice: Choice) -> Reply:
    return Reply(
        completion_id=completion.id,
        token_ids=completion.token_ids,
        message=choice.message,
        has_thinking="</think>" in choice.content,
    )


def _outcome(request: EndRequest, rewards: Rewards, *, num_turns: int) -> tuple[Status, str | None]:
    if request.status is not Status.COMPLETED:
        return request.status, request.error
    if num_turns == 0:
        return Status.ERROR, request.error or "the model was never called"
    if rewards.is_missing:
        return Status.MISSING_REWARD, request.error or "the session ended without a reward"
    return Status.COMPLETED, request.error
