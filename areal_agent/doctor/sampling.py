"""What an engine must do with one request: ids in and out as they are recorded, and holding still when told to."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from areal_agent.doctor.finding import Finding, State
from areal_agent.doctor.stream import open_stream
from areal_agent.engine_types import EngineInfo, GenerateRequest, GenerateResult, PauseMode, TokenChunk
from areal_agent.protocols import Engine, Sampler
from areal_agent.types import SamplingParams

NUM_SHORT_TOKENS = 32
MAX_LONG_TOKENS = 4096
TRANSIT_S = 0.2
"""How long a token that was sampled before a pause may be on its way."""
HOLDING_S = 0.3
NEVER = -100.0
"""What is added to the logit of an end token, so that an answer goes on; servers take no more."""
ROUNDING = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Asker:
    """Makes the requests that the gateway would send for a short question."""

    prompt_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    temperature: float
    info: EngineInfo

    @property
    def room(self) -> int:
        """Tokens that an answer may have."""
        return self.info.max_context_tokens - len(self.prompt_ids)

    def short(self, number: int) -> GenerateRequest:
        """A request that ends by itself."""
        sampling = SamplingParams(
            temperature=self.temperature,
            max_tokens=min(NUM_SHORT_TOKENS, self.room),
            stop_token_ids=self.stop_token_ids,
            seed=number,
        )
        return GenerateRequest(request_id=f"doctor-short-{number:04}", input_ids=self.prompt_ids, sampling=sampling)

    def long(self, number: int) -> GenerateRequest:
        """A request that samples no end token: it runs until its context is full."""
        short = self.short(number)
        bias = tuple((token_id, NEVER) for token_id in self.stop_token_ids)
        sampling = replace(
            short.sampling, max_tokens=min(MAX_LONG_TOKENS, self.room), stop_token_ids=(), logit_bias=bias
        )
        return replace(short, request_id=f"doctor-large-{number:04}", sampling=sampling)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """An answer, and its tokens as they were streamed."""

    request: GenerateRequest
    result: GenerateResult
    streamed: tuple[int, ...]


async def sample(engine: Sampler, asker: Asker, number: int = 2) -> list[Sampled]:
    """Short answers, all at once. Raises EngineError."""
    return await asyncio.gather(*(_sample(engine, asker.short(index)) for index in range(number)))


async def _sample(engine: Sampler, request: GenerateRequest) -> Sampled:
    chunks: list[TokenChunk] = []
    result = await engine.generate(request, chunks.append)
    streamed = tuple(token_id for chunk in chunks for token_id in chunk.token_ids)
    return Sampled(request=request, result=result, streamed=streamed)


def sampling_finding(answers: Sequence[Sampled], info: EngineInfo) -> Finding:
    """Whether the answers are what a ledger can be made of."""
    faults = [fault for answer in answers for fault in faults_of(answer, info)]
    if faults:
        return Finding(
            check="engine", state=State.FAIL, found=f"its answers cannot be recorded: {faults[0]}", change="see its log"
        )
    count = sum(len(answer.result.token_ids) for answer in answers)
    return Finding(
        check="engine",
        state=State.OK,
        found=f"serves version {info.weight_version} with a context of {info.max_context_tokens} tokens; ids in and "
        f"out, {count} of them streamed with log-probabilities and versions",
    )


def faults_of(answer: Sampled, info: EngineInfo) -> Iterator[str]:
    """What is wrong with an answer."""
    result, number = answer.result, len(answer.result.token_ids)
    if not 1 <= number <= answer.request.sampling.max_tokens:
        yield f"{number} tokens, where 1 to {answer.request.sampling.max_tokens} were asked for"
    if answer.streamed != result.token_ids:
        yield "the tokens that were streamed are not those of the answer"
    if any(not 0 <= token_id < info.vocab_size for token_id in result.token_ids):
        yield f"an id outside the vocabulary of {info.vocab_size}"
    if len(result.logprobs) != number or any(not math.isfinite(one) or one > ROUNDING for one in result.logprobs):
        yield f"{len(result.logprobs)} log-probabilities for {number} tokens, or one that is none"
    if [(span.start, span.end, span.version) for span in result.versions] != [(0, number, info.weight_version)]:
        yield f"its tokens are labelled {told_spans(result)}, and version {info.weight_version} serves"


async def interruption_findings(engine: Engine, asker: Asker) -> list[Finding]:
    """Whether a pause holds an answer in mid-sentence, and it goes on after. Raises EngineError."""
    async with open_stream(engine, asker.long(0)) as stream:
        await stream.grows()
        await engine.pause(PauseMode.RETRACT)
        try:
            await asyncio.sleep(TRANSIT_S)
            num_before = stream.num_tokens
            await asyncio.sleep(HOLDING_S)
            num_sampled = stream.num_tokens - num_before
            has_ended = stream.has_ended
        finally:
            await engine.resume()
        if has_ended:
            return _interruption(State.WARN, "the answer had ended before it could be interrupted: not seen")
        goes_on = await stream.grows(beyond=num_before + num_sampled)
    if num_sampled:
        return _interruption(
            State.FAIL, f"{num_sampled} tokens were sampled within a pause", "new weights would be loaded under them"
        )
    if not goes_on:
        return _interruption(State.FAIL, "an answer that was paused did not go on", "see the engine's log")
    return _interruption(State.OK, f"an answer held still after {num_before} tokens, and went on")


def told_spans(result: GenerateResult) -> str:
    """`12 of 0:0, then 30 of 0:1`"""
    return ", then ".join(f"{span.end - span.start} of {span.version}" for span in result.versions) or "not at all"


def _interruption(state: State, found: str, change: str = "") -> list[Finding]:
    return [Finding(check="interruption", state=state, found=found, change=change)]
