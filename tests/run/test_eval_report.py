"""What an evaluation found: 1. a rollout that failed counts as no success, and in no mean; 2. each answer has the
weight versions that sampled it, and the row counts answers by the oldest of them.
"""

from dataclasses import replace

import pytest

from areal_agent import Status
from areal_agent.run.serving import EvalAnswer, EvalReport
from tests.observe.batches import trajectory


def test_a_failed_rollout_is_no_success_and_in_no_mean() -> None:
    failed = replace(trajectory("c", [1], 1.0), status=Status.TIMEOUT)
    answers = [EvalAnswer.of(one) for one in (trajectory("a", [1], 1.0), trajectory("b", [1], 0.5), failed)]
    report = EvalReport.of(answers, success_reward=1.0)
    assert (report.success, report.reward_mean) == (pytest.approx(1 / 3), 0.75)
    assert (report.num_tasks, report.num_failed) == (3, 1)


def test_answers_are_counted_by_their_weights() -> None:
    answers = [EvalAnswer.of(trajectory(str(versions), versions, 1.0)) for versions in ([4, 4], [4, 5, 5], [6], [])]
    assert [answer.steps for answer in answers] == [(4,), (4, 5), (6,), ()]
    metrics = EvalReport.of(answers, success_reward=1.0).metrics()
    assert (metrics["eval/answers_at/4"], metrics["eval/answers_at/6"], metrics["eval/spanning"]) == (2, 1, 1)
    assert metrics["eval/tokens"] == 6
