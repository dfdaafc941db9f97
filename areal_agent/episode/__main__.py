"""The command line that plays recorded episodes again.

    python -m areal_agent.episode RUN_DIR SESSION                           its workflow runs again, on recorded answers
    python -m areal_agent.episode RUN_DIR SESSION --from 2 --samples 8      fresh answers after turn 2, eight times
    python -m areal_agent.episode RUN_DIR SESSION --values --out FOLDER     the same at every turn: the value of each
    python -m areal_agent.episode RUN_DIR --regrade [--step N]              rewards anew, and which ones differ

The workflow runs in this process, so breakpoints in it work. The run is only read. Exit codes: 0 as recorded, or done;
1 a call or a reward differs, or the work failed; 2 there is no such run or session, or its workflow, task or model is
gone.
"""

import asyncio
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from areal_agent.command import Parser, run_command
from areal_agent.episode.engine import open_fresh_engine
from areal_agent.episode.regrade import Regraded, chosen, regraded, write_copy
from areal_agent.episode.values import turns_of, values_of
from areal_agent.errors import ConfigError
from areal_agent.ledger.files import ledger_in, reading
from areal_agent.observe.progress import Progress
from areal_agent.replay.saved import Episode, SavedRun
from areal_agent.replay.stage import Play, Played, open_stage
from areal_agent.types import SessionPurpose

