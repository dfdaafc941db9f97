"""Fills .wheels with what a GPU machine without network lacks, or has too old: packages, and the quickstart's model.

    benchmarks/gpu/wheels                # then carry the project's files and .wheels, and run benchmarks/gpu/run there

The packages are those that this project and its tests need, in the versions of constraints.txt, without THERE and what
only these need. Which of them are installed there is up to pip. The wheels are for CPython 3.12 on x86-64.
"""

import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from areal_agent.models.recipe import DEMONSTRATIONS, RECIPE, model_folder

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".wheels"
THERE = {"torch", "transformers", "numpy", "matplotlib", "tokenizers", "safetensors", "huggingface-hub"}
TOOLS = ["pytest-asyncio", "pytest-xdist", "hypothesis"]
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST_MIB = 64


def main() -> int:
    asked: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"] + TOOLS
    WHEELS.mkdir(exist_ok=True)
    for old in WHEELS.glob("*.whl"):
        old.unlink()
    (WHEELS / "requirements.txt").write_text("\n".join(asked))
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(WHEELS)]
    pip += ["--python-version", "3.12", "--implementation", "cp", "-c", str(ROOT / "constraints.txt")]
    pip += [word for one in PLATFORMS for word in ("--platform", one)]
    subprocess.run([*pip, *sorted(names_of(asked))], check=True)
    model = model_folder(RECIPE, 0, DEMONSTRATIONS)
    if not model.is_dir():
        subprocess.run([sys.executable, "-m", "areal_agent.models.tiny", "--out", str(model)], check=True)
    shutil.copytree(model, WHEELS / model.name, dirs_exist_ok=True)
    mib = sum(path.stat().st_size for path in WHEELS.rglob("*") if path.is_file()) / 2**20
    print(f"{WHEELS}: {mib:.1f} MiB of {MOST_MIB}")
    return 0 if mib <= MOST_MIB else 1


def names_of(asked: list[str]) -> set[str]:
    """Return the packages that these requirements need, and those need in turn, without what is there."""
    found, left = set[str](), [Requirement(one) for one in asked]
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        is_needed = one.marker is None or one.marker.evaluate({"extra": "", "python_version": "3.12"})
        if is_needed and name not in THERE | found:
            found.add(name)
            left += [Requirement(text) for text in requires(name) or ()]
    return found


if __name__ == "__main__":
    sys.exit(main())
