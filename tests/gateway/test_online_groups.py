"""The groups that a trainer will consume, and the staleness bound at admission.

1. Never more answers are under way than the bound admits. 2. A full group accepts no more siblings, and its size cannot
change. 3. A group waits a limited time for what is missing. 4. A session that could not be opened leaves nothing
behind. 5. A group read from the ledger keeps its size. 6. It is known when only a lease can change anything. 7. A batch
counts as at least B answers, and as more until its version serves. 8. A label of another trainer's weights is older
than every bound; if the trainer names no incarnation, all labels are its own. The rest is shown by test_online.py.
"""

from dataclasses import asdict

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from areal_agent.errors import RequestError
from areal_agent.gateway.online.groups import FOREIGN, Bound, Groups, Labels, Progress, Waiting
from areal_agent.staleness import is_stale
from areal_agent.types import WeightVersion

WAIT_S = 60.0


def make_groups(batch_answers: int = 4, max_staleness: int = 0, published: int = 0) -> Groups:
    bound = Bound(batch_answers=batch_answers, max_staleness=max_staleness)
    return Groups(wait_s=WAIT_S, bound=bound, progress=Progress(published=published, leased=published))


def waiting(session_id: str, oldest: int = 0, has_reward: bool = True) -> Waiting:
    versions = frozenset({WeightVersion(step=oldest)})
    return Waiting(session_id=session_id, versions=versions, has_reward=has_reward)


def finish(groups: Groups, *session_ids: str, group_id: str, oldest: int = 0) -> None:
    """Start the sessions of a whole group, and end them."""
    for session_id in session_ids:
        groups.start(session_id, group_id, len(session_ids), 0.0)
    for session_id in session_ids:
        groups.end(session_id, waiting(session_id, oldest), 0.0)


def ready_ids(groups: Groups, now_s: float = 0.0) -> list[str]:
    return [group.id for group in groups.ready(now_s)]


def test_a_session_that_waits_keeps_its_name() -> None:
    groups = make_groups()
    finish(groups, "s", group_id="a")
    with pytest.raises(RequestError, match="exists already"):
        groups.start("s", "b", 1, 0.0)
    assert ready_ids(groups) == ["a"]


@given(
    st.integers(1, 6),
    st.integers(0, 2),
    st.lists(st.tuples(st.sampled_from(["start", "end", "fail", "train", "drop"]), st.integers(1, 4)), max_size=120),
)
def test_the_bound_holds_whatever_happens(
    batch_answers: int, max_staleness: int, events: list[tuple[str, int]]
) -> None:
    groups = make_groups(batch_answers, max_staleness)
    running: list[str] = []
    num_consumed = 0
    for number, (event, size) in enumerate(events):
        group_id = f"g{number}"
        if event == "start":
            names = [f"{group_id}-{index}" for index in range(size)]
            try:
                for name in names:
                    groups.start(name, group_id, size, 0.0)
            except RequestError:
                continue
            running += names
        elif event in ("end", "fail") and running:
            name = running.pop(0)
            groups.end(name, waiting(name) if event == "end" else None, 0.0)
        elif event == "train" and groups.ready(0.0):
            taken = groups.ready(0.0)[0]
            num_consumed += 1
            groups.progress = Progress(published=num_consumed - 1, leased=num_consumed)
            groups.lease(tuple(taken.waiting))
            groups.progress = Progress(published=num_consumed, leased=num_consumed)
        elif event == "drop" and groups.ready(0.0):
            groups.give_up(tuple(groups.ready(0.0)[0].waiting), 0.0)
        under_way = groups.num_running + groups.num_finished
        step = groups.progress.published
        assert under_way <= (max_staleness + step + 1) * batch_answers - num_consumed * batch_answers
        assert len(running) <= groups.num_running


def test_a_full_group_takes_no_sibling_and_its_size_is_said_once() -> None:
    groups = make_groups(batch_answers=8)
    groups.start("a-0", "a", 2, 0.0)
    with pytest.raises(RequestError, match="was started with 2") as refused:
        groups.start("a-1", "a", 3, 0.0)
    assert refused.value.status == 400
    groups.start("a-1", "a", 2, 0.0)
    with pytest.raises(RequestError, match=r"has its 2 session\(s\) already") as refused:
        groups.start("a-2", "a", 2, 0.0)
    assert refused.value.status == 409
    assert groups.num_running == 2


def test_what_is_missing_is_waited_for_so_long() -> None:
    groups = make_groups(batch_answers=8)
    groups.start("a-0", "a", 2, 0.0)  # its sibling never starts
    groups.end("a-0", waiting("a-0"), 10.0)
    groups.start("b-0", "b", 1, 20.0)  # its reward never comes
    groups.end("b-0", waiting("b-0", has_reward=False), 20.0)
    assert groups.next_expiry_s(20.0) == 10.0 + WAIT_S
    assert ready_ids(groups, 69.0) == []
    assert ready_ids(groups, 70.0) == ["a"]
    assert groups.unrewarded(79.0) == ()
    assert groups.unrewarded(80.0) == ("b-0",)


@pytest.mark.parametrize("bound", [None, Bound(batch_answers=2, max_staleness=0)])
def test_what_was_awaited_in_vain_is_in_nobodys_way(bound: Bound | None) -> None:
    groups = Groups(wait_s=WAIT_S, bound=bound)
    groups.start("a-0", "a", 2, 0.0)  # its sibling never starts
    groups.end("a-0", None, 0.0)
    groups.start("b-0", "b", 2, WAIT_S)  # there is room again
    groups.withdraw("b-0")
    groups.start("a-1", "a", 1, WAIT_S)  # the same group anew, of another size
    assert (groups.num_running, groups.num_finished) == (1, 0)


