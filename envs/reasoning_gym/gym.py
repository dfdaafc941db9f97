"""What uses reasoning-gym itself, in processes of its own; this file stands alone.

`python -P gym.py` reads the arguments of `draw` as JSON from stdin and writes the tasks, or `{"error": ...}`. Processes
of envs/math/processes.py call `answer`, so that an answer which hangs or kills its scorer costs no other answer.
"""

import base64
import contextlib
import dataclasses
import difflib
import hashlib
import inspect
import json
import pickle
import random
import re
import sys
from collections.abc import Generator, Iterable
from functools import cache
from typing import Any, cast

MAX_DRAWS = 25
"""The number of questions that may be drawn for one task of a split; one in five is held out."""

OTHER_NAME = re.compile(r"\\|\b(?!(?:Abs|a?(?:cos|sin|tan)h?|cot|csc|erf|exp|ln|log|pi|sec|sqrt|[A-E]+)\b)[^\W\d]\w+")
"""What no answer needs that Python may evaluate: a name longer than a letter that is no function, or an escape."""
NAN = re.compile(r"\bnan", re.IGNORECASE)


def prepare() -> None:
    # imported here, as below: pytest reads this file also where the extra `reasoning-gym` is not installed
    import reasoning_gym  # pyright: ignore  # noqa: F401


def answer(dataset: str, entry: str, said: str | None) -> float:
    """Return the score of an answer, from 0 to 1. Raises when the task itself cannot be read."""
    scorer, evaluates = open_dataset(dataset)
    asked = load(entry)
    is_nan = said and NAN.search(said) and not NAN.search(str(asked["answer"]))  # a trick: min(1.0, NaN) is 1.0
    if is_nan or (said and evaluates and not is_formula(said)):
        said = None
    try:
        score = float(scorer.score_answer(said, asked))
    except Exception:  # the boundary: scorers raise almost anything on what they do not expect
        return 0.0
    return min(max(score, 0.0), 1.0) if score == score else 0.0


def is_formula(said: str) -> bool:
    r"""Return whether a scorer may evaluate an answer as Python, where `entry["answer"]` would be right.

    >>> is_formula("exp(2*x)/2 + C"), is_formula("[['Q', '_'], ['_', 'Q']]"), is_formula("BACDE"), is_formula("1e5-a")
    (True, True, True, True)
    >>> is_formula("entry['answer']"), is_formula("__import__('os')"), is_formula(r"S('\145\166')")
    (False, False, False)
    """
    return not OTHER_NAME.search(said)


def draw(
    split: str, seed: int, name: str, size: int, levels: list[int], params: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return `size` tasks of a split, fewer where there are not so many, in the order of levels. Raises ValueError."""
    import numpy

    tasks: list[dict[str, Any]] = []
    stages = levels or [None]
    for stage, level in enumerate(stages, start=1):
        stop = size * stage // len(stages)
        num_draws = (stop - len(tasks)) * MAX_DRAWS
        stream = random.Random(f"reasoning_gym/{name}/{level}/{seed}").getrandbits(31)
        config, dataset = make_dataset(name, level, {"seed": stream, "size": num_draws, **params})
        made = {
            "level": name if level is None else f"{name}/{level}",
            "dataset": dump((name, dataclasses.replace(config, size=1))),
        }
        for index in range(num_draws):
            random.seed(stream + index)  # some generators use these two, and not their own
            numpy.random.seed(index)
            with refusing(name, params):
                entry = dataset[index]
            if is_held_out(entry["question"]) == (split == "test"):
                tasks.append({"question": entry["question"], "answer": entry["answer"], "entry": dump(entry), **made})
            if len(tasks) == stop:
                break
    if not tasks:
        raise ValueError(f"none of {size * MAX_DRAWS} questions of {name} with {params} is in the split {split!r}")
    return tasks


def is_held_out(question: str) -> bool:
    """Return whether a question belongs to the split `test`: one in five, whatever the seed and the parameters."""
    return hashlib.sha256(question.encode()).digest()[0] < 51


def make_dataset(name: str, level: int | None, params: dict[str, Any]) -> tuple[Any, Any]:
    """Return a task's config and data set. Raises ValueError for a name, level or parameter that there is not."""
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode  # pyright: ignore
    from reasoning_gym.factory import CURRICULA, DATASETS  # pyright: ignore

    if name == "composite":
        raise ValueError("composite is not a task here; mix tasks with tasks.mix")
    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {name!r}{nearest(name, DATASETS)}")
    dataset_class, config_class = DATASETS[name]
    fields = [field.name for field in dataclasses.fields(config_class)]
    for key in params:
        if key not in fields:
            known = ", ".join(field for field in fields if field not in ("seed", "size"))
            raise ValueError(f"{name} has no parameter {key!r}{nearest(key, fields)}; it has {known or 'none'}")
    if level is None:
        with refusing(name, params):
            config = config_class(**params)
            return config, dataset_class(config)
    if name not in CURRICULA:
        raise ValueError(f"{name} has no levels; leave them out")
    curriculum = cast(Any, CURRICULA)[name]()
    num_levels = max(len(attribute.levels) for attribute in curriculum.attributes.values())
    if not 0 <= level < num_levels:
        raise ValueError(f"{name} has no level {level}; its levels are 0 to {num_levels - 1}")
    curriculum.set_global_level(level)
    with refusing(f"{name}, level {level},", params):
        given = curriculum.generate_configuration(context=DefaultCurriculumContext(RangeAttributeMode.UPPER_BOUND))
        config = dataclasses.replace(given, **params)
        return config, dataset_class(config)


@contextlib.contextmanager
def refusing(what: str, params: dict[str, Any]) -> Generator[None]:
    """Name the task and the parameters where the package raises."""
    try:
        yield
    except Exception as error:  # the boundary: the package asserts, and computes with what it is given
        given = {key: value for key, value in params.items() if key not in ("seed", "size")}
        raise ValueError(f"reasoning-gym refuses {what} with {given}: {type(error).__name__}: {error}") from error


def nearest(word: str, valid: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, valid)
    return f"; did you mean {' or '.join(found)}?" if found else ""


@cache
def open_dataset(packed: str) -> tuple[Any, bool]:
    """Return a data set, and whether its scorer evaluates the answer as Python."""
    from reasoning_gym.factory import DATASETS  # pyright: ignore

    name, config = load(packed)
    dataset = DATASETS[name][0](config)
    source = inspect.getsource(type(dataset).score_answer)
    return dataset, "eval(" in source or "parse_expr(" in source


def dump(value: object) -> str:
    """Return a value as text: entries hold tuples and fractions, which JSON would change."""
    return base64.b64encode(pickle.dumps(value)).decode()


def load(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        try:
            drawn: object = draw(**json.load(sys.stdin))
        except ValueError as error:
            drawn = {"error": str(error)}
    print(json.dumps(drawn))
