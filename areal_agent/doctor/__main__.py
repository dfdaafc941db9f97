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
    from areal_agent.doctor.machines import described

    elsewhere = None
    if args.gpus is not None:
        elsewhere = described(args.gpus, *(getattr(args, name) for name in SIZES), num_nodes=args.nodes or 1)
    return asyncio.run(check_up(args.config, args.overrides, starts_engine=not args.no_engine, elsewhere=elsewhere))


SIZES = {
    "memory": "the memory of each of its GPUs",
    "ram": "its own memory",
    "shm": "its /dev/shm",
    "disk": "what is free on the disk of its runs",
}
"""The options that describe a machine elsewhere, beside --gpus. All are in GiB."""


def _parse() -> argparse.Namespace:
    parser = Parser(
        prog="python -m areal_agent.doctor",
        description="Examine a config on this machine: model, tokenizer, chat template, engine, trainer, push of "
        "weights, sandboxes, memory, disk and ports. Engine and trainer are started for a moment; nothing stays. "
        "With --gpus: say whether it fits a machine that is elsewhere, or a cluster of them, and start nothing.",
    )
    parser.add_argument("--config", metavar="FILE", required=True, help="the YAML config of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key: engine.threads=2")
    parser.add_argument(
        "--no-engine", action="store_true", help="start no engine, build no model and download no weights"
    )
    elsewhere = parser.add_argument_group(
        "a machine elsewhere", "What is not given is not compared. The model may be a config.json alone."
    )
    elsewhere.add_argument("--gpus", metavar="N", type=int, help="examine for a machine with this many GPUs")
    elsewhere.add_argument("--nodes", metavar="K", type=int, help="for a Ray cluster of this many such machines")
    for name, what in SIZES.items():
        elsewhere.add_argument(f"--{name}", metavar="GIB", type=float, help=f"{what}, in GiB")
    args = parser.parse_args()
    sizes = {name: size for name in SIZES if (size := getattr(args, name)) is not None}
    told = sizes if args.nodes is None else {"nodes": args.nodes, **sizes}
    if told and args.gpus is None:
        parser.error(f"--{next(iter(told))} describes a machine elsewhere: give its --gpus as well, 0 for none")
    if args.gpus is not None and (args.gpus < 0 or not all(0 < size < math.inf for size in told.values())):
        given = " ".join(f"--{name} {size:g}" for name, size in {"gpus": args.gpus, **told}.items())
        raise ConfigError(f"{given}: there is no such machine; give 0 or more GPUs, and more than 0 GiB")
    if args.gpus and "memory" not in sizes:
        parser.error(f"--gpus {args.gpus}: give the --memory of each as well, in GiB")
    if args.gpus == 0 and "memory" in sizes:
        parser.error("--memory is that of each GPU: give it with --gpus of 1 or more; a machine's own is --ram")
    return args


if __name__ == "__main__":
    run_command(main)
