"""One rollout's conversation with the model, from its first turn to its end, and the bodies of `/rl/*` about it.

::

    open ── place, answer ──▶ ending (requests in flight are aborted, their partial answers kept) ──▶ ended

Invariants: the journal has a turn before its answer finishes, and an end that has begun always completes, even if its
caller hangs up.
"""

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated, Any, Self

import orjson
from pydantic import Field, PlainValidator, model_validator

from areal_agent.errors import EngineUnreachable, RequestError
from areal_agent.gateway.answers import Answer, Deliveries, EngineCalls, completion_ids, response_id
from areal_agent.gateway.auth import key_hash
from areal_agent.gateway.bodies import Body, GrowingBody, Name, ShallowObject, refuse, wrong
from areal_agent.gateway.conversation import Conversation, Translated
from areal_agent.gateway.draft import Outlet
from areal_agent.gateway.order import MAX_SEED, Order, Question, SamplingWishes
from areal_agent.gateway.turn import Exchange, PendingTurn, RunnableTurn, Services, TruncatedTurn, TurnLog, TurnPlan
from areal_agent.process import hide_keys, time_of_day_s
from areal_agent.tokens.forest import Prompt
from areal_agent.types import (
    MAX_REWARD,
    JsonObject,
    Rewards,
    SamplingParams,
    SessionPurpose,
    SessionRecord,
    Status,
    Trajectory,
)

MAX_GROUP_SIZE = 2**16


def _new_session_id() -> str:
    return f"session-{secrets.token_hex(8)}"


def _seed_of(fields: dict[str, Any]) -> int:
    digest = blake2b(fields["session_id"].encode(), digest_size=8).digest()
    return int.from_bytes(digest) & MAX_SEED


def _read_reward(value: object) -> float:
    """Read a finite number that a trainer can add up; true and false become 1 and 0."""
    if not isinstance(value, int | float) or not -MAX_REWARD <= value <= MAX_REWARD:
        remedy = "; scale it down" if isinstance(value, int | float) else ""
        raise wrong(f"a number from {-MAX_REWARD:g} to {MAX_REWARD:g}, or a boolean{remedy}")
    return float(value)


Reward = Annotated[
    float,
    PlainValidator(_read_reward, json_schema_input_type=Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)] | bool),
]


class StartRequest(Body):
    """The start of a rollout. Fields that are left out get defaults."""

    session_id: Name = Field(default_factory=_new_session_id)
    group_id: Name = Field(default_factory=lambda fields: fields["session_id"])
    task_id: Name
    purpose: Annotated[SessionPurpose, Field(strict=False)] = SessionPurpose.TRAIN
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = Field(default_factory=_seed_of)
    sampling: SamplingWishes = SamplingWishes()
    group_size: Annotated[int, Field(ge=1, le=MAX_GROUP_SIZE)] | None = Field(
        default=None,
        description="The number of sessions in the group, this one included. Default: that of its first session, or 1. "
        "Only where a trainer leases from this gateway.",
    )
    model_aliases: tuple[Name, ...] = Field(
        default=(),
        strict=False,
        description="More names by which this session's requests may call the model; '*' stands for every name.",
    )
    sampling_override: bool = Field(
        default=False,
        description="Ignore what requests say about temperature, top_p and the like: the session's sampling wins.",
    )
    truncates: bool = Field(
        default=False, alias="truncate", description="With a full context, return an empty answer instead of an error."
    )

    def record(self, api_key: str) -> SessionRecord:
        """Return the record of a session that starts now, with this key."""
        return SessionRecord(
            id=self.session_id,
            group_id=self.group_id,
            task_id=self.task_id,
            purpose=self.purpose,
            seed=self.seed,
            key_hash=key_hash(api_key),
            started_s=time_of_day_s(),
        )


class RewardRequest(Body):
    """A reward: of the whole session, of one completion (`interaction_id`), or a named part for metrics (`name`)."""

    reward: Reward
    completion_id: Name | None = Field(default=None, alias="interaction_id")
    name: Name | None = None

    @model_validator(mode="after")
    def _is_of_one_thing(self) -> Self:
        if self.completion_id is not None and self.name is not None:
            refuse("name", self.name, "left out where interaction_id is given: a named part is of the whole session")
        return self


class EndRequest(Body):
    """The end of a session."""

    status: Annotated[Status, Field(strict=False)] = Status.COMPLETED
    error: str | None = None
    logged: ShallowObject = Field(default_factory=dict[str, Any])
    may_be_silent: bool = Field(
        default=False,
        description="A `completed` session that never called the model ends as `rejected`, not as `error`: a role that "
        "had no part in its rollout.",
    )

    def without_keys(self) -> Self:
        """Return the same without keys: what a workflow raised or logged goes into the ledger."""
        logged = orjson.loads(hide_keys(orjson.dumps(self.logged).decode()))
        error = None if self.error is None else hide_keys(self.error)
        return self.model_copy(update={"error": error, "logged": logged})


