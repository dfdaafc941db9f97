"""The command line of `python -m areal_agent.plan`, which says how to split GPUs between rollout and training.

Exit codes: 0 planned; 1 a record of the run cannot be read; 2 the command line, the config or the run does not allow a
plan.
"""

import asyncio
from pathlib import Path

from areal_agent.command import Parser, run_command
from areal_agent.errors import ConfigError


def main() -> int:
    parser = Parser(
        prog="python -m areal_agent.plan",
        description="Predict train steps an hour for each split of GPUs between rollout and training, by a model that "
        "is calibrated from a run's own records. It advises and moves nothing.",
    )
    parser.add_argument("--config", metavar="FILE", required=True, help="the YAML config of the run to plan")
    parser.add_argument("--gpus", metavar="N", type=int, required=True, help="GPUs of rollout and training together")
    parser.add_argument(
        "--from", metavar="RUN_DIR", dest="run_dir", type=Path, help="calibrate from this run; without it: guesses"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key: max_staleness=8")
    args = parser.parse_args()
    if args.gpus < 1:
        raise ConfigError(f"--gpus is {args.gpus}; give at least 1")
    # imported here: it loads half of the project, and --help or a misspelt option need not wait for that
    from areal_agent.config import Config
    from areal_agent.plan.advice import Planner, lines
    from areal_agent.plan.calibration import of_guesses, of_run

    config = Config.load(args.config, args.overrides)
    if config.is_online:
        raise ConfigError(
            "a plan needs the run's own rollouts: with rollout.gateway_url agents and engine are elsewhere"
        )
    calibration = of_run(args.run_dir, config) if args.run_dir else asyncio.run(of_guesses(config))
    print("\n".join(calibration.told))
    for line in lines(Planner(config, calibration), config, args.gpus):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