NO_LIMIT_S = 1e9
"""A person at a breakpoint takes his time."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m areal_agent.episode",
        description="Play recorded episodes again: the workflow runs here, and the record answers its calls.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder of a run; it is only read")
    parser.add_argument("session", metavar="SESSION", nargs="?", help="the session to play (view --list has them)")
    parser.add_argument(
        "--tools",
        choices=["live", "record"],
        default="live",
        help="tools always run, since the record has what they said and not what they did; with `record`, a call that "
        "differs only in what they said is answered as the recorded one",
    )
    parser.add_argument("--workflow", metavar="PATH", help="package.module:name, in place of the run's own")
    parser.add_argument("--tokenizer", metavar="FOLDER", type=Path, help="the tokenizer (default: the run's)")
    parser.add_argument("--from", metavar="TURN", type=int, dest="turn", help="answers after this turn are fresh")
    parser.add_argument("--values", action="store_true", help="fresh answers after every turn: the value of each")
    parser.add_argument("--samples", metavar="N", type=int, help="with --from or --values: samples a turn (default 8)")
    parser.add_argument("--engine", metavar="URL", help="the engine of fresh answers, which runs")
    parser.add_argument(
        "--model", metavar="FOLDER", type=Path, help="the model of fresh answers (default: the run's last checkpoint)"
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="write values as JSON, for view --values")
    parser.add_argument("--regrade", action="store_true", help="compute rewards anew; without SESSION, of all sessions")
    parser.add_argument("--step", metavar="N", type=int, help="regrade: only groups trained or leased for this step")
    parser.add_argument("--failed", action="store_true", help="regrade: only rollouts that did not complete")
    parser.add_argument("--eval", action="store_true", help="regrade: the rollouts of evaluations")
    parser.add_argument("--write", metavar="DIR", type=Path, help="regrade: copy the run there, with the new rewards")
    args = parser.parse_args(None if argv is None else list(argv))
    _refuse_idle_options(args)
    if str(Path.cwd()) not in sys.path:  # workflows are imported from the folder in which the command is started
        sys.path.insert(0, str(Path.cwd()))
    run = SavedRun.open(args.run_dir, workflow=args.workflow, tokenizer=args.tokenizer)
    mode = "auto" if sys.stderr.isatty() else "none"
    with closing(Progress(total_steps=0, stream=sys.stderr, mode=mode)) as progress:
        if args.regrade:
            return asyncio.run(_regrade(run, args, progress))
        with reading(ledger_in(args.run_dir)) as snapshot:
            episode = run.episode(snapshot, args.session)
        if args.values or args.turn is not None:
            return asyncio.run(_sample(run, episode, args, progress))
        return asyncio.run(_play(run, episode, args))


def _refuse_idle_options(args: Namespace) -> None:
    """Raise ConfigError for options without effect, or that exclude each other."""
    is_sampled = args.values or args.turn is not None
    of_samples = {"--samples": args.samples, "--engine": args.engine, "--model": args.model, "--out": args.out}
    of_grades = {"--step": args.step, "--failed": args.failed, "--eval": args.eval, "--write": args.write}
    idle = [name for name, value in of_samples.items() if value is not None and not is_sampled]
    if idle:
        raise ConfigError(f"{idle[0]} is for fresh samples; add --from TURN or --values")
    idle = [name for name, value in of_grades.items() if value not in (None, False) and not args.regrade]
    if idle:
        raise ConfigError(f"{idle[0]} is for --regrade; add that")
    if args.session is None and not args.regrade:
        raise ConfigError("name a session: python -m areal_agent.view RUN_DIR --list has them; --regrade plays all")
    if args.session is not None and (args.step is not None or args.failed or args.eval):
        raise ConfigError("--step, --failed and --eval choose sessions; leave them out with one")
    if args.values + (args.turn is not None) + args.regrade > 1:
        raise ConfigError("--from, --values and --regrade exclude each other; give one")
    if args.engine and args.model:
        raise ConfigError("--engine and --model both name what samples; give one")
    if args.samples is not None and args.samples < 1:
        raise ConfigError(f"--samples is {args.samples}; give at least 1")


# ------------------------------------------------------------------------------------------------- one session


async def _play(run: SavedRun, episode: Episode, args: Namespace) -> int:
    async with open_stage(run, timeout_s=NO_LIMIT_S, bridges_tools=args.tools == "record") as stage:
        played = await stage.play(Play(episode=episode))
    ended = episode.trajectory
    is_same = ended is not None and (ended.status, ended.rewards) == (played.trajectory.status, played.rewards)
    print("\n".join(_told(episode, played, is_same=is_same)))
    return 0 if played.is_as_recorded and is_same else 1


def _told(episode: Episode, played: Played, *, is_same: bool) -> Iterator[str]:
    ended, now = episode.trajectory, played.trajectory
    yield from map(str, played.differences)
    if played.not_made:
        yield f"never asked for: the answers of turn {', '.join(map(str, played.not_made))}"
    if played.is_as_recorded:
        yield f"{len(episode.turns)} turns as recorded"
    reward = "no reward" if played.rewards.is_missing else f"reward {played.rewards.total:g}"
    yield f"{now.status}, {reward}" + (f": {now.error}" if now.error else "")
    if not is_same:
        before = "it is open" if ended is None else f"{ended.status}, reward {ended.rewards.total:g}"
        yield f"recorded: {before}"


async def _sample(run: SavedRun, episode: Episode, args: Namespace, progress: Progress) -> int:
    turns, num_samples = turns_of(episode, args.turn), args.samples or 8
    num_all = num_samples * len(turns)
    async with (
        open_fresh_engine(run, args.engine, args.model, progress) as engine,
        open_stage(
            run,
            timeout_s=run.config.rollout.timeout_s,
            bridges_tools=args.tools == "record",
            info=engine.info,
        ) as stage,
    ):
        progress.phase(f"sampling {num_all} times")
        values = await values_of(
            stage,
            episode,
            engine,
            turns,
            num_samples,
            lambda done: progress.phase_progress(done / num_all, f"{num_all} samples"),
        )
    print(f"session {values.session_id}, fresh answers by {values.engine}\n{values.table()}")
    if args.values:
        turn = values.lost_at
        print(f"turn {turn} lost {values.drops[turn]:.3f} of value" if turn else "no answer lost value")
    if args.out is not None:
        print(f"in {values.write(args.out)}; python -m areal_agent.view {args.run_dir} --values {args.out} shows it")
    return 0 if any(one.rewards for one in values.values) else 1


# ------------------------------------------------------------------------------------------------------ rewards


async def _regrade(run: SavedRun, args: Namespace, progress: Progress) -> int:
    purpose = SessionPurpose.EVAL if args.eval else SessionPurpose.TRAIN
    with reading(ledger_in(args.run_dir)) as snapshot:
        if args.session is not None:
            episodes, num_left = [run.episode(snapshot, args.session)], 0
        else:
            episodes, num_left = chosen(snapshot, run, purpose, step=args.step, only_failed=args.failed)
        if not episodes or any(one.trajectory is None for one in episodes):
            raise ConfigError("no session fits that ended by itself: only such a one can be graded anew")
        async with open_stage(
            run, timeout_s=run.config.rollout.timeout_s, bridges_tools=args.tools == "record"
        ) as stage:
            progress.phase(f"grading {len(episodes)} sessions")
            played = await stage.play_all(
                [Play(episode=one) for one in episodes],
                lambda done: progress.phase_progress(done / len(episodes), f"{len(episodes)} sessions"),
            )
        grades = list(map(regraded, episodes, played))
        print("\n".join(_grades(grades, num_left)))
        if args.write is not None:
            number = write_copy(run, snapshot, args.write, grades)
            print(f"{number} sessions have new rewards in {args.write}")
    return 1 if any(one.is_changed or one.fault for one in grades) else 0


def _grades(grades: Sequence[Regraded], num_left: int) -> Iterator[str]:
    changed, faulty = [one for one in grades if one.is_changed], [one for one in grades if one.fault]
    yield from map(str, (*changed, *faulty))
    left = f"; {num_left} were cut off and cannot be played" if num_left else ""
    yield (
        f"{len(grades)} sessions: {len(grades) - len(changed) - len(faulty)} with the same rewards, {len(changed)} "
        f"with others, {len(faulty)} not as recorded{left}"
    )


if __name__ == "__main__":
    run_command(main)
