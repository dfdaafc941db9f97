"""What can go wrong with the scripted engine, once each: planned by a test, struck by the engine. Knows no request."""

import asyncio
from collections import deque
from dataclasses import replace
from enum import StrEnum

from areal_agent.engine.stored_weights import Spoil
from areal_agent.engine_types import GenerateResult
from areal_agent.errors import EngineUnreachable


class Operation(StrEnum):
    """The calls that can be made to fail or to hang."""

    GENERATE = "generate"
    ABORT = "abort"
    PAUSE = "pause"
    RESUME = "resume"
    UPDATE_WEIGHTS = "update_weights"
    BEGIN_PUSH = "begin_push"
    SEND_PUSH = "send_push"
    COMMIT_PUSH = "commit_push"
    ABORT_PUSH = "abort_push"


class Garbage(StrEnum):
    """The promises of an answer that can be broken."""

    ID_OUTSIDE = "id_outside"  # the last id is no id of the vocabulary
    LOGPROB_MISSING = "logprob_missing"  # one log-probability fewer than ids
    LOGPROB_NAN = "logprob_nan"  # the last log-probability is no number
    VERSIONS_MISSING = "versions_missing"  # no span says who sampled the tokens


class Faults:
    """The faults that are planned. Use it from one event loop."""

    def __init__(self) -> None:
        self.is_dead = False
        self._next: dict[Operation, deque[Exception | asyncio.Event]] = {operation: deque() for operation in Operation}
        self._hanging: list[asyncio.Event] = []
        self._garbage: deque[Garbage] = deque()
        self._num_corrupt = 0  # pushes whose bytes arrive damaged
        self._lifetime: int | None = None  # tokens that are still sampled; None: all

    def fail_next(self, operation: Operation, error: Exception) -> None:
        self._next[operation].append(error)

    def hang_next(self, operation: Operation) -> None:
        recovered = asyncio.Event()
        self._hanging.append(recovered)
        self._next[operation].append(recovered)

    def garble_next(self, garbage: Garbage) -> None:
        self._garbage.append(garbage)

    def corrupt_next_push(self) -> None:
        self._num_corrupt += 1

    def next_spoil(self) -> Spoil | None:
        """What to do with the bytes of the weights that arrive now."""
        if not self._num_corrupt:
            return None
        self._num_corrupt -= 1
        return _flip_a_bit

    def die_after(self, num_tokens: int) -> None:
        self._lifetime = num_tokens
        self.is_dead = num_tokens == 0

    def recover(self) -> None:
        self.is_dead, self._lifetime = False, None
        for recovered in self._hanging:
            recovered.set()
        self._hanging.clear()

    async def strike(self, operation: Operation) -> None:
        """What is planned for the next call of `operation`, if anything."""
        if self.is_dead:
            raise self.nobody_there()
        if not self._next[operation]:
            return
        fault = self._next[operation].popleft()
        if isinstance(fault, Exception):
            raise fault
        await fault.wait()

    def lifetime(self, num_tokens: int) -> int:
        """How many of so many tokens are sampled before the end."""
        return num_tokens if self._lifetime is None else min(num_tokens, self._lifetime)

    def live(self, num_tokens: int) -> int:
        """So many have been sampled; the same number."""
        if self._lifetime is not None:
            self._lifetime -= num_tokens
            self.is_dead = self._lifetime == 0
        return num_tokens

    def next_garbage(self) -> Garbage | None:
        return self._garbage.popleft() if self._garbage else None

    @staticmethod
    def nobody_there() -> EngineUnreachable:
        return EngineUnreachable("the scripted engine has died, as it was told to; call recover()")


def _flip_a_bit(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


def garbled(result: GenerateResult, garbage: Garbage | None, vocab_size: int) -> GenerateResult:
    """The answer with one promise broken; None: as it is."""
    match garbage:
        case None:
            return result
        case Garbage.ID_OUTSIDE:
            return replace(result, token_ids=(*result.token_ids[:-1], vocab_size))
        case Garbage.LOGPROB_MISSING:
            return replace(result, logprobs=result.logprobs[:-1])
        case Garbage.LOGPROB_NAN:
            return replace(result, logprobs=(*result.logprobs[:-1], float("nan")))
        case Garbage.VERSIONS_MISSING:
            return replace(result, versions=())