def test_a_session_that_could_not_be_opened_leaves_nothing_behind() -> None:
    groups = make_groups()
    groups.start("a-0", "a", 2, 0.0)
    groups.start("a-1", "a", 2, 0.0)
    groups.withdraw("a-1")
    groups.start("a-1", "a", 2, 0.0)
    groups.withdraw("a-1")
    groups.withdraw("a-0")
    assert groups.capacity == 4


def restore(groups: Groups, *ended: str, size: int) -> None:
    """Restore a group `a` from the ledger; of its ended sessions, all but the first wait."""
    groups.restore("a", size=size, ended=ended, waiting=[waiting(name) for name in ended[1:]], now_s=0.0)


def test_a_group_from_the_ledger_goes_on_as_large_as_it_was() -> None:
    groups = make_groups(batch_answers=8)
    for _ in range(2):  # what is known already stays as it is
        restore(groups, "a-0", "a-1", "a-2", size=4)
    assert (ready_ids(groups), groups.num_running) == ([], 4)
    with pytest.raises(RequestError, match="was started with 4"):
        groups.start("a-3", "a", 5, 0.0)
    groups.start("a-3", "a", 4, 0.0)
    groups.end("a-3", waiting("a-3"), 0.0)
    assert (ready_ids(groups), groups.num_finished) == (["a"], 4)


def test_what_is_leased_and_restored_waits_again_beside_a_sibling_that_runs() -> None:
    groups = make_groups(batch_answers=8)
    for name in ("a-0", "a-1"):
        groups.start(name, "a", 3, 0.0)
    groups.end("a-0", waiting("a-0"), 0.0)
    groups.lease(["a-0"])
    groups.restore("a", size=3, ended=["a-0"], waiting=[waiting("a-0")], now_s=0.0)
    groups.end("a-1", waiting("a-1"), 0.0)
    assert [list(group.waiting) for group in groups.ready(WAIT_S)] == [["a-0", "a-1"]]


def test_only_a_lease_can_go_on_when_no_group_fits_beside_those_that_wait() -> None:
    groups = make_groups(batch_answers=8)
    finish(groups, *(f"a-{number}" for number in range(5)), group_id="a")
    assert groups.is_stuck(0.0)  # room for 3: not for a group like that
    groups.start("b-0", "b", 2, 0.0)
    assert not groups.is_stuck(0.0)
    groups.end("b-0", waiting("b-0"), 0.0)
    assert not groups.is_stuck(0.0)  # its sibling may yet come
    assert groups.is_stuck(WAIT_S)


def test_a_group_that_was_kept_out_is_one_that_does_not_fit() -> None:
    groups = make_groups(batch_answers=8)
    finish(groups, "a-0", group_id="a")
    assert not groups.is_stuck(0.0)
    with pytest.raises(RequestError, match="room for 7 of the 8"):
        groups.start("b-0", "b", 8, 0.0)
    assert groups.is_stuck(0.0)
    finish(groups, "c-0", group_id="c")
    assert not groups.is_stuck(0.0)  # others come in


def test_a_group_that_can_never_fit_keeps_nobody_waiting() -> None:
    groups = make_groups(batch_answers=8)
    finish(groups, "a-0", group_id="a")
    with pytest.raises(RequestError, match="never admits more than 8 answers") as refused:
        groups.start("b-0", "b", 9, 0.0)
    assert (refused.value.status, refused.value.param) == (400, "group_size")
    assert not groups.is_stuck(0.0)


def test_a_batch_counts_as_b_answers() -> None:
    groups = make_groups(batch_answers=4, max_staleness=1)
    finish(groups, "a-0", group_id="a")
    groups.progress = Progress(published=0, leased=1)
    groups.lease(["a-0"])
    assert groups.capacity == 4
    groups.progress = Progress(published=1, leased=1)
    assert groups.capacity == 8


def test_what_a_batch_had_beyond_b_counts_until_its_version_serves() -> None:
    bound = Bound(batch_answers=4, max_staleness=1)
    groups = make_groups(batch_answers=4, max_staleness=1)
    finish(groups, *(f"a-{number}" for number in range(8)), group_id="a")
    groups.progress = groups.progress.to_batch(1, 8, bound)
    groups.lease([f"a-{number}" for number in range(8)])
    assert groups.capacity == 0  # eight were let in beside version 0
    noted = orjson.loads(orjson.dumps(asdict(groups.progress)))
    assert TypeAdapter(Progress).validate_python(noted) == groups.progress
    groups.progress = groups.progress.to_version(1)
    assert (groups.capacity, groups.progress) == (8, Progress(published=1, leased=1))


def test_a_label_is_another_trainers_unless_it_names_an_incarnation_of_this_one() -> None:
    own = Labels().naming(0).naming(3).naming(0)
    assert own == Labels(incarnations=(0, 3))
    assert [own.step_of(WeightVersion.parse(text)) for text in ("0:9", "3:5", "1:9")] == [9, 5, FOREIGN]
    assert is_stale(FOREIGN, step=1, max_staleness=2**29)
    assert Labels().step_of(WeightVersion.parse("7:3")) == 3
