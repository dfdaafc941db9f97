"""One rollout's conversation with the model, from its first turn to its end.

::

    open ── place, answer ──▶ ending (requests in flight are aborted, their partial answers kept) ──▶ ended

Invariants: the journal has a turn before its answer finishes, and an end that has begun always completes, even if its
caller hangs up.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

from areal_agent.errors import EngineUnreachable, RequestError
from areal_agent.gateway.answers import Answer, Deliveries, EngineCalls, completion_ids
from areal_agent.gateway.bodies import GrowingBody
from areal_agent.gateway.control import EndRequest, RewardBook, RewardRequest
from areal_agent.gateway.draft import Outlet
from areal_agent.gateway.order import MAX_SEED, Order, Question, SamplingWishes
from areal_agent.gateway.turn import Exchange, PendingTurn, RunnableTurn, Services, TruncatedTurn, TurnLog, TurnPlan
from areal_agent.tokens.forest import Prompt
from areal_agent.types import Rewards, SamplingParams, SessionRecord, Status, Trajectory


class SessionState(StrEnum):
    """The stage of a session's life."""

    OPEN = "open"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOptions:
    """The options that a session chose at its start."""

    defaults: SamplingWishes = field(default_factory=SamplingWishes)
    truncates: bool = False  # with a full context, return an empty answer with finish reason `length`, not an error


