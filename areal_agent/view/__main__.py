"""The command line that shows a run.

    python -m areal_agent.view RUN_DIR [RUN_DIR ...]         a page in the browser, also of several runs side by side
    python -m areal_agent.view RUN_DIR --list                its newest groups: siblings, rewards, fates
    python -m areal_agent.view RUN_DIR --text                the newest trained conversation
    python -m areal_agent.view RUN_DIR --text GROUP          all siblings of a group
    python -m areal_agent.view RUN_DIR --text SESSION        one session as a conversation, also if a group has its name

It only reads, also while the run is live. The page is served on loopback until Ctrl-C. Exit codes: 0 shown; 1 the
ledger cannot be read; 2 there is no such run, session or group; 130 the page was ended.
"""

import asyncio
import io
import os
import sys
import webbrowser
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from areal_agent.command import Parser, run_command
from areal_agent.errors import ArealAgentError, ConfigError
from areal_agent.images import IMAGES, ImageFolder
from areal_agent.ledger import questions
from areal_agent.ledger.files import Snapshot, ledger_in, reading
from areal_agent.ledger.questions import STATUS_NOTE, RolloutSummary
from areal_agent.observe.metrics import read_metrics, step_rows
from areal_agent.tokens.transcript import TRANSCRIPT_NOTE, Transcript
from areal_agent.types import SessionPurpose, Status
from areal_agent.view.recorded import RecordedRun
from areal_agent.view.server import serve
from areal_agent.view.session import MAX_SIBLINGS, SessionView, fate_of, reward_of
from areal_agent.view.terminal import Screen, in_line

NUM_RANKED = 500
"""Of so many of the newest groups, those with trained rollouts come first: the newest of all never came that far."""
STATUS_WORDS = {"running": "running, or ended without a word"}


def main(given: list[str] | None = None) -> int:
    parser = Parser(prog="python -m areal_agent.view", description="Show what a run recorded. It only reads.")
    parser.add_argument(
        "run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="the folder of a run, or its ledger.sqlite"
    )
    parser.add_argument("--port", metavar="P", type=int, help="the page's port on 127.0.0.1 (default: a free one)")
    parser.add_argument("--list", action="store_true", help="no page: list groups with siblings, rewards and fates")
    parser.add_argument(
        "--text",
        metavar="SESSION",
        nargs="?",
        const="",
        help="no page: read one session as a conversation, or list one group; without a name read the newest trained "
        "session (of the groups that --step, --failed, --lowest or --eval choose)",
    )
    parser.add_argument("--step", metavar="N", type=int, help="listed: only groups trained or leased for this step")
    parser.add_argument("--failed", action="store_true", help="listed: only rollouts that did not complete")
    parser.add_argument("--lowest", action="store_true", help="listed: groups of the lowest mean reward first")
    parser.add_argument("--eval", action="store_true", help="listed: the rollouts of evaluations")
    parser.add_argument("--limit", metavar="N", type=int, help="listed: groups to show (default 10)")
    parser.add_argument("--full", action="store_true", help="with a session: long texts whole")
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", type=Path, help="with a session: its tokenizer (default: the run's)"
    )
    parser.add_argument(
        "--values", metavar="FOLDER", type=Path, help="the page shows these values of turns (areal_agent.episode --out)"
    )
    args = parser.parse_args(given)
    is_terminal = args.list or args.text is not None
    _refuse_idle_options(args, is_terminal)
    if not is_terminal:
        return _open_page(args)
    args.run_dir, args.limit = args.run_dirs[0], 10 if args.limit is None else args.limit
    path = ledger_in(args.run_dir)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    screen = Screen(sys.stdout, is_full=args.full)
    with reading(path) as snapshot:
        name = _newest_conversation(snapshot, args) if args.text == "" else args.text
        if name:
            _show_named(screen, snapshot, name, path.parent, args.tokenizer)
        else:
            _show_groups(screen, snapshot, args)
    return 0


