"""Makes the environment of an engine whose pins clash with this project's: SGLang or vLLM, for a CPU.

    python -m areal_agent.engine.environment sglang .venv-sglang

It runs `make_environment.sh` of that engine, which needs bash, a network, some 3.5 GB and several minutes. One that was
interrupted goes on, and a finished one is left as it is.
"""

import os
import subprocess
import sys
from pathlib import Path

from areal_agent.command import Parser, nearest, run_command
from areal_agent.errors import ConfigError

BACKENDS = ("sglang", "vllm")


def main() -> int:
    parser = Parser(
        prog="python -m areal_agent.engine.environment",
        description="Make a Python environment with SGLang or vLLM for a CPU (on a GPU: their own installation).",
    )
    parser.add_argument("backend", metavar="ENGINE", help="sglang or vllm")
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to make it: 3.5 GB")
    args = parser.parse_args()
    if args.backend not in BACKENDS:
        raise ConfigError(
            f"there is no engine {args.backend!r} to make an environment for; {nearest(args.backend, BACKENDS)}"
        )
    script = Path(__file__).parent / args.backend / "make_environment.sh"
    done = subprocess.run(["bash", str(script), str(args.folder)], env={**os.environ, "PYTHON": sys.executable})
    if done.returncode == 0:
        print(f"made; in a config: engine: {{backend: {args.backend}, python: {args.folder / 'bin' / 'python'}}}")
    return int(done.returncode != 0)


if __name__ == "__main__":
    run_command(main)