class Session:
    """One session. Use it from one event loop only."""

    def __init__(
        self,
        record: SessionRecord,
        *,
        options: SessionOptions,
        services: Services,
        on_ended: Callable[["Session"], None],
    ) -> None:
        self.record = record
        self.state = SessionState.OPEN
        self.trajectory: Trajectory | None = None  # set once it has ended
        self.deliveries = Deliveries()
        self.bodies = GrowingBody()
        self._options = options
        self._services = services
        self._on_ended = on_ended
        self._log = TurnLog(record.id, services)
        self._rewards = RewardBook()
        self._calls = EngineCalls(services.sampler, services.counters, abort_grace_s=services.abort_grace_s)
        self._answers: set[asyncio.Task[Answer]] = set()
        self._ending: asyncio.Task[Trajectory] | None = None
        self._num_running = 0  # exchanges
        self._none_runs = asyncio.Event()
        self._none_runs.set()

    # ------------------------------------------------------------------------------------------- exchanges

    async def place(self, request: Order, *, num_bytes: int = 0) -> Exchange:
        """Place each prompt of a request among the session's turns. Raises RequestError for the agent's mistakes."""
        self._require_open()
        if request.json_schema is not None and not self._services.has_grammar:
            raise RequestError(
                "response_format needs an engine that can constrain answers by a grammar, and this gateway's cannot; "
                "leave it out, or use an engine that can",
                param="response_format",
                code="unsupported_parameter",
            )
        request.require_ids_below(self._services.vocab_size)
        questions = request.questions()
        answer_id = f"{request.id_prefix}-{self._services.numbers.getrandbits(96):024x}"
        num_choices = request.num_choices
        ids = completion_ids(answer_id, len(questions) * num_choices)
        turns = [
            await self._place_turn(request, question, ids, first_index=index * num_choices, num_bytes=num_bytes)
            for index, question in enumerate(questions)
        ]
        return Exchange(answer_id=answer_id, model=request.model, created_s=time.time(), order=request, turns=turns)

    async def _answer(self, exchange: Exchange, outlet: Outlet | None) -> Answer:
        with self._running():
            try:
                return await exchange.run(outlet)
            except EngineUnreachable:
                self._require_open()  # an engine that aborts because the session ends has not failed
                raise

    def begin(self, exchange: Exchange, outlet: Outlet | None = None) -> "asyncio.Task[Answer]":
        """Sample and record in a task that the session owns, so that it outlives an agent that hangs up.

        Do not cancel the task. When it is done, the journal has the turns. It raises EngineError when the engine
        failed, RequestError when the session ended meanwhile.
        """
        task = asyncio.create_task(self._answer(exchange, outlet))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)
        task.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # marks an exception as seen: perhaps nobody awaits the task any more
        if outlet is not None:
            task.add_done_callback(lambda _: outlet.close())
        return task

    async def _place_turn(
        self, request: Order, question: Question, ids: tuple[str, ...], *, first_index: int, num_bytes: int
    ) -> RunnableTurn:
        prompt = await self._log.place(question, num_bytes=num_bytes)
        own_ids = ids[first_index : first_index + request.num_choices]
        if prompt.num_tokens >= self._services.max_context_tokens:
            if not self._options.truncates:
                raise self._no_room(prompt, request.prompt_param)
            return TruncatedTurn(prompt_ids=prompt.path(), completion_ids=own_ids, first_index=first_index)
        plan = TurnPlan(
            prompt=prompt,
            sampling=self._sampling(request, prompt),
            order=request,
            reading=question.reading(self._services.renderer, prompt),
            is_single_call=request.is_single_call,
            completion_ids=own_ids,
            first_index=first_index,
        )
        return PendingTurn(plan, services=self._services, log=self._log, calls=self._calls, deliveries=self.deliveries)

    def _sampling(self, request: Order, prompt: Prompt) -> SamplingParams:
        """Return the sampling parameters, cut to the room left in the context (OpenAI would refuse instead)."""
        return request.over(self._options.defaults).params(
            num_room=self._services.max_context_tokens - prompt.num_tokens,
            stop_token_ids=self._services.renderer.stop_token_ids,
            stop=request.stops,
            seed=self._derived_seed(prompt) if request.seed is None else request.seed,
            json_schema=request.json_schema,
        )

    def _derived_seed(self, prompt: Prompt) -> int:
        """Derive a seed from the session's seed and the turn's place only, so that the order of concurrent calls is
        irrelevant.
        """
        key = self.record.seed.to_bytes(8)
        return int.from_bytes(blake2b(prompt.identity, digest_size=8, key=key).digest()) & MAX_SEED

    def _no_room(self, prompt: Prompt, param: str) -> RequestError:
        return RequestError(
            f"This model's maximum context length is {self._services.max_context_tokens} tokens. However, your "
            f"{param} resulted in {prompt.num_tokens} tokens, which leaves no room for an answer. Please reduce the "
            f"length of the {param}.",
            param=param,
            code="context_length_exceeded",
        )

    # --------------------------------------------------------------------------------- rewards and the end

    def reward(self, request: RewardRequest) -> None:
        """Take a reward. A later reward for the same thing replaces the earlier one."""
        self._require_open()
        self._rewards.take(request, self._log.completion_ids)

    async def end(self, request: EndRequest) -> Trajectory:
        """Close the session: abort what is in flight, then journal the trajectory.

        A `completed` session without a turn becomes `error`, one without a reward `missing_reward`. Cancelling this
        call does not stop the end.
        """
        self._require_open()
        self.state = SessionState.ENDING
        self._ending = asyncio.create_task(self._end(request))
        return await asyncio.shield(self._ending)

    async def ended(self) -> Trajectory:
        """Wait for an end that has begun."""
        assert self._ending is not None  # it is not open
        return await asyncio.shield(self._ending)

    async def _end(self, request: EndRequest) -> Trajectory:
        await self._drain()
        await self._log.close()
        rewards = self._rewards.rewards()
        status, error = _outcome(request, rewards, num_turns=self._log.num_turns)
        trajectory = Trajectory(
            session_id=self.record.id,
            group_id=self.record.group_id,
            task_id=self.record.task_id,
            turns=self._log.turns(),
            rewards=rewards,
            status=status,
            error=error,
            logged=request.logged,
            started_s=self.record.started_s,
            ended_s=time.time(),
            undelivered=self.deliveries.undelivered,
        )
        await self._services.journal.close_session(trajectory)
        self.trajectory = trajectory
        self.state = SessionState.ENDED
        self._on_ended(self)
        return trajectory

    async def _drain(self) -> None:
        """Abort the engine requests in flight; wait until their partial answers are in the journal and delivered."""
        await self._calls.abort_all()
        await self._none_runs.wait()
        await self.deliveries.settle(self._services.abort_grace_s)

    @contextlib.contextmanager
    def _running(self) -> Generator[None]:
        self._num_running += 1
        self._none_runs.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._none_runs.set()

    def _require_open(self) -> None:
        if self.state is not SessionState.OPEN:
            raise RequestError(
                f"session {self.record.id!r} is {self.state}: it accepts no more calls; start a new one",
                status=409,
                code="session_ended",
            )


def _outcome(request: EndRequest, rewards: Rewards, *, num_turns: int) -> tuple[Status, str | None]:
    if request.status is not Status.COMPLETED:
        return request.status, request.error
    if num_turns == 0:
        return Status.ERROR, request.error or "the model was never called"
    if rewards.is_missing:
        return Status.MISSING_REWARD, request.error or "the session ended without a reward"
    return Status.COMPLETED, request.error
