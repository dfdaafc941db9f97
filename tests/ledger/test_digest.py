"""The identity of sampled tokens.

1. the documented bytes, by hand; 2. order is of no account; 3. it is the same from a trajectory and from its parts;
4. any change of an id, a token, a log-probability or a boundary changes it.
"""

import hashlib
import struct

import pytest

from areal_agent.ledger.digest import completions_digest, token_digest

COMPLETIONS = [("c1", (5, 6), (-0.5, -0.25)), ("c2", (7,), (-1.0,))]


def test_it_is_the_documented_bytes() -> None:
    written = b"".join(
        [
            struct.pack("<I", 2)
            + b"c1"
            + struct.pack("<I", 2)
            + struct.pack("<ii", 5, 6)
            + struct.pack("<ff", -0.5, -0.25),
            struct.pack("<I", 2) + b"c2" + struct.pack("<I", 1) + struct.pack("<i", 7) + struct.pack("<f", -1.0),
        ]
    )
    assert completions_digest(COMPLETIONS) == hashlib.sha256(written).hexdigest()


def test_order_is_of_no_account() -> None:
    assert completions_digest(reversed(COMPLETIONS)) == completions_digest(COMPLETIONS)


def test_a_trajectory_has_the_digest_of_its_completions(make) -> None:
    turns = (make.turn("s", 0), make.turn("s", 1))
    parts = [(one.id, list(one.token_ids), list(one.logprobs)) for turn in turns for one in turn.completions]
    assert token_digest(make.ending("s", turns=turns)) == completions_digest(parts)


@pytest.mark.parametrize(
    "changed",
    [
        [("cX", (5, 6), (-0.5, -0.25)), ("c2", (7,), (-1.0,))],
        [("c1", (5, 9), (-0.5, -0.25)), ("c2", (7,), (-1.0,))],
        [("c1", (5, 6), (-0.5, -0.26)), ("c2", (7,), (-1.0,))],
        [("c1", (5,), (-0.5,)), ("c2", (6, 7), (-0.25, -1.0))],
        [("c1", (5, 6), (-0.5, -0.25))],
    ],
)
def test_any_change_changes_it(changed) -> None:
    assert completions_digest(changed) != completions_digest(COMPLETIONS)
