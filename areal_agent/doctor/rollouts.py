"""Two answers as a group that the trainer takes: one rewarded, one not, so that there is something to learn."""

from collections.abc import Sequence

from areal_agent.engine_types import GenerateRequest, GenerateResult
from areal_agent.tokens.records import token_records
from areal_agent.types import Completion, Rewards, RolloutBatch, Status, Trajectory, TrajectoryGroup, Turn

GROUP = "doctor"


def batch_of(requests: Sequence[GenerateRequest], results: Sequence[GenerateResult]) -> RolloutBatch:
    """The batch of train step 1; the first answer earned 1, the others 0."""
    trajectories = tuple(
        _trajectory(number, request, result)
        for number, (request, result) in enumerate(zip(requests, results, strict=True))
    )
    group = TrajectoryGroup(group_id=GROUP, task_id=GROUP, trajectories=trajectories)
    records = tuple(record for one in trajectories for record in token_records(one))
    return RolloutBatch(step=1, groups=(group,), records=records)


def _trajectory(number: int, request: GenerateRequest, result: GenerateResult) -> Trajectory:
    completion = Completion(
        id=request.request_id,
        token_ids=result.token_ids,
        logprobs=result.logprobs,
        versions=result.versions,
        finish_reason=result.finish_reason,
        distribution=request.sampling.distribution,
    )
    turn = Turn(
        id=request.request_id,
        parent=None,
        fork_at=0,
        new_prompt_ids=tuple(request.input_ids),
        completions=(completion,),
        request_delta=(),
        sampling=request.sampling,
        started_s=0.0,
        ended_s=0.0,
    )
    return Trajectory(
        session_id=request.request_id,
        group_id=GROUP,
        task_id=GROUP,
        turns=(turn,),
        rewards=Rewards(final=1.0 if number == 0 else 0.0),
        status=Status.COMPLETED,
        error=None,
        logged={},
        started_s=0.0,
        ended_s=0.0,
    )
