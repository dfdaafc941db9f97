"""What the rows of one model keep their keys and values in, as the workload and the model see it.

Row i holds slot i, and slots are 0..n-1 without gaps. What ended or prefilled rows have computed is kept for others to
begin with, as far as there is room. Two keep this promise: slots of whole contexts on a CPU (slot_store.py), whose
memory comes with the first write, and pages on a GPU (paged/).

`lengths` are the tokens of the rows that hold slots 0..n-1: prompt and sampled, computed or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from areal_agent.engine.embedded.decoder import Step

Ids = NDArray[np.int32]

HEADROOM_TOKENS = 32
"""Room that every running row keeps to grow when another one is admitted; without it they would soon be retracted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Tokens of one sequence whose keys and values are to be computed: positions `[begin, begin + T)` in `slot`."""

    slot: int
    begin: int
    ids: Ids  # [T]


class DecodeStep(Step, Protocol):
    """One new token for each of the first n slots."""

    @property
    def positions(self) -> Tensor:
        """Where in their sequences, `[n]`."""
        ...


class KVStore(Protocol):
    """Keys and values of slots, and of what is kept for others. Use it from one thread."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are held at most, in slots and for others together."""
        ...

    @property
    def num_kept(self) -> int:
        """Tokens that are held for others alone."""
        ...

    @property
    def always_keeps(self) -> bool:
        """Whether what a row has computed is always there for others while that row runs."""
        ...

    def num_used(self, lengths: Sequence[int]) -> int:
        """Tokens that the rows take of it."""
        ...

    def num_known(self, ids: Ids) -> int:
        """How many tokens a row of these ids would begin with."""
        ...

    def can_begin(self, ids: Ids, lengths: Sequence[int]) -> bool:
        """Whether one more row has room beside those that run, which keep theirs to grow."""
        ...

    def begin(self, ids: Ids, lengths: Sequence[int]) -> int:
        """Give a row the next slot, begun with what is known of it: how many tokens that is. Its last token is never
        among them."""
        ...

    def fit(self, lengths: Sequence[int]) -> bool:
        """Have room for rows of these lengths, at the cost of what is kept for others. False: there is none."""
        ...

    def keep(self, slot: int, ids: Ids, lengths: Sequence[int]) -> None:
        """Keep the first tokens of a slot, which are `ids`, for others, if there is room."""
        ...

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Give the row in slot `source`, of which so many tokens are computed, the slot `target`; what was there may
        be lost."""
        ...

    def drop(self, slot: int) -> None:
        """Nothing in this slot is needed any more."""
        ...

    def forget(self) -> None:
        """Keep nothing for others: it belongs to weights that are gone. Slots stay."""
        ...

    def wipe(self) -> None:
        """Make everything read as zeros; no slot may be in use."""
        ...

    def free(self) -> None:
        """Give all memory back; no slot may be in use."""
        ...

    def allocate(self) -> None:
        """Take it again. Raises OSError or RuntimeError when there is none."""
        ...

    def prefill(self, pieces: Sequence[Piece]) -> Step:
        """A step over pieces, packed in this order on one axis without padding."""
        ...

    def decode(self, lengths: Sequence[int]) -> DecodeStep:
        """A step of the first n rows; `lengths` count the new token."""
        ...
