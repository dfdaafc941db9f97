"""The command line of `python -m areal_agent.sft`. The work is in run.py."""

import argparse
import json
from pathlib import Path

from areal_agent.command import Parser, run_command
from areal_agent.errors import ConfigError


def main() -> int:
    args = _parse()
    if args.resume and not (Path(args.resume) / "config.yaml").is_file():
        raise ConfigError(f"there is no run folder {args.resume!r}; name the folder that the run printed")
    if args.min_reward is not None and not args.from_run:
        raise ConfigError("--min-reward belongs to --from-run RUN_DIR; give both")
    # imported here: they load torch, and --help or a misspelt option need not wait for that
    from areal_agent.sft.config import SftConfig
    from areal_agent.sft.run import fine_tune

    overrides = list(args.overrides)
    if args.from_run:
        min_reward = 1.0 if args.min_reward is None else args.min_reward
        overrides += [f"data.from_run={json.dumps(args.from_run)}", f"data.min_reward={min_reward}"]
    file = Path(args.config) if args.config else Path(args.resume) / "config.yaml"
    config = SftConfig.load(file, overrides)
    return fine_tune(config, name=file.stem, resume=args.resume, is_dry=args.dry_run)


def _parse() -> argparse.Namespace:
    parser = Parser(
        prog="python -m areal_agent.sft",
        description="Fine-tune a model on chats (JSONL), or on the best rollouts of a run, by supervised learning.",
    )
    parser.add_argument("--config", metavar="FILE", help="the YAML config; with --resume, the run folder's by default")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key: epochs=2 data=chats.jsonl")
    parser.add_argument("--from-run", metavar="RUN_DIR", help="learn rollouts of this run, by their sampled tokens")
    parser.add_argument("--min-reward", metavar="R", type=float, help="those with at least this reward (1)")
    parser.add_argument("--dry-run", action="store_true", help="check the config and every row; start nothing")
    parser.add_argument("--resume", metavar="RUN_DIR", help="go on with an interrupted or crashed run")
    args = parser.parse_args()
    if not args.config and not args.resume:
        parser.error("give --config FILE, or --resume RUN_DIR")
    return args


if __name__ == "__main__":
    run_command(main, outlives_readers=True)
