"""A rollout for the page, without a browser: 1. a turn that goes on from another than the newest answer says from
which, and only a branch is called one; 2. the tokens that were too old for the loss are those of the oldest weights,
and with `truncated: mask` the answers of a branch that was cut off are not in it; 3. the siblings that are named are
those around it; 4. an export grows with its turns, not with their square.
"""

from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_agent.ledger import pages
from areal_agent.ledger.encoding import Lease
from areal_agent.ledger.files import reading
from areal_agent.ledger.ledger import Ledger
from areal_agent.tokens.transcript import Transcript, TranscriptSettings
from areal_agent.types import FinishReason, ForkReason, SessionPurpose, Turn
from areal_agent.view.export import export
from areal_agent.view.server import PAGE
from areal_agent.view.session import places_of
from areal_agent.view.trajectory import RecordedRollout
from tests.histories import completion, open_ledger, session, trajectory, turn

UNREAD = Transcript(TranscriptSettings(tokenizer=""))


async def record(ledger: Ledger, name: str, *turns: Turn, **changes: Any) -> None:
    await ledger.own.open_session(session(name, **changes))
    for one in turns:
        await ledger.own.append_turn(name, one)
    await ledger.own.close_session(trajectory(name, (), 1.0))


def read(folder: Path, name: str, transcript: Transcript = UNREAD) -> RecordedRollout:
    with reading(folder / "ledger.sqlite") as snapshot:
        return RecordedRollout.read(snapshot, transcript, folder, name)


def renamed(one: Turn, prefix: str) -> Turn:
    """Return the turn with other names: those of answers are unique in a ledger."""
    answers = tuple(replace(answer, id=f"{prefix}/{answer.id}") for answer in one.completions)
    return replace(one, completions=answers, parent=one.parent and f"{prefix}/{one.parent}")


def test_where_a_turn_goes_on() -> None:
    one = turn("1", completion("1a", [0]), completion("1b", [0]))
    agent = turn("2", completion("2a", [0]), fork_reason=ForkReason.NEW_CONVERSATION)
    turns = [
        one,
        agent,
        turn("3", completion("3a", [0]), parent="1b"),
        turn("4", completion("4a", [0]), parent="2a"),
        turn("5", completion("5a", [0]), parent="4a"),
        turn("6", completion("6a", [0]), parent="4a", fork_at=9, fork_reason=ForkReason.EDITED),
    ]
    assert places_of(turns) == [
        "",
        "branch: new_conversation",
        "continues answer 2 of turn 1",
        "continues turn 2",
        "",
        "branch: edited; it keeps 9 tokens up to turn 4",
    ]


async def test_tokens_of_the_oldest_weights_were_too_old(tmp_path: Path) -> None:
    first, second = turn("1", completion("1a", [0, 0, 1])), turn("2", completion("2a", [1, 3]), parent="1a", fork_at=5)
    last = turn("3", completion("3a", [3, 4]), parent="2a", fork_at=9)
    async with open_ledger(tmp_path) as ledger:
        await record(ledger, "s", first, second, last)
        await ledger.lease(5, [Lease.of(await ledger.trajectory("s"), 3)])
    rollout = read(tmp_path, "s")
    told = [answer["loss"] for one in rollout.describe()["turns"] for answer in one["answers"]]
    assert told == ["not in the loss: too old", "in the loss but for 1 too old", "in the loss"]
    assert rollout.tokens("2")["answers"][0]["num_too_old"] == 1


async def test_answers_of_a_branch_that_was_cut_off_are_not_in_the_loss(tmp_path: Path) -> None:
    first, second = turn("1", completion("1a", [0, 0])), turn("2", completion("2a", [0, 0]), parent="1a", fork_at=4)
    cut = completion("3a", [0, 0], finish_reason=FinishReason.LENGTH)
    edited = turn("3", cut, parent="1a", fork_at=4, fork_reason=ForkReason.EDITED)
    for turns, loss in (
        ((first, second, edited), ["cut_off", "in the loss", "cut_off"]),  # the newest branch has the first answer
        ((first, edited, second), ["in the loss", "cut_off", "in the loss"]),
    ):
        name = turns[1].id
        async with open_ledger(tmp_path) as ledger:
            await record(ledger, name, *(renamed(one, name) for one in turns))
            await ledger.lease(5, [Lease.of(await ledger.trajectory(name), 6)])
        masking = Transcript(TranscriptSettings(tokenizer="", masks_truncated=True))
        described = read(tmp_path, name, masking).describe()["turns"]
        told = [answer["loss"].removeprefix("not in the loss: ") for one in described for answer in one["answers"]]
        assert told == loss


async def test_siblings_are_those_of_its_task_around_it(tmp_path: Path) -> None:
    async with aclosing(await Ledger.open(tmp_path / "ledger.sqlite", create=True)) as ledger:
        await ledger.begin_incarnation(0)
        for number in range(150):
            await ledger.own.open_session(session(f"e-{number:03}", purpose=SessionPurpose.EVAL))
        await ledger.own.open_session(session("e-100-other", task_id="1", purpose=SessionPurpose.EVAL))
    described = read(tmp_path, "e-100").describe()
    names = [one["session_id"] for one in described["siblings"]]
    assert (len(names), names[0], names[-1], described["num_siblings"]) == (64, "e-068", "e-131", 150)
    with reading(tmp_path / "ledger.sqlite") as snapshot:
        [newest] = pages.page(snapshot, {}, (), 1).rollouts
    assert newest.siblings == {"e-100-other": None}


async def test_an_export_grows_with_its_turns(tmp_path: Path) -> None:
    async with open_ledger(tmp_path) as ledger:
        for size in (100, 1000):
            turns = [turn(f"{size}-{at}", completion(f"{size}-{at}a", [0]), parent=f"{size}-{at - 1}a" if at else None,
                          fork_at=3 * at, request_delta=({"role": "user", "content": "Go on."},))
                     for at in range(size)]  # fmt: skip
            await record(ledger, f"s{size}", *turns)
    page = {path.name: path.read_bytes() for path in PAGE.iterdir()}
    small, large = (len(export(read(tmp_path, f"s{size}"), page)) for size in (100, 1000))
    assert large < 11 * small
