"""The command line of `python -m areal_agent.doctor`, which examines a config on this machine and says what to change.

Exit codes: 0 nothing failed, 1 something did, 2 the command line or the config is wrong.
"""

import argparse
import asyncio
import math

from areal_agent.command import Parser, run_command
from areal_agent.errors import ConfigError


def main() -> int:
    args = _parse()
    # imported here: it loads half of the project, and --help or a misspelt option need not wait for that
    from areal_agent.doctor.examination import check_up

    return asyncio.run(
        check_up(
            args.config, args.overrides, starts_engine=not args.no_engine, num_gpus=args.gpus, memory_gib=args.memory
        )
    )


def _parse() -> argparse.Namespace:
    parser = Parser(
        prog="python -m areal_agent.doctor",
        description="Examine a config on this machine: model, tokenizer, chat template, engine, trainer, push of "
        "weights, sandboxes, memory, disk and ports. Engine and trainer are started for a moment; nothing stays.",
    )
    parser.add_argument("--config", metavar="FILE", required=True, help="the YAML config of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key: engine.threads=2")
    parser.add_argument("--no-engine", action="store_true", help="start no engine and no trainer, and build no model")
    parser.add_argument("--gpus", metavar="N", type=int, help="estimate memory for a machine with this many GPUs")
    parser.add_argument(
        "--memory", metavar="GIB", type=float, help="the memory of that machine: of each GPU, or with --gpus 0 its own"
    )
    args = parser.parse_args()
    if (args.gpus is None) != (args.memory is None):
        parser.error("--gpus and --memory describe one machine together: give both")
    if args.gpus is not None and (args.gpus < 0 or not 0 < args.memory < math.inf):
        raise ConfigError(
            f"--gpus {args.gpus} --memory {args.memory:g}: there is no such machine; give 0 or more GPUs, and more "
            "than 0 GiB"
        )
    return args


if __name__ == "__main__":
    run_command(main)
