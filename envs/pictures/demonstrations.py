"""Chats about pictures, for a model that has to learn first how an answer looks.

python -m envs.pictures.demonstrations chats.jsonl --number 400
"""

import argparse
import json
from pathlib import Path

from .tasks import load
from .workflow import asked


def write(path: Path, number: int, seed: int) -> None:
    """Write so many chats, one a line, as `areal_agent.sft` reads them."""
    with path.open("w") as file:
        for task in load("demonstrations", seed, number):
            messages = [asked(task["picture"]), {"role": "assistant", "content": task["colour"]}]
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write chats about pictures.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--number", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    write(**vars(parser.parse_args()))
