"""The finished answers to a request, and how a session's engine requests and deliveries are tracked.

`Answer`, `TurnAnswer` and `Choice` hold what was sampled, with `usage` and log-probabilities as OpenAI writes them.
`EngineCalls` makes the engine requests of one session and ends them together. `Deliveries` tracks which answers were
written completely to the agent's open connection: a recorded answer that was not is an orphan and is not trained on.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Sequence
from hashlib import blake2b
from typing import Any

from areal_agent.errors import EngineError
from areal_agent.gateway.draft import TokenRow
from areal_agent.gateway.metrics import Counters
from areal_agent.gateway.order import MAX_SEED
from areal_agent.protocols import Sampler
from areal_agent.tokens.forest import Reply
from areal_agent.tokens.formats.base import ParsedAnswer, call_id
from areal_agent.tokens.renderer import Detokenizer
from areal_agent.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    JsonObject,
    PromptImage,
    SamplingParams,
    TokenChunk,
    record,
)

NOTHING = GenerateResult(token_ids=(), logprobs=(), versions=(), finish_reason=FinishReason.ABORT)
"""The result of a request that was ended before it sampled anything."""


@record
class Choice:
    """One answer. `rows` are for log-probabilities and empty where none were asked for."""

    index: int
    completion: Completion
    text: str  # without the end token or a stop text
    parsed: ParsedAnswer
    rows: tuple[TokenRow, ...] = ()
    num_reasoning_tokens: int = 0
    stop_text: str = ""  # the stop text that ended it
    num_given: int = 0  # characters of the content that the agent gave

    @property
    def content(self) -> str:
        """The content that was sampled, without what the agent gave as its beginning."""
        return self.parsed.content[self.num_given :]

    @property
    def finish_reason(self) -> str:
        """OpenAI's finish reason. It is `tool_calls` for an answer with a call, even if text follows the call."""
        return "tool_calls" if self.parsed.tool_calls else self.completion.finish_reason.value

    @property
    def message(self) -> JsonObject:
        """The answer as a normalised message, as the next request is expected to repeat it."""
        message: dict[str, object] = {
            "role": "assistant",
            "content": self.parsed.content,
            "tool_calls": [
                {
                    "id": call_id(self.completion.id, index),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for index, call in enumerate(self.parsed.tool_calls)
            ],
        }
        if self.parsed.reasoning is not None:
            message["reasoning_content"] = self.parsed.reasoning
        return message

    def reply(self, token_ids: Sequence[int]) -> Reply:
        """Return the answer as the forest of turns keeps it, with its tokens."""
        return Reply(
            completion_id=self.completion.id,
            token_ids=token_ids,
            message=self.message,
            own_ids=tuple(call.id for call in self.parsed.tool_calls),
            has_thinking=self.parsed.reasoning is not None,
            stop_text=self.stop_text,
        )


def completion_ids(answer_id: str, num_choices: int) -> tuple[str, ...]:
    """Return the ids of an answer's completions.

    >>> completion_ids("chatcmpl-7", 1), completion_ids("chatcmpl-7", 2)
    (('chatcmpl-7',), ('chatcmpl-7-0', 'chatcmpl-7-1'))
    """
    return (answer_id,) if num_choices == 1 else tuple(f"{answer_id}-{index}" for index in range(num_choices))


@record
class TurnAnswer:
    """The answers to one prompt."""

    prompt_ids: Sequence[int]
    choices: tuple[Choice, ...]
    num_cached_tokens: int


@record
class Answer:
    """The answers to one request, in the order of its prompts."""

    turns: Sequence[TurnAnswer]

    @property
    def choices(self) -> list[Choice]:
        return [choice for turn in self.turns for choice in turn.choices]

    @property
    def completion_ids(self) -> list[str]:
        return [choice.completion.id for choice in self.choices]

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's `usage`. A prompt counts once, however many answers it has."""
        choices = self.choices
        num_prompt = sum(len(turn.prompt_ids) for turn in self.turns)
        num_sampled = sum(len(choice.completion.token_ids) for choice in choices)
        num_reasoning = sum(choice.num_reasoning_tokens for choice in choices)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
            "prompt_tokens_details": {"cached_tokens": sum(turn.num_cached_tokens for turn in self.turns)},
        }
        if num_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage


