"""Train steps on the same records and model: ours packed and padded, with and without chunks, and TRL's GRPOTrainer.

    python benchmarks/trainer [--steps 3] [--vocab 512 8192] [--trl FOLDER]
    python benchmarks/trainer --tree [--model FOLDER]    ours alone: shared prefixes computed once (tree.py)

TRL's environment is made in FOLDER when it is missing (pip; some minutes). Sides run one after another, each in a
process of one thread. Tokens are counted without padding, and CPU time is used because it holds on a shared machine.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import torch
from records import GROUP_SIZE, write_material
from tree import compare

HERE = Path(__file__).parent
REQUIREMENTS = ("torch==2.13.0", "trl==1.16.0")
VARIANTS = ("tree", "balanced", "first_fit", "padded", "whole")
TRL_ROWS = 8
MACHINE = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/trainer", description="Train steps, ours and TRL's.")
    parser.add_argument("--steps", type=int, default=3, help="measured train steps a side, after one of warming up")
    parser.add_argument("--prompts", type=int, default=64, help=f"prompts a step, {GROUP_SIZE} completions each")
    parser.add_argument("--vocab", type=int, nargs="+", default=[512, 8192], help="sizes of the vocabulary")
    cache = Path.home() / ".cache" / "areal_agent" / "trl-1.16.0"
    parser.add_argument("--trl", type=Path, default=cache, help="folder of TRL's environment")
    parser.add_argument("--tree", action="store_true", help="measure what shared prefixes save, without TRL")
    parser.add_argument("--model", type=Path, help="with --tree: a folder of the real model, measured too")
    args = parser.parse_args()
    if args.tree:
        print(MACHINE)
        compare(args.model, args.steps)
        return 0
    theirs = trl_python(args.trl)
    print(MACHINE)
    for vocab_size in args.vocab:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_material(folder, vocab_size=vocab_size, num_prompts=args.prompts)
            rows = {one: run(sys.executable, HERE / "ours.py", folder, one, args.steps) for one in VARIANTS}
            rows["trl"] = run(theirs, HERE / "theirs.py", folder, args.steps, TRL_ROWS)
            report(vocab_size, folder, rows)
    return 0


def trl_python(folder: Path) -> str:
    """Return the Python of TRL's environment, which is made when it is missing."""
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *REQUIREMENTS], check=True)
        (folder / "ready").touch()
    return str(python)


def run(python: str, script: Path, *arguments: object) -> dict[str, Any]:
    """Run one side and return the last line that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, str(script), *map(str, arguments)], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def report(vocab_size: int, folder: Path, rows: dict[str, dict[str, Any]]) -> None:
    base, ours = rows["trl"]["tokens_per_cpu_s"], torch.load(folder / "balanced.pt", weights_only=True)
    print(f"\nvocabulary {vocab_size}\n")
    print("| side | tokens / CPU-s | to TRL | padding | micro-batches | peak MB | gradient differs by |")
    print("|---|---|---|---|---|---|---|")
    for side, row in rows.items():
        theirs = torch.load(folder / f"{side}.pt", weights_only=True)
        scale = max(float(one.abs().max()) for one in ours.values())
        difference = max(float((ours[name] - theirs[name]).abs().max()) for name in ours) / scale
        print(
            f"| {side} | {row['tokens_per_cpu_s']:.0f} | {row['tokens_per_cpu_s'] / base:.2f} | {row['padding']:.3f} | "
            f"{row['micro_batches']:.0f} | {row['peak_mb']:.0f} | {difference:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