class ExportRequest(Body):
    """The session to export."""

    session_id: Name


def with_reward(rewards: Rewards, request: RewardRequest, completion_ids: Collection[str]) -> Rewards:
    """Return the rewards with one more, which replaces an earlier one for the same thing.

    Raises RequestError for a completion that is not among those of the session.
    """
    if request.name is not None:
        return replace(rewards, parts={**rewards.parts, request.name: request.reward})
    if request.completion_id is None:
        return replace(rewards, final=request.reward)
    name = request.completion_id
    completion_id = next((one for one in (name, response_id(name)) if one in completion_ids), None)
    if completion_id is None:
        raise RequestError(
            f"this session has no completion {name!r}; use the id of a chat completion of this session (with n > 1: "
            "that id and '-0', '-1' ...), of a message, of a response or of one of its items; a part of the reward has "
            "a name and no id",
            param="interaction_id",
            code="interaction_not_found",
        )
    return replace(rewards, by_completion={**rewards.by_completion, completion_id: request.reward})


def has_ended(session_id: str, how: str = "has ended") -> RequestError:
    message = f"session {session_id!r} {how}: it accepts no more calls; start a new one"
    return RequestError(message, status=409, code="session_ended")


class SessionState(StrEnum):
    """The stage of a session's life."""

    OPEN = "open"
    ENDING = "ending"
    ENDED = "ended"


