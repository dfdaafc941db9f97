"""The command line that shows a run.

    python -m areal_agent.view RUN_DIR                       its newest groups: siblings, rewards, fates
    python -m areal_agent.view RUN_DIR --text GROUP          all siblings of a group
    python -m areal_agent.view RUN_DIR --text SESSION        one session as a conversation

It only reads, also while the run is live. Exit codes: 0 shown; 1 the ledger cannot be read; 2 there is no such run,
session or group.
"""

import difflib
import io
import sys
from pathlib import Path

from areal_agent.command import Parser, run_command
from areal_agent.errors import ConfigError
from areal_agent.ledger import questions
from areal_agent.ledger.files import Snapshot, ledger_in, reading
from areal_agent.ledger.questions import GroupFilter
from areal_agent.types import SessionPurpose
from areal_agent.view.rollouts import show_counts, show_group, show_groups
from areal_agent.view.terminal import Screen, in_line

NUM_NEAR = 20_000
"""A misspelt name is compared with so many of the newest sessions of each file."""


def main(given: list[str] | None = None) -> int:
    parser = Parser(prog="python -m areal_agent.view", description="Show what a run recorded. It only reads.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder of a run, or its ledger.sqlite")
    parser.add_argument(
        "--text",
        metavar="SESSION",
        nargs="?",
        const="",
        default="",
        help="show this session or group; without a name the newest groups, which are shown anyway: text is all there "
        "is so far",
    )
    parser.add_argument("--step", metavar="N", type=int, help="only groups trained or leased for this step")
    parser.add_argument("--failed", action="store_true", help="only rollouts that did not complete")
    parser.add_argument("--lowest", action="store_true", help="groups of the lowest mean reward first")
    parser.add_argument("--eval", action="store_true", help="the rollouts of evaluations")
    parser.add_argument("--limit", metavar="N", type=int, default=10, help="groups to show (default %(default)s)")
    parser.add_argument("--full", action="store_true", help="with a session: long texts whole")
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", type=Path, help="with a session: its tokenizer (default: the run's)"
    )
    args = parser.parse_args(given)
    if args.limit < 1:
        raise ConfigError(f"--limit is {args.limit}; give at least 1")
    if args.text and (args.step is not None or args.failed or args.lowest or args.eval):
        raise ConfigError(f"--step, --failed, --lowest and --eval choose groups; leave them out with {args.text!r}")
    path = ledger_in(args.run_dir)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    screen = Screen(sys.stdout, is_full=args.full)
    with reading(path) as snapshot:
        if args.text:
            _show_one(screen, snapshot, args.text, path.parent, args.tokenizer)
            return 0
        show_counts(screen, snapshot, str(args.run_dir))
        wanted = GroupFilter(
            purpose=SessionPurpose.EVAL if args.eval else SessionPurpose.TRAIN, step=args.step, is_failed=args.failed
        )
        found = show_groups(screen, snapshot, wanted, lowest_first=args.lowest, limit=args.limit)
        screen.line()
        screen.line(_last_words(len(found), args.limit, str(args.run_dir)))
    return 0


def _show_one(screen: Screen, snapshot: Snapshot, name: str, run_dir: Path, tokenizer: Path | None) -> None:
    """Print a session or a group. Raises ConfigError, with near names, when there is none of that name."""
    siblings = questions.rollouts_of(snapshot, [name])[name]
    if siblings:
        show_group(screen, name, siblings, siblings)
        return
    found = questions.rollout(snapshot, name)
    if found is None:
        ids = questions.session_ids(snapshot, NUM_NEAR)
        near = difflib.get_close_matches(name, ids, n=3) or [one for one in ids if name in one][:3]
        remedy = f"did you mean {', '.join(map(in_line, near))}?" if near else "without a name the groups are listed"
        raise ConfigError(f"the ledger has no session or group {name!r}; {remedy}")
    # imported here: the tokenizer's library takes a second, and lists need none
    from areal_agent.tokens.transcript import TRANSCRIPT_NOTE, Transcript, find_settings
    from areal_agent.view.session import SessionView

    settings = find_settings(questions.note(snapshot, TRANSCRIPT_NOTE), run_dir, tokenizer)
    transcript = Transcript(settings.load_renderer()) if settings.tokenizer else None
    others = questions.rollouts_of(snapshot, [found[0].group_id])[found[0].group_id]
    SessionView(screen, transcript, settings.loss_rule).show(*found, others)


def _last_words(num_found: int, limit: int, run_dir: str) -> str:
    if not num_found:
        return "no group fits; the rollouts of an online run are in the ledger of its gateway"
    shown = f"{min(limit, num_found):,} of {num_found:,} groups"
    return f"{shown}; one of them, or a session: python -m areal_agent.view {run_dir} --text NAME"


if __name__ == "__main__":
    run_command(main)
