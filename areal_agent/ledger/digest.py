"""What identifies the sampled tokens of a trajectory: the ledger's proof that what was leased is what was sampled.

Pure; the order in which completions are given is of no account.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence

import numpy as np

from areal_agent.types import Trajectory

SampledTokens = tuple[str, Sequence[int], Sequence[float]]
"""A completion's id, its token ids [C] and their log-probabilities [C]."""


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
