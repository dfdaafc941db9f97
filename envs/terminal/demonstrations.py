"""Imperfect conversations about the tiny tasks, on which the tiny model is warm-started: four in ten are right."""

import json
import random
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]

RIGHT = 0.4
COMMANDS = {
    "Write 37 to number.txt.": (("echo 37 > number.txt", ""), ("echo 37 > numbers.txt", "")),
    "Sort names.txt.": (("sort -o names.txt names.txt", ""), ("sort names.txt", "Ada\nLeo\nMia")),
    "Repair add in sums.py.": (("sed -i 's/a - b/a + b/' sums.py", ""), ("sed -i 's/a + b/a - b/' sums.py", "")),
}
"""For each instruction the right command and a wrong one, with what they print."""


def demonstrations(seed: int) -> Iterator[list[Message]]:
    """Yield conversations without end: one command, right or wrong, and a last word."""
    rng = random.Random(f"terminal/demonstrations/{seed}")
    while True:
        instruction = rng.choice(list(COMMANDS))
        command, printed = COMMANDS[instruction][rng.random() >= RIGHT]
        function = {"name": "bash", "arguments": json.dumps({"command": command})}
        call: Message = {"id": "call", "type": "function", "function": function}
        yield [
            {"role": "user", "content": instruction},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call", "content": printed},
            {"role": "assistant", "content": "Done."},
        ]
