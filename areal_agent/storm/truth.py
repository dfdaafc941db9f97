"""What really happened in a story, beside what the ledger says of it; and the promises that the two are held against.

The truth is told by the simulated programs at the moment at which something happens to them: an answer reaches the
agent, weights begin to serve under a version, a step is trained.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from areal_agent.ledger import questions
from areal_agent.ledger.files import LedgerFiles
from areal_agent.ledger.verify import verify
from areal_agent.trainer.wire import StepInput
from areal_agent.types import Trajectory, WeightVersion

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def digest_of(lineage: Sequence[str]) -> str:
    """Return the name of the weights that were trained on these sessions, in this order."""
    return hashlib.sha256("\n".join(lineage).encode()).hexdigest()[:16]


def letter_of(weights: str) -> str:
    """Return the letter that these weights sample."""
    return LETTERS[int(weights, 16) % len(LETTERS)]


@dataclass(kw_only=True, slots=True)
class Truth:
    """What happened so far. `faults` are broken promises that were seen as they broke."""

    max_staleness: int
    answers: set[str] = field(default_factory=set[str])  # ids of completions that reached an agent
    trained: dict[str, set[str]] = field(default_factory=dict[str, set[str]])  # by session: a loss's tokens in a turn
    weights: dict[WeightVersion, str] = field(default_factory=dict[WeightVersion, str])
    faults: list[str] = field(default_factory=list[str])

    def answered(self, completion_id: str) -> None:
        """An agent has got this answer."""
        self.answers.add(completion_id)

    def serves(self, version: WeightVersion, weights: str) -> None:
        """An engine has these weights under this version.

        0:0 is also the label of an engine that is ahead and about to be brought back, which nobody may ask.
        """
        if self.weights.setdefault(version, weights) != weights and version != WeightVersion():
            self.faults.append(f"version {version} names two sets of weights: {self.weights[version]} and {weights}")

    def trains(self, given: StepInput) -> None:
        """A trainer makes this step."""
        records = Counter((one.session_id, one.token_ids.tobytes(), one.loss_mask.tobytes()) for one in given.records)
        if twice := sorted({session_id for (session_id, *_), number in records.items() if number > 1}):
            self.faults.append(f"step {given.step} trains a record twice: {', '.join(twice)}")
        for record in given.records:
            for turn in set(record.turn_index[record.loss_mask].tolist()):
                sampled = record.token_ids[record.loss_mask & (record.turn_index == turn)]
                self.trained.setdefault(record.session_id, set()).add("".join(map(chr, sampled.tolist())))
            if record.loss_mask.any():
                oldest = int(record.versions[record.loss_mask].min())
                if given.step - 1 - oldest > self.max_staleness:
                    self.faults.append(
                        f"step {given.step} trains a token of version {oldest} in {record.session_id}: "
                        f"max_staleness is {self.max_staleness}"
                    )


def broken_promises(truth: Truth, ledger: Path, lineage: Sequence[str], letters: Mapping[str, int]) -> list[str]:
    """Return what the ledger of a finished run says that is not so. `lineage` is what its last weights know."""
    faults = [f"{one.invariant}: {one}" for one in verify(ledger).violations]
    files = LedgerFiles(ledger)
    try:
        with files.snapshot() as snapshot:
            ids = questions.session_ids(snapshot, limit=2**31)
            ended = {one: questions.recorded(snapshot, one)[1] for one in ids}
    finally:
        files.close()
    faults += [f"session {one} is still open" for one, session in ended.items() if session is None]
    sessions = [session for session in ended.values() if session is not None]
    return faults + list(_of_sessions(truth, sessions, lineage, letters))


def _of_sessions(
    truth: Truth, sessions: Sequence[Trajectory], lineage: Sequence[str], letters: Mapping[str, int]
) -> Sequence[str]:
    faults: list[str] = []
    completions = {one.id: one for session in sessions for turn in session.turns for one in turn.completions}
    faults += [
        f"the answer {one} reached its agent and is not in the ledger" for one in truth.answers - set(completions)
    ]
    for one in completions.values():
        for span in one.versions:
            weights = truth.weights.get(span.version)
            sampled = set(one.token_ids[span.start : span.end]) & set(letters.values())
            if span.end > span.start and weights is None:
                faults.append(f"{one.id} has tokens of version {span.version}, which no engine has served")
            elif weights is not None and sampled - {letters[letter_of(weights)]}:
                faults.append(f"{one.id} has tokens of other weights under version {span.version}")
    for session in sessions:
        answers = ("".join(map(chr, one.token_ids)) for turn in session.turns for one in turn.completions)
        whole = "\uffff".join(answers)  # no token has this number
        if any(text not in whole for text in truth.trained.get(session.session_id, ())):
            faults.append(f"{session.session_id} was trained on tokens that are in none of its answers")
    trained = {one.session_id for one in sessions if one.fate is not None and one.fate.trained_step is not None}
    if twice := sorted({one for one in lineage if lineage.count(one) > 1}):
        faults.append(f"the last weights were trained twice on {', '.join(twice)}")
    if differing := sorted(trained ^ set(lineage)):
        faults.append(f"the ledger and the last weights differ in what was trained: {', '.join(differing)}")
    return faults