NUM_ID_DIGITS = 24
"""The ids of a response and its items have these digits in common."""


def response_id(item_id: str) -> str:
    """Return the id of the response that an item belongs to.

    >>> response_id("fc_0123456789abcdef01234567_1")
    'resp_0123456789abcdef01234567'
    """
    return f"resp_{item_id.partition('_')[2][:NUM_ID_DIGITS]}"


def chat_logprobs(rows: Sequence[TokenRow], num_top: int, detokenizer: Detokenizer) -> dict[str, Any]:
    """Return a chat choice's `logprobs`: each token's text, bytes, log-probability and likeliest alternatives."""
    return {
        "content": [
            _entry(row.token_id, row.logprob, detokenizer)
            | {"top_logprobs": [_entry(*one, detokenizer) for one in row.top_logprobs[:num_top]]}
            for row in rows
        ]
    }


def completion_logprobs(
    rows: Sequence[TokenRow], num_top: int, detokenizer: Detokenizer, *, first_offset: int
) -> dict[str, Any]:
    """Return a plain completion's `logprobs` as four columns. `first_offset` is the length of the echoed prompt."""
    return {
        "tokens": [_text(row.token_id, detokenizer) for row in rows],
        "token_logprobs": [row.logprob for row in rows],
        "top_logprobs": [_by_text(row, num_top, detokenizer) for row in rows] if num_top else None,
        "text_offset": [first_offset + row.start for row in rows],
    }


def _entry(token_id: int, logprob: float, detokenizer: Detokenizer) -> dict[str, Any]:
    data = detokenizer.bytes_of(token_id)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def _by_text(row: TokenRow, num_top: int, detokenizer: Detokenizer) -> dict[str, float]:
    """Map text to log-probability. OpenAI's form has one entry per text: its likeliest token's."""
    likeliest = dict[str, float]()
    for token_id, logprob in row.top_logprobs[:num_top]:
        likeliest.setdefault(_text(token_id, detokenizer), logprob)
    return likeliest


def _text(token_id: int, detokenizer: Detokenizer) -> str:
    return detokenizer.bytes_of(token_id).decode(errors="replace")


class Deliveries:
    """Tracks the answers of one session until they have been sent."""

    def __init__(self) -> None:
        self._undelivered: dict[str, None] = {}  # keys: completion ids in the order of recording
        self._num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def undelivered(self) -> tuple[str, ...]:
        """The recorded completions that have not reached their agent."""
        return tuple(self._undelivered)

    def recorded(self, completion_ids: Iterable[str]) -> None:
        """Note completions that are in the journal but not yet delivered."""
        self._undelivered.update(dict.fromkeys(completion_ids))

    def delivered(self, completion_ids: Iterable[str]) -> None:
        for completion_id in completion_ids:
            self._undelivered.pop(completion_id, None)

    @contextlib.contextmanager
    def one(self) -> Generator[None]:
        """Track one request, from its arrival to the last byte of its answer."""
        self._num_open += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._is_idle.set()

    async def settle(self, grace_s: float) -> None:
        """Wait until no request is open, but at most `grace_s`: an agent may be slow to read its answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._is_idle.wait()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """Callbacks for the progress of requests; the first argument is a request's index. They must not block or raise."""

    on_chunk: Callable[[int, TokenChunk], None]
    on_result: Callable[[int, GenerateResult], None]


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Running:
    """A request in flight and the task that waits for it."""

    task: "asyncio.Task[object]"
    ended: "asyncio.Future[None]"
    is_given_up: bool = False  # it was aborted and took too long


