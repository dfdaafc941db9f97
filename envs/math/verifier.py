"""What a process of processes.py runs to compare answers with math-verify.

An equation whose left side has no unknown, like `2 + 3 = 5`, claims several values: each has to be right. math-verify
would take the last one, so that `4 = 5` passes for 5. Of `x = 5` the right side is the answer.
"""

import re

BOX = re.compile(r"\\boxed\{(.*)\}\s*", re.DOTALL)
EQUALS = re.compile(r"(?<![<>!:\\])=(?!=)")
COMMAND = re.compile(r"\\[a-zA-Z]+")


def prepare() -> None:
    is_right("1", "1")  # builds the parser's tables


def answer(said: str, right: str) -> bool | None:
    """Return whether `said` is right; None when `right` itself holds no expression."""
    try:
        return is_right(said, right)
    except Exception:  # the boundary: sympy raises almost anything on what is no mathematics
        return False


def is_right(said: str, right: str) -> bool | None:
    # imported here: pytest reads this file also where the extra `math` is not installed
    from math_verify import parse, verify

    expected = parse(right, parsing_timeout=None)  # pyright: ignore[reportArgumentType]  # None: no alarm of its own
    if not expected:
        return None
    claims = [parse(one, parsing_timeout=None) for one in _claims(said, right)]  # pyright: ignore[reportArgumentType]
    return all(verify(expected, claim, timeout_seconds=None) for claim in claims)


def _claims(said: str, right: str) -> list[str]:
    """Return the values that a text claims, each in a box; the text itself where that is one."""
    box = BOX.fullmatch(said)
    sides = EQUALS.split(box[1]) if box else []
    has_unknown = bool(sides) and re.search("[a-zA-Z]", COMMAND.sub("", sides[0]))
    if len(sides) < 2 or has_unknown or EQUALS.search(right):
        return [said]
    return [f"\\boxed{{{side.strip()}}}" for side in sides]
