"""What a version label is worth in the lineage that lives.

1. a label of the living incarnation is its step; of one before, at most the step at which a later one began; of any
other, older than every bound; 2. whatever the restarts, no token is ever fresher than the weights that serve, and a
token's age does not fall when its run is resumed; 3. a relabelled trajectory keeps its tokens and their spans.
"""

from hypothesis import given
from hypothesis import strategies as st

from areal_agent.ancestry import FOREIGN, Ancestry
from areal_agent.ledger.digest import token_digest
from areal_agent.staleness import is_stale
from areal_agent.types import (
    Completion,
    Distribution,
    FinishReason,
    Rewards,
    SamplingParams,
    Status,
    Trajectory,
    Turn,
    VersionSpan,
    WeightVersion,
)

RESUMED = Ancestry(forks=((0, 0), (3, 5), (4, 9)))


def step_of(text: str) -> int:
    return RESUMED.step_of(WeightVersion.parse(text))


def test_a_label_counts_as_far_as_its_history_is_shared() -> None:
    assert [step_of(text) for text in ("0:4", "0:7", "3:5", "3:12", "4:9", "4:20")] == [4, 5, 5, 9, 9, 20]


def test_weights_of_another_run_are_older_than_any_bound() -> None:
    assert step_of("1:4") == step_of("9:0") == FOREIGN
    assert is_stale(FOREIGN, step=1, max_staleness=2**29)


def test_without_incarnations_a_label_is_taken_at_its_word() -> None:
    assert Ancestry().step_of(WeightVersion.parse("7:3")) == 3


def test_an_incarnation_begins_once() -> None:
    assert Ancestry().forked(2, 5).forked(2, 7) == Ancestry(forks=((2, 5),))


@given(lives=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8), data=st.data())
def test_no_token_is_fresher_than_the_weights_that_serve(lives: list[tuple[int, int]], data: st.DataObject) -> None:
    """Each life goes on from a checkpoint that is so many steps back, and makes so many steps."""
    ancestry, step = Ancestry(), 0
    labels: dict[WeightVersion, int] = {}  # and what they were worth last
    for incarnation, (back, forward) in enumerate(lives):
        step = max(0, step - back)
        ancestry = ancestry.forked(incarnation, step)
        for version, before in labels.items():
            assert ancestry.step_of(version) <= before
        for one in range(step, step + forward + 1):
            labels[WeightVersion(incarnation=incarnation, step=one)] = one
        step = data.draw(st.integers(step, step + forward))
        labels = {version: ancestry.step_of(version) for version in labels}
    served = max(one.step for one in labels if one.incarnation == len(lives) - 1)
    assert all(worth <= served for worth in labels.values())


def test_a_relabelled_trajectory_keeps_its_tokens() -> None:
    spans = (
        VersionSpan(version=WeightVersion(step=4), start=0, end=1),
        VersionSpan(version=WeightVersion(step=7), start=1, end=3),
    )
    completion = Completion(
        id="c",
        token_ids=(1, 2, 3),
        logprobs=(-1.0, -2.0, -3.0),
        versions=spans,
        finish_reason=FinishReason.STOP,
        distribution=Distribution.EXACT,
    )
    turn = Turn(
        id="t",
        parent=None,
        fork_at=0,
        new_prompt_ids=(9,),
        completions=(completion,),
        request_delta=(),
        sampling=SamplingParams(),
        started_s=0.0,
        ended_s=1.0,
    )
    trajectory = Trajectory(
        session_id="s",
        group_id="g",
        task_id="t",
        turns=(turn,),
        rewards=Rewards(final=1.0),
        status=Status.COMPLETED,
        error=None,
        logged={},
        started_s=0.0,
        ended_s=1.0,
    )
    seen = RESUMED.relabelled(trajectory)
    assert seen.turns[0].completions[0].version_steps() == (4, 5, 5)
    assert token_digest(seen) == token_digest(trajectory)
