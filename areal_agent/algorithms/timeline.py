"""One record's loss tokens in time: which turn each is of, what it is paid, and the discount to the next. Pure.

Observations are left out, so they take no time, whatever they say and however long they are. Imports no torch.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from areal_agent.types import TokenRecord


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """M loss tokens of one record, in order.

    The reward of a turn is paid at its last loss token. A turn without one has nobody to pay: its reward goes,
    discounted, to the last loss token before it, and to no one when there is none.
    """

    turns: NDArray[np.int64]  # [M]
    rewards: NDArray[np.float64]  # [M]
    discounts: NDArray[np.float64]  # [M], from each token to the next: discount ** (turns between); of the last, 1

    @classmethod
    def of(cls, record: TokenRecord, discount: float) -> Self:
        turns = record.turn_index[record.loss_mask].astype(np.int64)
        rewards = np.zeros(len(turns))
        for turn, reward in enumerate(record.turn_rewards.astype(np.float64)):
            payee = int(np.searchsorted(turns, turn, side="right")) - 1  # turns never fall
            if payee >= 0:
                rewards[payee] += discount ** float(turn - turns[payee]) * reward
        steps = np.diff(turns, append=turns[-1:])
        return cls(turns=turns, rewards=rewards, discounts=discount ** steps.astype(np.float64))