class EngineCalls:
    """The engine requests of one session. After `abort_all` no new ones are made."""

    def __init__(self, sampler: Sampler, counters: Counters, *, abort_grace_s: float) -> None:
        self._sampler = sampler
        self._counters = counters
        self._abort_grace_s = abort_grace_s
        self._running: dict[str, _Running] = {}  # by request id
        self._aborts: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def sample(self, requests: Sequence[GenerateRequest], watch: Watch | None = None) -> list[GenerateResult]:
        """Sample all requests concurrently. When one fails or the call is cancelled, the others are ended.

        Raises what the engine raised.
        """
        if len(requests) == 1:
            return [await self._sample_one(requests[0], 0, watch)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._sample_one(request, index, watch)) for index, request in enumerate(requests)
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def abort_soon(self, request_id: str) -> None:
        """Abort one request without waiting. It returns what it has, or nothing once the grace period is over."""
        if request_id in self._running:
            task = asyncio.create_task(self._end([request_id]))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def abort_all(self) -> None:
        """Abort all requests and wait for them. Those that take longer than the grace period return nothing."""
        self._is_closed = True
        await self._end(list(self._running))
        if self._aborts:
            await asyncio.wait(self._aborts)

    async def _end(self, request_ids: Sequence[str]) -> None:
        running = [self._running[request_id] for request_id in request_ids if request_id in self._running]
        if not running:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._abort_grace_s):
                await asyncio.gather(*map(self._abort, request_ids))
                await asyncio.wait([one.ended for one in running])
        for one in running:
            if not one.ended.done() and not one.is_given_up:  # a second cancel would look like one by its caller
                one.is_given_up = True
                one.task.cancel()
        await asyncio.wait([one.ended for one in running])

    async def _sample_one(self, request: GenerateRequest, index: int, watch: Watch | None) -> GenerateResult:
        """Sample in the caller's task, which goes on when the request is given up."""
        task = asyncio.current_task()
        assert task is not None
        num_cancelled = task.cancelling()
        running = self._running[request.request_id] = _Running(
            task=task, ended=asyncio.get_running_loop().create_future()
        )
        try:
            return await self._generate(request, index, watch)
        except asyncio.CancelledError:
            if running.is_given_up and task.cancelling() == num_cancelled + 1:
                return NOTHING
            raise
        finally:
            if running.is_given_up:
                task.uncancel()
            del self._running[request.request_id]
            running.ended.set_result(None)

    async def _generate(self, request: GenerateRequest, index: int, watch: Watch | None) -> GenerateResult:
        if self._is_closed:
            return NOTHING
        with self._counters.engine.one():
            if watch is None:
                result = await self._sampler.generate(request)
            else:
                result = await self._sampler.generate(request, lambda chunk: watch.on_chunk(index, chunk))
                watch.on_result(index, result)
        self._counters.generated_tokens += len(result.token_ids)
        return result

    async def _abort(self, request_id: str) -> None:
        with contextlib.suppress(EngineError):  # an engine that is gone samples nothing
            await self._sampler.abort(request_id)


def requests_for(
    input_ids: Sequence[int],
    sampling: SamplingParams,
    completion_ids: Sequence[str],
    num_top_logprobs: int,
    images: tuple[PromptImage, ...] = (),
) -> list[GenerateRequest]:
    """Return one request per answer to the same prompt, each with its own seed."""
    return [
        GenerateRequest(
            request_id=request_id_of(completion_id),
            input_ids=input_ids,
            sampling=_for_choice(sampling, index),
            num_top_logprobs=num_top_logprobs,
            images=images,
        )
        for index, completion_id in enumerate(completion_ids)
    ]


def request_id_of(completion_id: str) -> str:
    """Make ids of equal length, so that no engine mistakes one for a prefix of another."""
    return blake2b(completion_id.encode(), digest_size=16).hexdigest()


def _for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the sampling of a choice: the first has the given seed, the others the seeds that follow."""
    if index == 0 or sampling.seed is None:
        return sampling
    return dataclasses.replace(sampling, seed=(sampling.seed + index) & MAX_SEED)
