"""Builds token records from turns written out by hand."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from areal_agent.types import TokenRecord

Piece = tuple[bool, Sequence[int]]  # sampled or not, token ids


@pytest.fixture(scope="session")
def make_record() -> Callable[..., TokenRecord]:
    """A record of turns; each turn is a list of pieces (is_sampled, token ids), with one reward a turn."""

    def make(
        session: str,
        group: str,
        turns: Sequence[Sequence[Piece]],
        rewards: Sequence[float],
        *,
        branch: int = 0,
        temperature: float = 1.0,
        logprob: float = -1.0,
        version: int = 0,
    ) -> TokenRecord:
        pieces = [(turn, *piece) for turn, one in enumerate(turns) for piece in one]
        mask = np.array([sampled for _, sampled, ids in pieces for _ in ids], dtype=np.bool_)
        return TokenRecord(
            session_id=session,
            group_id=group,
            branch=branch,
            parent_branch=branch - 1 if branch else None,
            token_ids=np.array([token for _, _, ids in pieces for token in ids], dtype=np.int32),
            loss_mask=mask,
            turn_index=np.array([turn for turn, _, ids in pieces for _ in ids], dtype=np.int32),
            behavior_logprobs=np.where(mask, logprob, 0.0).astype(np.float32),
            temperatures=np.where(mask, temperature, 1.0).astype(np.float32),
            versions=np.where(mask, version, -1).astype(np.int32),
            turn_rewards=np.array(rewards, dtype=np.float32),
        )

    return make
