"""The command line of `python -m areal_agent.eval`. The work is in run/grading.py."""

import argparse
import json
import os
from pathlib import Path

from areal_agent.command import Parser, run_command

SHORT = {
    "tasks": "eval.num_tasks",
    "temperature": "rollout.temperature",
    "concurrency": "rollout.max_concurrent",
    "url": "eval.api.url",
    "model": "eval.api.model",
    "key_env": "eval.api.key_env",
}
"""Options that stand for a key of the config."""


def main() -> int:
    args = _parse()
    # imported here: it loads the project, and --help or a misspelt option need not wait for that
    from areal_agent.run.benchmarks import overrides_of
    from areal_agent.run.grading import compare, evaluate, resume

    overrides = [
        f"{key}={json.dumps(getattr(args, name))}" for name, key in SHORT.items() if getattr(args, name) is not None
    ]
    if args.compare:
        print(compare(*args.compare))
        return 0
    if args.resume:
        return resume(args.resume, overrides)
    overrides += args.overrides
    if args.benchmark is None:
        return evaluate(args.config, overrides, args.samples or 1)
    keys, num_samples = overrides_of(args.benchmark)
    return evaluate(
        args.config or os.devnull,
        [*keys, *overrides],
        args.samples or num_samples,
        name=Path(args.benchmark).name.removesuffix(".yaml"),
    )


def _parse() -> argparse.Namespace:
    parser = Parser(
        prog="python -m areal_agent.eval",
        description="Grade a model on the held-out tasks of a config, as train does; go on with that; or compare two.",
    )
    parser.add_argument("--config", metavar="FILE", help="the YAML config of a run")
    parser.add_argument(
        "--benchmark", metavar="NAME", help="tasks, workflow and protocol by name, or FILE.yaml, over --config's"
    )
    parser.add_argument("--samples", metavar="N", type=int, help="answers to each task (1, or as a benchmark has them)")
    parser.add_argument("--tasks", metavar="N", type=int, help="the first N held-out tasks (eval.num_tasks)")
    parser.add_argument("--temperature", metavar="T", type=float, help="0 is greedy (rollout.temperature)")
    parser.add_argument("--concurrency", metavar="N", type=int, help="rollouts at once (rollout.max_concurrent)")
    parser.add_argument("--url", help="grade the model behind this OpenAI-compatible URL (eval.api.url)")
    parser.add_argument("--model", metavar="NAME", help="its name there (eval.api.model)")
    parser.add_argument("--key-env", metavar="VARIABLE", help="the variable with its key (eval.api.key_env)")
    parser.add_argument("--resume", metavar="FOLDER", type=Path, help="go on with an interrupted evaluation")
    parser.add_argument(
        "--compare", metavar=("A", "B"), nargs=2, type=Path, help="compare two evaluations of the same tasks"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example model=runs/x/checkpoints/step_N")
    args = parser.parse_args()
    if sum(bool(one) for one in (args.config or args.benchmark, args.resume, args.compare)) != 1:
        parser.error("give --config FILE, --benchmark NAME or both; or else --resume FOLDER, or --compare A B")
    if args.samples is not None and args.samples < 1:
        parser.error(f"--samples is {args.samples}; give 1 or more")
    kept = args.overrides or any(
        getattr(args, name) is not None for name in ("samples", *SHORT) if name != "concurrency"
    )
    if kept and (args.resume or args.compare):
        parser.error("what is resumed or compared stays as it began: only --concurrency may be given with --resume")
    return args


if __name__ == "__main__":
    run_command(main, outlives_readers=True)
