"""The command line of `python -m areal_agent.train`. The work is in run/loop.py."""

import argparse
from pathlib import Path

from areal_agent.command import Parser, run_command
from areal_agent.errors import ConfigError


def main() -> int:
    args = _parse()
    if args.resume and not Path(args.resume).is_dir():
        raise ConfigError(f"there is no run folder {args.resume!r}; name the folder that the run printed")
    # imported here: it loads the project, and --help or a misspelt option need not wait for that
    from areal_agent.run.loop import train

    config_file = Path(args.config) if args.config else Path(args.resume) / "config.yaml"
    return train(config_file, args.overrides, resume=args.resume, is_dry=args.dry_run)


def _parse() -> argparse.Namespace:
    parser = Parser(
        prog="python -m areal_agent.train",
        description="Train a model with an agent workflow by asynchronous reinforcement learning.",
    )
    parser.add_argument("--config", metavar="FILE", help="the YAML config; with --resume, the run folder's by default")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key: steps=10 engine.threads=2")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the config, what it names and a model's folder; start nothing (areal_agent.doctor tries the rest)",
    )
    parser.add_argument(
        "--resume", metavar="RUN_DIR", help="go on with an interrupted or crashed run, or cluster.shared_dir/NAME"
    )
    args = parser.parse_args()
    if not args.config and not args.resume:
        file = next((word for word in args.overrides if word.endswith((".yaml", ".yml"))), None)
        parser.error("give --config FILE, or --resume RUN_DIR" + (f"; did you mean --config {file}?" if file else ""))
    return args


if __name__ == "__main__":
    run_command(main, outlives_readers=True)