def _refuse_idle_options(args: Namespace, is_terminal: bool) -> None:
    """Raise ConfigError for an option without effect, or a wrong number."""
    chooses = args.step is not None or args.failed or args.lowest or args.eval
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit is {args.limit}; give at least 1")
    if args.port is not None and not 0 <= args.port <= 65535:
        raise ConfigError(f"--port is {args.port}; give one from 1 to 65535, or leave it out for a free one")
    if args.text and chooses:
        raise ConfigError(f"--step, --failed, --lowest and --eval choose groups; leave them out with {args.text!r}")
    if not is_terminal and (chooses or args.limit is not None or args.full):
        raise ConfigError("--step, --failed, --lowest, --eval, --limit and --full are for --list or --text; add one")
    if args.values is not None and (is_terminal or not args.values.is_dir()):
        raise ConfigError(
            f"--values {str(args.values)!r} is a folder for the page; name an existing one, or leave it out"
        )
    if is_terminal and (args.port is not None or len(args.run_dirs) > 1):
        raise ConfigError("--port and several runs are for the page; leave them out with --list or --text")


def _open_page(args: Namespace) -> int:
    """Serve the page of the runs, and open it where there is a browser; it ends with Ctrl-C."""
    with ExitStack() as stack:
        runs = [
            stack.enter_context(closing(RecordedRun.open(path, args.tokenizer, args.values))) for path in args.run_dirs
        ]
        asyncio.run(serve(runs, args.port or 0, _announce))
    return 0


def _announce(address: str) -> None:
    print(f"{address}\nopen it in a browser on this machine; Ctrl-C ends it", flush=True)
    has_screen = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if has_screen and sys.stdout.isatty():
        webbrowser.open(address)


def _show_groups(screen: Screen, snapshot: Snapshot, args: Namespace) -> None:
    """Print how the run ended, what became of its rollouts, and the first groups that were asked for."""
    counts, status = questions.counts(snapshot), questions.note(snapshot, STATUS_NOTE) or "not begun"
    screen.line((str(args.run_dir), "bold"), f": {STATUS_WORDS.get(status, status)}")
    screen.line(f"rollouts: {counts.fates}, {counts.num_open:,} open; {counts.num_eval:,} for evaluation")
    if shared := _shared(args.run_dir / "metrics.jsonl"):
        screen.line(shared)
    num_found, groups = _chosen(snapshot, args)
    for group_id, siblings in groups.items():
        asked = _shown(siblings, args)
        shown = [one for one in asked if one.status != Status.CANCELLED]
        _show_group(screen, group_id, siblings, shown[:MAX_SIBLINGS])
        if len(shown) > MAX_SIBLINGS:
            screen.line((f"  ... and {len(shown) - MAX_SIBLINGS:,} more: --text {group_id}", "dim"))
        if len(shown) < len(asked):
            screen.line((f"  {len(asked) - len(shown):,} cancelled: the run ended first", "dim"))
    screen.line()
    if groups:
        first = "" if args.failed or args.lowest or len(groups) == num_found else ", the newest trained ones first"
        number = f"{len(groups):,} of {num_found:,} groups{first}"
        screen.line(f"{number}; one of them, or a session: python -m areal_agent.view {args.run_dir} --text NAME")
    elif args.step is not None or args.failed or args.eval:
        screen.line("no group fits; without options the newest are shown")
    elif counts.num_eval:
        screen.line("all rollouts here are of evaluations: --eval shows them")
    else:
        screen.line("nothing is recorded here; the rollouts of an online run are in the ledger of its gateway")


def _shared(metrics: Path) -> str | None:
    """Say what the sequences of the last step had in common, if anything."""
    try:
        steps = step_rows(read_metrics(metrics)) if metrics.exists() else []
        tokens, shared, repeated = (
            int(steps[-1].get(f"trainer/{name}", 0) if steps else 0)
            for name in ("num_input_tokens", "shared_positions", "repeated_positions")
        )
        if not shared:
            return None
        again = f", {repeated:,} computed twice" if repeated else ""
        return f"step {steps[-1]['step']} was trained on {tokens:,} tokens; branches shared {shared:,} of them{again}"
    except (ArealAgentError, KeyError, OverflowError, TypeError, ValueError):  # no reason not to show rollouts
        return None


