"""Digests of sampled tokens, and of what was earned with them.

1. the documented bytes, by hand; 2. order does not matter; 3. a trajectory and its parts give the same digest; 4. a
lease's digest also covers rewards and the number of loss tokens.
"""

import hashlib
import struct
from dataclasses import replace

import pytest

from areal_agent.ledger.encoding import completions_digest, lease_digest, token_digest
from areal_agent.types import Rewards

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


LEASED = Rewards(final=1.0, by_completion={"s-c0": 0.5, "s-c1": 0.25}, parts={"style": 0.5})


def test_a_lease_knows_rewards_by_value_not_by_order_or_kind(make) -> None:
    turns = (make.turn("s", 0), make.turn("s", 1))
    same = Rewards(final=1, by_completion={"s-c1": 0.25, "s-c0": 0.5}, parts={"style": 0.5})
    alike = [make.ending("s", turns=turns, rewards=rewards) for rewards in (LEASED, same)]
    assert lease_digest(alike[0], 8) == lease_digest(alike[1], 8)


@pytest.mark.parametrize(
    "changed",
    [
        replace(LEASED, final=0.5),
        replace(LEASED, final=None),
        replace(LEASED, by_completion={"s-c0": 0.25, "s-c1": 0.5}),
        replace(LEASED, by_completion={}),
        replace(LEASED, parts={"style": 0.25}),
    ],
)
def test_any_change_of_rewards_changes_a_lease(make, changed: Rewards) -> None:
    turns = (make.turn("s", 0), make.turn("s", 1))
    digests = {lease_digest(make.ending("s", turns=turns, rewards=rewards), 8) for rewards in (LEASED, changed)}
    assert len(digests) == 2


def test_other_tokens_or_another_number_in_the_loss_change_a_lease(make) -> None:
    whole = make.ending("s", turns=(make.turn("s", 0), make.turn("s", 1)), rewards=LEASED)
    shorter = replace(whole, turns=whole.turns[:1])
    assert len({lease_digest(whole, 8), lease_digest(whole, 7), lease_digest(shorter, 8)}) == 3
