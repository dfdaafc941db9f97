"""The command line of the ledger: verify its invariants, export its data, or make its train steps again.

    python -m areal_agent.ledger verify RUN_DIR                     see verify.py
    python -m areal_agent.ledger export RUN_DIR --parquet FILE      see export.py
    python -m areal_agent.ledger replay RUN_DIR                     see areal_agent/replay/

Exit codes: 0 done, all invariants hold, all weights are equal; 1 an invariant is violated, weights differ, or the work
failed; 2 there is no such ledger, or the result cannot be written there.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from areal_agent.command import Parser, run_command
from areal_agent.errors import ConfigError
from areal_agent.images import IMAGES, ImageFolder
from areal_agent.ledger import questions
from areal_agent.ledger.files import ledger_in, reading
from areal_agent.ledger.questions import LedgerCounts
from areal_agent.ledger.verify import Invariant, VerifyReport, verify
from areal_agent.observe.progress import Progress
from areal_agent.tokens.transcript import TRANSCRIPT_NOTE, Transcript

OPTIONS = {
    "export": ("parquet", "images", "force", "tokenizer"),
    "replay": ("to", "begin", "variants", "out", "sessions"),
}
"""The options that belong to one command."""

MAX_SHOWN = 10  # violations printed per invariant
UNPROVED = "cannot be proved for {:,} sessions of ledger version 2, which kept no digest of rewards"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m areal_agent.ledger",
        description="verify: prove what a run's ledger promises: every token, every trajectory, exactly once. "
        "export: hand out every completion with its tokens, log-probabilities, versions and rewards. "
        "replay: make the train steps again from their batches, without engine or sandbox, and compare the weights "
        "with the run's, bit for bit; or train on the same batches with other settings. "
        "All only read, also while the run is live.",
    )
    parser.add_argument("command", choices=["verify", "export", "replay"], help="what to do")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder of a run, or its ledger.sqlite")
    parser.add_argument("--parquet", metavar="FILE", type=Path, help="export: the file to write, a row a completion")
    parser.add_argument(
        "--images", metavar="FOLDER", type=Path, help="export: a folder that gets the images, each once, by its SHA-256"
    )
    parser.add_argument("--force", action="store_true", help="export: replace FILE when it is there")
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", type=Path, help="export: the tokenizer (default: the one that the run used)"
    )
    parser.add_argument("--to", metavar="STEP", type=int, help="replay: the last step (default: that of the run)")
    parser.add_argument(
        "--from",
        metavar="CHECKPOINT",
        dest="begin",
        type=Path,
        help="replay: the checkpoint to begin with (default: the model that the run began with)",
    )
    parser.add_argument(
        "--with",
        metavar="KEY=VALUE",
        dest="variants",
        nargs="+",
        action="append",
        help="replay: settings of a variant, for example algorithm=gspo trainer.learning_rate=1e-5",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        help="replay: a new folder, for the last checkpoint, or for the table and the picture of --with",
    )
    parser.add_argument(
        "--sessions", metavar="LEDGER", type=Path, help="replay: the gateway's ledger, where a run was trained online"
    )
    args = parser.parse_args(None if argv is None else list(argv))
    for command, names in OPTIONS.items():
        given = [name for name in names if getattr(args, name)]
        if given and command != args.command:
            option = {"begin": "from", "variants": "with"}.get(given[0], given[0])
            raise ConfigError(f"--{option} belongs to `{command}`, not to `{args.command}`; leave it out")
    path = ledger_in(args.run_dir)
    match args.command:
        case "export":
            return _export(path, args.parquet, args.images, args.tokenizer, is_forced=args.force)
        case "replay":
            from areal_agent.replay.command import replay_command  # imported here because it loads torch

            return replay_command(path, args.sessions, args.begin, args.to, args.variants or (), args.out)
        case _:
            return _verify_and_print(path)


def _verify_and_print(path: Path) -> int:
    report = _verify(path)
    print("\n".join(_lines(path, report)))
    return 0 if report.is_ok else 1


def _export(ledger: Path, target: Path | None, images: Path | None, tokenizer: Path | None, *, is_forced: bool) -> int:
    if target is None:
        raise ConfigError("export needs a file to write: --parquet FILE")
    if target.is_dir() or not target.parent.is_dir():
        raise ConfigError(f"--parquet {str(target)!r} must be a file in an existing folder; name one")
    if target.exists() and not is_forced:
        raise ConfigError(f"--parquet {str(target)!r} exists; name another file, or replace it with --force")
    if images is not None and images.exists() and not images.is_dir():
        raise ConfigError(f"--images {str(images)!r} is a file; name a folder")
    try:
        from areal_agent.ledger import export  # imported here because `verify` works without the extra
    except ImportError as error:
        raise ConfigError(f"export needs pyarrow ({error}); install it: pip install 'areal-agent[parquet]'") from None
    with reading(ledger) as snapshot:
        transcript = Transcript.of_ledger(questions.note(snapshot, TRANSCRIPT_NOTE), ledger.parent, tokenizer)
        rows = export.completions(snapshot, transcript)
        if images is not None:
            rows = export.with_images(rows, ImageFolder(ledger.parent / IMAGES), ImageFolder(images))
        num_rows = export.write_parquet(target, rows)
    print(f"{num_rows:,} completions in {target}")
    if not transcript.has_text:
        print("without their text: no tokenizer was found; name its folder with --tokenizer", file=sys.stderr)
    return 0


def _verify(path: Path) -> VerifyReport:
    """Verify the ledger, with a progress bar on a terminal, since a big one takes a while."""
    progress = Progress(total_steps=0, stream=sys.stderr, mode="auto" if sys.stderr.isatty() else "none")
    progress.phase("verifying")
    try:
        return verify(
            path, lambda num_done, num_all: progress.phase_progress(num_done / num_all, f"{num_all} sessions")
        )
    finally:
        progress.close()


def _lines(path: Path, report: VerifyReport) -> Iterator[str]:
    yield f"ledger {path}"
    if report.counts is not None:
        yield from _count_lines(report.counts)
    yield (
        f"  tokens     {report.num_sampled_tokens:,} sampled in {report.num_turns:,} turns; "
        f"{report.num_trained_tokens:,} trained in the loss"
    )
    if report.num_images:
        yield f"  images     {report.num_images:,} of {report.num_image_bytes:,} bytes"
    yield ""
    for invariant in Invariant:
        violations = report.of(invariant)
        num_unproved = report.unproved.get(invariant, 0)
        mark = "✗" if violations else "?" if num_unproved else "✓"
        yield f"  {mark} {invariant}{f' ({UNPROVED.format(num_unproved)})' if num_unproved else ''}"
        yield from (f"      {violation}" for violation in violations[:MAX_SHOWN])
        if len(violations) > MAX_SHOWN:
            yield f"      ... and {len(violations) - MAX_SHOWN} more"
    yield ""
    if report.is_ok and report.counts is not None and not report.counts.num_closed + report.counts.num_open:
        yield (
            "EMPTY: nothing is recorded here, so nothing is proved; the rollouts of an online run are in the ledger of "
            "its gateway"
        )
    elif report.is_ok and report.unproved:
        yield f"OK: none of {len(Invariant)} invariants is violated, and {len(report.unproved)} cannot be proved"
    elif report.is_ok:
        yield f"OK: all {len(Invariant)} invariants hold"
    else:
        num_broken = sum(bool(report.of(invariant)) for invariant in Invariant)
        yield f"VIOLATED: {num_broken} of {len(Invariant)} invariants; {len(report.violations):,} violations in all"


def _count_lines(counts: LedgerCounts) -> Iterator[str]:
    endings = ", ".join(f"{number:,} {status}" for status, number in sorted(counts.statuses.items()))
    yield (
        f"  sessions   {counts.num_closed:,} closed{f' ({endings})' if endings else ''}, {counts.num_open:,} open; "
        f"{counts.num_eval:,} for evaluation"
    )
    yield f"  fates      {counts.fates}"


if __name__ == "__main__":
    run_command(main)