def _chosen(snapshot: Snapshot, args: Namespace) -> tuple[int, Mapping[str, Sequence[RolloutSummary]]]:
    """Return the number of groups that were asked for, and the rollouts of the first ones: the newest trained ones."""
    purpose = SessionPurpose.EVAL if args.eval else SessionPurpose.TRAIN
    found = questions.group_ids(snapshot, purpose, step=args.step, only_failed=args.failed, lowest_first=args.lowest)
    if args.failed or args.lowest:
        return len(found), questions.rollouts_of(snapshot, found[: args.limit])
    groups = questions.rollouts_of(snapshot, found[: max(args.limit, NUM_RANKED)])
    ranked = sorted(groups, key=lambda group_id: not any(map(_is_trained, groups[group_id])))  # keeps their order
    return len(found), {group_id: groups[group_id] for group_id in ranked[: args.limit]}


def _shown(siblings: Sequence[RolloutSummary], args: Namespace) -> list[RolloutSummary]:
    """Return those rollouts of a group that were asked for, in their order."""
    purpose = SessionPurpose.EVAL if args.eval else SessionPurpose.TRAIN
    shown = [one for one in siblings if one.purpose == purpose]
    if all(one.status is None and not one.num_turns for one in shown):
        shown = []  # it has just begun
    if args.failed:
        shown = [one for one in shown if one.status not in (None, Status.COMPLETED)]
    if args.lowest:
        shown.sort(key=lambda one: (one.status != Status.COMPLETED, one.rewards.total))
    return shown


def _newest_conversation(snapshot: Snapshot, args: Namespace) -> str | None:
    """Return the first trained session of the chosen groups; where there is none, the first with a turn."""
    shown = [one for siblings in _chosen(snapshot, args)[1].values() for one in _shown(siblings, args) if one.num_turns]
    return next((one.session_id for one in (*filter(_is_trained, shown), *shown)), None)


def _is_trained(one: RolloutSummary) -> bool:
    return one.fate is not None and one.fate.trained_step is not None


def _show_group(
    screen: Screen, group_id: str, siblings: Sequence[RolloutSummary], shown: Sequence[RolloutSummary]
) -> None:
    """Print a line about a group and a line for each sibling in `shown`."""
    rewards = [one.rewards.total for one in siblings if one.status == Status.COMPLETED]
    mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "no reward"
    num_open = sum(one.status is None for one in siblings)
    of_open = f", {num_open} open" if num_open else ""
    tasks = {one.task_id for one in siblings}
    task = f"{len(tasks)} tasks" if len(tasks) > 1 else f"task {siblings[0].task_id}"
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


def _show_named(screen: Screen, snapshot: Snapshot, name: str, run_dir: Path, tokenizer: Path | None) -> None:
    """Print a session or a group. Raises ConfigError, with near names, when there is none of that name."""
    group_id = questions.group_of(snapshot, name)
    if group_id is None and (siblings := questions.rollouts_of(snapshot, [name])[name]):
        _show_group(screen, name, siblings, siblings)
        return
    if group_id is None:
        near = questions.near_sessions(snapshot, name)
        remedy = f"did you mean {', '.join(map(in_line, near))}?" if near else "without a name the groups are listed"
        raise ConfigError(f"the ledger has no session or group {name!r}; {remedy}")
    siblings = questions.siblings_of(snapshot, name)
    turns, trajectory = questions.recorded(snapshot, name)
    transcript = Transcript.of_ledger(questions.note(snapshot, TRANSCRIPT_NOTE), run_dir, tokenizer)
    SessionView(screen, transcript, name, siblings, turns, trajectory, ImageFolder(run_dir / IMAGES)).show()


if __name__ == "__main__":
    run_command(main)
