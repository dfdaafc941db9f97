"""Digests: the proof that the ledger holds what was written, and that what was leased was sampled and earned so.

Pure; the order in which completions and rewards are given is of no account.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from areal_agent.types import Rewards, Trajectory

SampledTokens = tuple[str, Sequence[int], Sequence[float]]
"""A completion's id, its token ids [C] and their log-probabilities [C]."""


def lease_digest(trajectory: Trajectory, num_loss_tokens: int) -> str:
    """The digest of what a train step takes: all that was sampled, what it earned, how much of it is in the loss."""
    return row_digest((token_digest(trajectory), *_earned(trajectory.rewards), num_loss_tokens))


def row_digest(row: Sequence[str | float | None]) -> str:
    """SHA-256, hexadecimal, over a row of a table as JSON."""
    return hashlib.sha256(json.dumps(row).encode()).hexdigest()


def token_digest(trajectory: Trajectory) -> str:
    """The digest of all that was sampled in a trajectory."""
    return completions_digest(
        (completion.id, completion.token_ids, completion.logprobs)
        for turn in trajectory.turns
        for completion in turn.completions
    )


def completions_digest(completions: Iterable[SampledTokens]) -> str:
    """SHA-256, hexadecimal, over the completions in the order of their ids.

    A completion is written as the length of its id in bytes, the id, the number of its tokens, the ids as int32 and
    the log-probabilities as float32; all numbers little-endian, lengths as uint32.

    >>> a, b = ("c1", (5, 6), (-0.5, -0.25)), ("c2", (), ())
    >>> completions_digest([a, b]) == completions_digest([b, a])
    True
    """
    digest = hashlib.sha256()
    for completion_id, token_ids, logprobs in sorted(completions, key=lambda completion: completion[0]):
        name = completion_id.encode()
        digest.update(struct.pack("<I", len(name)) + name + struct.pack("<I", len(token_ids)))
        digest.update(np.asarray(token_ids, dtype="<i4").tobytes())
        digest.update(np.asarray(logprobs, dtype="<f4").tobytes())
    return digest.hexdigest()


def _earned(rewards: Rewards) -> tuple[float | None, str, str]:
    final = None if rewards.final is None else as_stored(rewards.final)
    return final, _in_order(rewards.by_completion), _in_order(rewards.parts)


def _in_order(rewards: Mapping[str, float]) -> str:
    return json.dumps([(name, as_stored(reward)) for name, reward in sorted(rewards.items())])


def as_stored(reward: float) -> float:
    """SQLite knows no integer in a column of floats, and no zero below zero."""
    return float(reward) + 0.0