class Session:
    """One session. Use it from one event loop only."""

    def __init__(
        self,
        record: SessionRecord,
        *,
        services: Services,
        on_ended: Callable[["Session"], None],
        start: StartRequest,
    ) -> None:
        self.record = record
        self.state = SessionState.OPEN
        self.trajectory: Trajectory | None = None  # set once it has ended
        self.deliveries = Deliveries()
        self.bodies = GrowingBody()
        self.translated = Translated()
        self.responses: dict[str, Any] = {}  # by id; only `/v1/responses` knows what they are
        self.model_aliases = frozenset(start.model_aliases)
        self._defaults = start.sampling
        self._overrides_sampling = start.sampling_override
        self._truncates = start.truncates
        self._services = services
        self._on_ended = on_ended
        self._log = TurnLog(record.id, services)
        self._rewards = Rewards()
        self._calls = EngineCalls(services.sampler, services.counters, abort_grace_s=services.abort_grace_s)
        self._answers: dict[asyncio.Task[Answer], Exchange] = {}  # in flight
        self._ending: asyncio.Task[Trajectory] | None = None

    # ------------------------------------------------------------------------------------------- exchanges

    async def place(self, request: Order, *, num_bytes: int = 0) -> Exchange:
        """Place each prompt of a request among the session's turns. Raises RequestError for the agent's mistakes."""
        self._require_open()
        if request.json_schema is not None and not self._services.has_grammar:
            raise RequestError(
                f"{request.schema_param} needs an engine that can constrain answers by a grammar, and this gateway's "
                "cannot; leave it out, or use an engine that can",
                param=request.schema_param,
                code="unsupported_parameter",
            )
        request.wishes.require_possible(self._services.vocab_size)
        if hung_up := [task for task, exchange in self._answers.items() if exchange.is_hung_up]:
            await asyncio.wait(hung_up, timeout=self._services.abort_grace_s)  # the request may continue them
            self._require_open()
        questions = request.questions
        answer_id = f"{request.id_prefix}{self._services.numbers.getrandbits(96):024x}"
        num_choices = request.num_choices
        ids = completion_ids(answer_id, len(questions) * num_choices)
        turns = [
            await self._place_turn(request, question, ids, first_index=index * num_choices, num_bytes=num_bytes)
            for index, question in enumerate(questions)
        ]
        return Exchange(answer_id=answer_id, model=request.model, created_s=time_of_day_s(), order=request, turns=turns)

    async def prompt_ids(self, conversation: Conversation, *, num_bytes: int = 0) -> Sequence[int]:
        """Return the ids of a prompt that is not to be sampled. Raises RequestError for the agent's mistakes."""
        self._require_open()
        return await self._log.prompt_ids(conversation, num_bytes=num_bytes)

    def conversation_after(self, completion_id: str, param: str) -> list[JsonObject]:
        """Return all messages up to and including a kept answer (`Order.is_kept`). Raises RequestError."""
        messages = self._log.conversation_after(completion_id)
        if messages is None:
            raise RequestError(
                f"{param} is {completion_id!r:.200}: this session kept no such answer; send the whole conversation, or "
                "the id of a finished answer that was stored",
                status=404,
                param=param,
                code="not_found",
            )
        return messages

    async def _answer(self, exchange: Exchange, outlet: Outlet | None) -> Answer:
        try:
            return await exchange.run(outlet)
        except EngineUnreachable:
            self._require_open()  # an engine that aborts because the session ends has not failed
            if exchange.is_hung_up:  # nor one that aborts because nobody wants the answer any more
                raise RequestError("the answer was cancelled; ask again", status=409, code="cancelled") from None
            raise

    def begin(self, exchange: Exchange, outlet: Outlet | None = None) -> "asyncio.Task[Answer]":
        """Sample and record in a task that the session owns, so that it outlives an agent that hangs up.

        Do not cancel the task. When it is done, the journal has the turns. It raises EngineError when the engine
        failed, RequestError when the session ended meanwhile.
        """
        task = asyncio.create_task(self._answer(exchange, outlet))
        self._answers[task] = exchange

        def ended(done: "asyncio.Task[Answer]") -> None:
            del self._answers[done]
            if not done.cancelled():
                done.exception()  # marks it as seen: perhaps nobody awaits the task any more
            if outlet is not None:
                outlet.close()

        task.add_done_callback(ended)
        return task

    async def _place_turn(
        self, request: Order, question: Question, ids: tuple[str, ...], *, first_index: int, num_bytes: int
    ) -> RunnableTurn:
        try:
            prompt = await self._log.place(question, num_bytes=num_bytes)
        except RequestError as error:
            if error.param == "messages":  # the chat template's word for them
                error.param = request.prompt_param
            raise
        if prompt.parent:  # who continues an answer has it, even if it closed the stream before the end
            self.deliveries.delivered([prompt.parent.completion_id])
        own_ids = ids[first_index : first_index + request.num_choices]
        prompt_ids, spans = self._services.renderer.shown(prompt.path())
        is_full = prompt.num_tokens >= self._services.max_context_tokens
        if is_full and not self._truncates:
            raise self._no_room(prompt, request.prompt_param)
        if is_full or request.wishes.max_tokens == 0:
            return TruncatedTurn(prompt_ids=prompt_ids, completion_ids=own_ids, first_index=first_index)
        plan = TurnPlan(
            prompt=prompt,
            prompt_ids=prompt_ids,
            images=await self._services.images.of(spans) if self._services.images else (),
            sampling=self._sampling(request, prompt),
            order=request,
            reading=question.reading(self._services.renderer, prompt),
            is_single_call=request.is_single_call or question.takes_one_call(self._services.renderer),
            completion_ids=own_ids,
            first_index=first_index,
        )
        return PendingTurn(plan, services=self._services, log=self._log, calls=self._calls, deliveries=self.deliveries)

    def _sampling(self, request: Order, prompt: Prompt) -> SamplingParams:
        """Return the sampling parameters, cut to the room left in the context (OpenAI would refuse instead)."""
        return request.wishes.over(self._defaults, only_lengths=self._overrides_sampling).params(
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
        self._rewards = with_reward(self._rewards, request, self._log.completion_ids)

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
        await self._calls.abort_all()
        if self._answers:
            await asyncio.wait(self._answers)  # until the partial answers are in the journal
        await self.deliveries.settle(self._services.abort_grace_s)
        await self._log.close()
        self.bodies.forget()
        self.translated.forget()
        self.responses.clear()
        status, error = outcome_of(request, self._rewards, num_turns=self._log.num_turns)
        trajectory = Trajectory(
            session_id=self.record.id,
            group_id=self.record.group_id,
            task_id=self.record.task_id,
            turns=self._log.turns(),
            rewards=self._rewards,
            status=status,
            error=error,
            logged=request.logged,
            started_s=self.record.started_s,
            ended_s=time_of_day_s(),
            # of those that are in the journal: a full disk may have refused one
            undelivered=tuple(one for one in self.deliveries.undelivered if one in self._log.completion_ids),
        )
        await self._services.journal.close_session(trajectory)
        self.trajectory = trajectory
        self.state = SessionState.ENDED
        self._on_ended(self)
        return trajectory

    def _require_open(self) -> None:
        if self.state is not SessionState.OPEN:
            raise has_ended(self.record.id, f"is {self.state}")


def outcome_of(request: EndRequest, rewards: Rewards, *, num_turns: int) -> tuple[Status, str | None]:
    """Return how a session ends, and why: one without a turn is `error`, one without a reward `missing_reward`.

    With `may_be_silent` the former is `rejected`. The error of a request that says `completed` is for these two.
    """
    if request.status is not Status.COMPLETED:
        return request.status, request.error
    if num_turns == 0:
        status = Status.REJECTED if request.may_be_silent else Status.ERROR
        return status, "the model was never called" + (f"; {request.error}" if request.error else "")
    if rewards.is_missing:
        return Status.MISSING_REWARD, request.error or "the session ended without a reward"
    return Status.COMPLETED, None
