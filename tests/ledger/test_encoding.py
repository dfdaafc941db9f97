"""Records become rows and come back, through the file.

1. any turn and any ending comes back equal, with the same digests; 2. a log-probability comes back as the float32
that it was; 3. what is no JSON, or a token id that does not fit int32, is refused by name; 4. a turn costs the file
only its new tokens.
"""

import asyncio
import itertools
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.errors import LedgerError
from areal_agent.ledger.encoding import lease_digest
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import Invariant, verify
from areal_agent.types import (
    Completion,
    Distribution,
    FinishReason,
    ForkReason,
    ImageSpan,
    Rewards,
    SamplingParams,
    Status,
    Trajectory,
    Turn,
    VersionSpan,
    WeightVersion,
)

from .make import Make

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=12).map(tuple)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
finite = st.floats(allow_nan=False, allow_infinity=False)
float32 = st.floats(width=32, max_value=0.0, allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | finite | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
json_objects = st.dictionaries(text, json_values, max_size=4)
versions = st.builds(WeightVersion, incarnation=st.integers(0, 9), step=st.integers(0, 10**6))
spans = st.builds(VersionSpan, version=versions, start=st.integers(0, 99), end=st.integers(0, 99))
samplings = st.builds(
    SamplingParams,
    temperature=finite,
    top_p=finite,
    top_k=st.integers(-1, 100),
    min_p=finite,
    frequency_penalty=finite,
    presence_penalty=finite,
    repetition_penalty=finite,
    logit_bias=st.lists(st.tuples(st.integers(0, 2**31 - 1), finite), max_size=3).map(tuple),
    json_schema=st.none() | text,
    stop=st.lists(text, max_size=3).map(tuple),
    max_tokens=st.integers(1, 10**6),
    min_tokens=st.integers(0, 10**6),
    stop_token_ids=token_ids,
    ignore_eos=st.booleans(),
    seed=st.none() | st.integers(0, 2**63 - 1),
)


@st.composite
def completions(draw) -> Completion:
    ids = draw(token_ids)
    return Completion(
        id=draw(text),
        token_ids=ids,
        logprobs=tuple(draw(st.lists(float32, min_size=len(ids), max_size=len(ids)))),
        versions=tuple(draw(st.lists(spans, max_size=3))),
        finish_reason=draw(st.sampled_from(FinishReason)),
        distribution=draw(st.sampled_from(Distribution)),
    )


places = st.integers(0, 2**31 - 1)
turns = st.builds(
    Turn,
    id=text,
    parent=st.none() | text,
    fork_at=places,
    new_prompt_ids=token_ids,
    completions=st.lists(completions(), max_size=2).map(tuple),
    request_delta=st.lists(json_objects, max_size=3).map(tuple),
    sampling=samplings,
    started_s=finite,
    ended_s=finite,
    fork_reason=st.none() | st.sampled_from(ForkReason),
    images=st.lists(st.builds(ImageSpan, digest=text, start=places, end=places), max_size=2).map(tuple),
)
endings = st.fixed_dictionaries(
    {
        "rewards": st.builds(
            Rewards,
            final=st.none() | finite,
            by_completion=st.dictionaries(text, finite, max_size=2),
            parts=st.dictionaries(text, finite, max_size=2),
        ),
        "status": st.sampled_from([status for status in Status if status is not Status.ORPHAN]),
        "error": st.none() | text,
        "logged": json_objects,
        "undelivered": st.lists(text, max_size=3).map(tuple),
        "ended_s": finite,
    }
)


def with_own_ids(turn: Turn, number: int) -> Turn:
    """Return the same turn with ids that are unique in the ledger."""
    answers = tuple(replace(one, id=f"{number}-{place}-{one.id}") for place, one in enumerate(turn.completions))
    return replace(turn, id=f"{number}-{turn.id}", completions=answers)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Ledger]]:
    """A ledger for all examples, and what runs its calls."""
    path = tmp_path_factory.mktemp("opened") / "ledger.sqlite"
    with asyncio.Runner() as runner:
        ledger = runner.run(Ledger.open(path, create=True))
        yield runner, ledger
        runner.run(ledger.aclose())
    assert verify(path).of(Invariant.ENDED) == ()


NUMBERS = itertools.count()
MAKE = Make()


@given(recorded=st.lists(turns, max_size=3), ending=endings)
def test_any_trajectory_comes_back_equal(
    opened: tuple[asyncio.Runner, Ledger], recorded: list[Turn], ending: dict
) -> None:
    runner, ledger = opened
    session_id = f"s{next(NUMBERS)}"
    recorded = [with_own_ids(turn, next(NUMBERS)) for turn in recorded]
    expected = MAKE.ending(session_id, turns=tuple(recorded), **ending)

    async def come_back() -> Trajectory:
        await ledger.own.open_session(MAKE.session(session_id))
        await asyncio.gather(*(ledger.own.append_turn(session_id, turn) for turn in recorded))
        await ledger.own.close_session(MAKE.ending(session_id, **ending))
        return await ledger.trajectory(session_id)

    kept = runner.run(come_back())
    assert kept == expected
    assert lease_digest(kept, 3) == lease_digest(expected, 3)


async def test_a_logprob_comes_back_as_the_float32_it_was(ledger: Ledger, make) -> None:
    logprob = -0.1  # not a float32 itself
    completion = replace(make.completion("c", num_tokens=1), logprobs=(logprob,))
    await ledger.own.open_session(make.session("s"))
    await ledger.own.append_turn("s", make.turn("s", completions=(completion,)))
    await ledger.own.close_session(make.ending("s"))
    [turn] = (await ledger.trajectory("s")).turns
    assert turn.completions[0].logprobs == struct.unpack("<f", struct.pack("<f", logprob))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_delta": ({"content": object()},)}, "the messages cannot be written as JSON"),
        ({"new_prompt_ids": (2**31,)}, "token ids must fit int32, and 2147483648 does not"),
    ],
)
async def test_what_cannot_be_written_is_refused_by_name(ledger: Ledger, make, changes: dict, message: str) -> None:
    await ledger.own.open_session(make.session("s"))
    with pytest.raises(LedgerError, match=message):
        await ledger.own.append_turn("s", make.turn("s", **changes))


def size_of(path: Path) -> int:
    return path.stat().st_size


async def test_a_turn_costs_its_new_tokens_not_its_history(ledger: Ledger, path: Path, make) -> None:
    await ledger.own.open_session(make.session("s"))
    for number in range(400):
        await ledger.own.append_turn("s", make.turn("s", number))  # number 400 has a history of 2,800 tokens
    await ledger.aclose()
    assert size_of(path) < 400 * 1000
