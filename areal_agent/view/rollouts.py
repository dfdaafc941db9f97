"""Groups of a run with their siblings: how each ended, what it earned, and what became of it."""

from collections.abc import Sequence

from areal_agent.ledger import questions
from areal_agent.ledger.files import Snapshot
from areal_agent.ledger.questions import STATUS_NOTE, GroupFilter, RolloutSummary
from areal_agent.types import SessionPurpose, Status
from areal_agent.view.terminal import Screen

MAX_SIBLINGS = 32
"""Siblings shown of a group that is one of several; a group of an evaluation has one for every task."""
STATUS_WORDS = {"running": "running, or ended without a word"}


def show_counts(screen: Screen, snapshot: Snapshot, name: str) -> None:
    """Print how the run ended and what became of its rollouts."""
    counts, status = questions.counts(snapshot), str(questions.note(snapshot, STATUS_NOTE) or "not begun")
    drops = ", ".join(f"{number:,} {reason}" for reason, number in sorted(counts.drops.items()))
    screen.line((name, "bold"), f": {STATUS_WORDS.get(status, status)}")
    screen.line(
        f"{counts.num_trained:,} rollouts trained, {counts.num_dropped:,} dropped{f' ({drops})' if drops else ''}, "
        f"{counts.num_leased:,} leased, {counts.num_waiting:,} waiting, {counts.num_open:,} open; "
        f"{counts.num_eval:,} for evaluation"
    )


def show_groups(
    screen: Screen, snapshot: Snapshot, wanted: GroupFilter, *, lowest_first: bool, limit: int
) -> Sequence[str]:
    """Print the first groups that the filter finds, and return the ids of all that it finds."""
    found = questions.group_ids(snapshot, wanted, lowest_first=lowest_first)
    for group_id, siblings in questions.rollouts_of(snapshot, found[:limit]).items():
        shown = [one for one in siblings if one.purpose == wanted.purpose]
        if all(one.status is None and not one.num_turns for one in shown):
            shown = []  # it has just begun
        if wanted.is_failed:
            shown = [one for one in shown if one.status not in (None, Status.COMPLETED)]
        if lowest_first:
            shown = sorted(shown, key=lambda one: (one.status != Status.COMPLETED, one.rewards.total))
        show_group(screen, group_id, siblings, shown[:MAX_SIBLINGS])
        if len(shown) > MAX_SIBLINGS:
            screen.line((f"  ... and {len(shown) - MAX_SIBLINGS:,} more: --text {group_id}", "dim"))
    return found


def show_group(
    screen: Screen, group_id: str, siblings: Sequence[RolloutSummary], shown: Sequence[RolloutSummary]
) -> None:
    """Print a line about a group and a line for each sibling in `shown`."""
    rewards = [one.rewards.total for one in siblings if one.status == Status.COMPLETED]
    mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "no reward"
    num_open = sum(one.status is None for one in siblings)
    of_open = f", {num_open} open" if num_open else ""
    tasks = list(dict.fromkeys(one.task_id for one in siblings))
    task = f"task {tasks[0]}" if len(tasks) == 1 else f"{len(tasks)} tasks"
    screen.line()
    screen.line((group_id, "bold cyan"), f"  {task}  {len(siblings)} rollouts{of_open}, {mean}")
    width = max((len(one.session_id) for one in shown), default=0)
    for one in shown:
        reward, style = reward_of(one)
        fate, fate_style = fate_of(one)
        screen.line(
            f"  {one.session_id:<{width}}  ",
            (f"{reward:>8}", style),
            (f"  {fate:<16}", fate_style),
            f"  {one.num_turns} turns, {one.num_sampled_tokens:,} tokens",
            f"  task {one.task_id}" if len(tasks) > 1 else "",
            (f"  {one.error}" if one.error else "", "red"),
        )


def reward_of(one: RolloutSummary) -> tuple[str, str]:
    """Return the reward of a rollout and its style; without one, how it ended."""
    if one.status is None:
        return "open", "yellow"
    if one.rewards.is_missing:
        return one.status, "red"
    return f"{one.rewards.total:.3g}", "green" if one.rewards.total > 0 else "red"


def fate_of(one: RolloutSummary) -> tuple[str, str]:
    """Return what became of a rollout, and its style."""
    if one.purpose == SessionPurpose.EVAL:
        return "never trained", "dim"
    if one.fate is not None:
        return str(one.fate), "yellow" if one.fate.dropped else "green"
    if one.leased_step is not None:
        return f"leased for {one.leased_step}", "dim"
    return "" if one.status is None else "waiting", "dim"
