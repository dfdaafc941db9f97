"""Admission is AReaL's Eq. 3 in answers: 1. the bound never breaks, whatever happens; 2. max_staleness 0 admits one
batch a version; 3. a group that failed as a whole, or was dropped, gives its capacity back; 4. a resume gives no
burst."""

from hypothesis import given
from hypothesis import strategies as st

from areal_agent.staleness import Admission


@given(
    batch_groups=st.integers(1, 4),
    group_size=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    events=st.lists(st.sampled_from(["start", "finish", "fail", "drop", "train"]), max_size=200),
)
def test_the_papers_bound_holds(batch_groups: int, group_size: int, max_staleness: int, events: list[str]) -> None:
    batch = batch_groups * group_size
    admission = Admission(batch_answers=batch, max_staleness=max_staleness)
    for event in events:
        if event == "start" and admission.may_admit(group_size):
            admission.start(group_size)
        elif event == "finish" and admission.running:
            admission.finish(group_size)
        elif event == "fail" and admission.running:
            admission.give_back_running(group_size)
        elif event == "drop" and admission.finished:
            admission.give_back_finished(group_size)
        elif event == "train" and admission.finished >= batch:
            for _ in range(batch_groups):
                admission.consume(group_size)
            admission.step += 1
        num_admitted = admission.running + admission.finished + admission.consumed
        assert (num_admitted - 1) // batch <= admission.step + max_staleness  # Eq. 3


def test_synchronous_mode_admits_one_batch_a_version() -> None:
    admission = Admission(batch_answers=8, max_staleness=0)
    admission.start(8)
    assert not admission.may_admit(1)
    admission.finish(8)
    admission.consume(8)
    assert not admission.may_admit(1), "trained, but not published yet"
    admission.step = 1
    assert admission.capacity == 8


def test_a_failed_group_gives_its_capacity_back() -> None:
    admission = Admission(batch_answers=4, max_staleness=0)
    admission.start(4)
    admission.give_back_running(4)
    assert admission.may_admit(4)


def test_a_resume_gives_no_burst() -> None:
    admission = Admission(batch_answers=4, max_staleness=1, step=10, consumed=40)
    assert admission.capacity == 8
