"""The invariants that one session can break by itself. Pure functions over records; no SQL."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from areal_agent.ledger.invariants import Invariant, Violation
from areal_agent.types import Completion, Trajectory, Turn

LOGPROB_SLACK = 1e-4
"""A probability of 1 may come out a little above it in float32."""

CLOCK_SLACK_S = 1.0
"""The wall clock may be set back a little during a run; what is out of order by more is."""


def check_turns(turns: Sequence[Turn]) -> Iterator[Violation]:
    """All that the turns of a session, in the order of recording, can break."""
    yield from _check_lineage(turns)
    yield from _check_times(turns)
    for turn in turns:
        for completion in turn.completions:
            yield from check_completion(completion)


def check_delivery(trajectory: Trajectory) -> Iterator[Violation]:
    """What never reached the agent was sampled in its session."""
    sampled = {completion.id for turn in trajectory.turns for completion in turn.completions}
    for completion_id in trajectory.undelivered:
        if completion_id not in sampled:
            detail = f"it never delivered {completion_id!r}, which no turn of it has"
            yield Violation(invariant=Invariant.DELIVERY, subject=f"session {trajectory.session_id!r}", detail=detail)


def check_completion(completion: Completion) -> Iterator[Violation]:
    subject = f"completion {completion.id!r}"
    num_ids, num_logprobs = len(completion.token_ids), len(completion.logprobs)
    if num_ids != num_logprobs:
        detail = f"{num_ids} token ids, {num_logprobs} log-probabilities"
        yield Violation(invariant=Invariant.LENGTHS, subject=subject, detail=detail)
    for position, logprob in enumerate(completion.logprobs):
        if not (math.isfinite(logprob) and logprob <= LOGPROB_SLACK):
            detail = f"the log-probability at {position} is {logprob}"
            yield Violation(invariant=Invariant.LOGPROBS, subject=subject, detail=detail)
            break
    detail = _fault_of_spans(completion)
    if detail:
        yield Violation(invariant=Invariant.SPANS, subject=subject, detail=detail)


def _fault_of_spans(completion: Completion) -> str | None:
    end = 0
    for span in completion.versions:
        if span.start != end or span.end < span.start:
            return f"a span is [{span.start}, {span.end}) where the one before ends at {end}"
        end = span.end
    if end != len(completion.token_ids):
        return f"spans end at {end} of {len(completion.token_ids)} tokens"
    versions = [span.version for span in completion.versions]
    for earlier, later in pairwise(versions):
        if later < earlier:
            return f"version {later} follows {earlier}"
    return None


def _check_lineage(turns: Sequence[Turn]) -> Iterator[Violation]:
    path_lengths: dict[str, int] = {}  # by completion: prompt and answer
    for turn in turns:
        detail = _fault_of_parent(turn, path_lengths)
        if detail:
            yield Violation(invariant=Invariant.LINEAGE, subject=f"turn {turn.id!r}", detail=detail)
        prompt_length = turn.fork_at + len(turn.new_prompt_ids)
        path_lengths |= {one.id: prompt_length + len(one.token_ids) for one in turn.completions}


def _fault_of_parent(turn: Turn, path_lengths: dict[str, int]) -> str | None:
    if turn.parent is not None and turn.parent not in path_lengths:
        return f"it continues {turn.parent!r}, which no earlier turn of its session has"
    room = 0 if turn.parent is None else path_lengths[turn.parent]
    if not 0 <= turn.fork_at <= room:
        return f"it keeps {turn.fork_at} tokens of a path of {room}"
    return None


def _check_times(turns: Sequence[Turn]) -> Iterator[Violation]:
    ended_s: dict[str, float] = {}  # by completion
    for turn in turns:
        parent_s = -math.inf if turn.parent is None else ended_s.get(turn.parent, -math.inf)
        for what, earlier_s, later_s in (
            ("it ended before it started", turn.started_s, turn.ended_s),
            ("it started before the answer that it continues", parent_s, turn.started_s),
        ):
            if later_s < earlier_s - CLOCK_SLACK_S:
                detail = f"{what}, by {earlier_s - later_s:.1f} s"
                yield Violation(invariant=Invariant.TIMES, subject=f"turn {turn.id!r}", detail=detail)
        ended_s |= {one.id: turn.ended_s for one in turn.completions}
