"""A recorded turn as an open session holds it: its numbers in arrays, an eighth of the memory. It loses nothing."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from areal_agent.types import Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class _Numbers:
    """What one completion has for each token."""

    token_ids: "array[int]"
    logprobs: "array[float]"


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTurn:
    """`turn` and its completions are without their numbers.

    >>> PackedTurn.of(turn, new_prompt_ids, sampled).unpacked() == turn    # doctest: +SKIP
    True
    """

    turn: Turn
    new_prompt_ids: "array[int]"
    numbers: tuple[_Numbers, ...]  # by completion

    @classmethod
    def of(cls, turn: Turn, new_prompt_ids: "array[int]", sampled: Sequence["array[int]"]) -> Self:
        """`new_prompt_ids` and `sampled`, a completion each, are the turn's, packed: they are shared, not copied."""
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
