"""The command line of `python -m areal_agent.eval`. The work is in run/evaluation.py."""

import argparse

from areal_agent.command import Parser, run_command


def main() -> int:
    args = _parse()
    # imported here: it loads the project, and --help or a misspelt option need not wait for that
    from areal_agent.run.evaluation import evaluate

    return evaluate(args.config, args.overrides)


def _parse() -> argparse.Namespace:
    parser = Parser(
        prog="python -m areal_agent.eval", description="Grade a model on the held-out tasks of a config, as train does."
    )
    parser.add_argument("--config", metavar="FILE", required=True, help="the YAML config of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example model=runs/x/checkpoints/step_N")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
